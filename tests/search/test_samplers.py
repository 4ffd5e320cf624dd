"""Every sampler keeps the same promises: inside its set, never a repeat, all rows in the end, the same for a seed."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tktune.core.config import Config
from tktune.search.random import RandomSampler
from tktune.search.tpe import TpeSampler

MAKERS = [RandomSampler, TpeSampler]


def rows_of(seed: int, keep: float = 0.7) -> list[Config]:
    draw = random.Random(seed)
    everything = itertools.product((16, 32, 64, 128), (1, 2, 3, 4), ("slot", "token"))
    return [Config(A=a, B=b, ORDER=o) for a, b, o in everything if draw.random() < keep]


def cost(row: Config) -> float:
    return 10.0 + abs(row.number("A") - 64) + 3 * abs(row.number("B") - 2) + 5 * (row["ORDER"] == "slot")


@pytest.mark.parametrize("maker", MAKERS)
@given(seed=st.integers(0, 50), batch=st.integers(1, 7), failing=st.integers(1, 4))
@settings(max_examples=12, deadline=None)
def test_no_row_is_proposed_twice_or_from_outside_and_all_come_in_the_end(maker, seed, batch, failing):
    rows = rows_of(seed)
    sampler = maker(rows, seed)
    seen: list[Config] = []
    waiting: list[Config] = []
    while True:
        asked = sampler.ask(batch)
        assert len(asked) == min(batch, len(rows) - len(seen))
        if not asked:
            break
        seen += asked
        waiting += asked
        while len(waiting) > batch // 2:  # some asks stay open
            row = waiting.pop(0)
            sampler.tell(row, None if row["B"] == failing else cost(row))
    assert len(set(seen)) == len(seen) and set(seen) == set(rows)


@pytest.mark.parametrize("maker", MAKERS)
def test_rows_told_by_an_earlier_run_are_not_proposed(maker):
    rows = rows_of(1)
    sampler = maker(rows, 0)
    for index, row in enumerate(rows[:9]):
        sampler.tell(row, None if index % 3 == 0 else cost(row))
    assert not set(sampler.ask(len(rows))) & set(rows[:9])


@pytest.mark.parametrize("maker", MAKERS)
def test_the_same_seed_and_tells_give_the_same_asks(maker):
    def run() -> list[Config]:
        sampler = maker(rows_of(3), 11)
        sampler.tell(rows_of(3)[0], 12.0)
        asked: list[Config] = []
        for _ in range(6):
            some = sampler.ask(3)
            asked += some
            for row in some:
                sampler.tell(row, cost(row))
        return asked

    assert run() == run()


@pytest.mark.parametrize("maker", MAKERS)
def test_strangers_and_second_tells_are_refused(maker):
    rows = rows_of(4)
    sampler = maker(rows, 0)
    sampler.tell(rows[0], 1.0)
    with pytest.raises(ValueError, match="told before"):
        sampler.tell(rows[0], 1.0)
    with pytest.raises(ValueError, match="not in the set"):
        sampler.tell(Config(A=16, B=9, ORDER="slot"), 1.0)


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("rows", [[], [Config()], [Config(A=1)]])
def test_tiny_sets_are_no_special_case(maker, rows):
    sampler = maker(rows, 0)
    assert sampler.ask(3) == rows
    assert sampler.ask(1) == []


def test_tpe_finds_good_rows_sooner_than_chance():
    rows = [
        Config(A=a, B=b, C=c, D=d)
        for a, b, c, d in itertools.product((16, 32, 64, 128), (1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3))
    ]

    def full_cost(row: Config) -> float:
        distances = (row.number("A") // 64, row.number("B") - 2, row.number("C") - 3, row.number("D") - 1)
        return 10.0 + sum(abs(d) ** 1.5 for d in distances)

    def found_by(maker) -> float:
        total = 0.0
        for seed in range(8):
            sampler = maker(rows, seed)
            best = float("inf")
            for _ in range(40):
                (row,) = sampler.ask(1)
                sampler.tell(row, full_cost(row))
                best = min(best, full_cost(row))
            total += best
        return total / 8

    assert found_by(TpeSampler) < found_by(RandomSampler)


def test_making_a_sampler_leaves_optuna_silent(capfd):
    sampler = TpeSampler(rows_of(5), 0)
    for row in sampler.ask(5):
        sampler.tell(row, cost(row))
    assert capfd.readouterr() == ("", "")
