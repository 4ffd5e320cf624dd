"""Our sampler over a feasible set: never outside it, never a repeat, the same for a seed, and better than chance."""

from __future__ import annotations

import itertools

import optuna
import pytest

from tktune.core.config import Config
from tktune.search.feasible_sampler import FeasibleSampler, ModelSampler

optuna.logging.set_verbosity(optuna.logging.ERROR)
ROWS = [
    Config(A=a, B=b, STAGES=s, ORDER=o)
    for a, b, s, o in itertools.product(
        (16, 32, 64, 128), (32, 64, 96, 128, 256), (2, 3, 4), ("slot", "token")
    )
    if a * b * s <= 65536
]


def cost_us(row: Config) -> float:
    """A bowl around A=64, B=96, STAGES=3 with an order that helps."""
    a, b, s = row.number("A"), row.number("B"), row.number("STAGES")
    return 100 * (1 + abs(a - 64) / 64 + abs(b - 96) / 96 + 0.2 * (s != 3) + 0.3 * (row["ORDER"] == "slot"))


def first_to_the_bottom(seed: int) -> int:
    sampler = ModelSampler(ROWS, seed)
    for count in range(1, len(ROWS) + 1):
        (row,) = sampler.ask(1)
        sampler.tell(row, cost_us(row))
        if cost_us(row) == min(map(cost_us, ROWS)):
            return count
    raise AssertionError("the whole set was drawn without its best row")


def test_every_row_is_drawn_once_and_failures_do_not_come_back() -> None:
    sampler = ModelSampler(ROWS, 0)
    drawn: list[Config] = []
    while len(drawn) < len(ROWS):
        batch = sampler.ask(3)  # several before any is told
        drawn += batch
        for row in batch:
            sampler.tell(row, None if row["STAGES"] == 4 else cost_us(row))
    assert sorted(row.json for row in drawn) == sorted(row.json for row in ROWS)


def test_a_seed_decides_what_is_drawn() -> None:
    def drawn(seed: int) -> list[Config]:
        sampler = ModelSampler(ROWS, seed)
        rows = []
        for _ in range(20):
            rows += sampler.ask(1)
            sampler.tell(rows[-1], cost_us(rows[-1]))
        return rows

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


def test_the_best_row_is_found_sooner_than_by_chance() -> None:
    found = sorted(first_to_the_bottom(seed) for seed in range(5))
    assert found[2] < len(ROWS) / 4  # chance needs half of the set on average


def test_it_serves_a_study_of_optuna() -> None:
    sampler = FeasibleSampler(ROWS, seed=0)
    study = optuna.create_study(sampler=sampler)
    seen = set()
    for _ in range(15):
        trial = study.ask(fixed_distributions=sampler.distributions)
        row = Config(trial.params)
        assert row in ROWS and row not in seen
        seen.add(row)
        study.tell(trial, cost_us(row))


def test_rows_that_repeat_and_no_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="repeat"):
        FeasibleSampler([ROWS[0], ROWS[0]], seed=0)
    with pytest.raises(ValueError, match="at least one"):
        FeasibleSampler([], seed=0)
