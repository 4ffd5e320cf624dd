"""What our sampler says to whoever weighs gain against cost: gains, predictions, neighbours, rows taken without asking."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import pytest

from tktune.core.config import Config
from tktune.search.feasible_sampler import ModelSampler

VALUES = {
    "A": (16, 32, 48, 64, 96, 128),
    "B": (1, 2, 3, 4),
    "ORDER": ("slot", "token"),
    "LANES": (1, 2, 3, 4, 5),
}
ROWS = [Config(zip(VALUES, values, strict=True)) for values in itertools.product(*VALUES.values())]


def cost(row: Config) -> float:
    us = 100 * (1 + abs(row.number("A") - 64) / 64 + 0.2 * abs(row.number("B") - 2))
    return us * (1 + 0.3 * (row["ORDER"] == "slot") + 0.1 * abs(row.number("LANES") - 4))


def told(
    count: int, scale: float = 1.0, breaks: str = "", seed: int = 0
) -> tuple[ModelSampler, list[Config]]:
    """A sampler that was told of some rows, those with order `breaks` as failures."""
    sampler = ModelSampler(ROWS, 0)
    picked = [ROWS[i] for i in np.random.default_rng(seed).permutation(len(ROWS))[:count]]
    sampler.tell_many((row, None if row["ORDER"] == breaks else scale * cost(row)) for row in picked)
    return sampler, picked


def test_gains_come_in_the_order_of_the_rows_and_seen_rows_gain_nothing():
    sampler, picked = told(40)
    (asked,) = sampler.ask(1)
    gains = sampler.gains()
    assert gains.shape == (len(ROWS),)
    assert not any(gains[ROWS.index(row)] for row in [*picked, asked])
    some = [ROWS[i] for i in (3, 200, 77, 12)] + picked[:1]
    assert sampler.gains(some) == pytest.approx([gains[ROWS.index(row)] for row in some], rel=0.05, abs=1e-6)


def test_the_row_of_the_most_gain_is_among_the_best_that_are_left():
    sampler, picked = told(60)
    left = sorted((row for row in ROWS if row not in picked), key=cost)
    assert ROWS[int(np.argmax(sampler.gains()))] in left[:5]


def test_gains_are_logarithms_so_the_unit_of_cost_does_not_matter():
    gains = [told(40, scale)[0].gains() for scale in (1.0, 1e3)]
    assert gains[0] == pytest.approx(gains[1], rel=1e-3, abs=1e-9)
    assert 0 < gains[0].max() < np.log(2)


def test_rows_that_will_fail_gain_less():
    sampler, _ = told(60, breaks="token")
    tokens, slots = ([row for row in ROWS if row["ORDER"] == order] for order in ("token", "slot"))
    assert np.argmax(sampler.gains([*tokens, *slots])) >= len(tokens)
    mean = sampler.predict([*tokens, *slots])[0]
    assert np.isfinite(mean).all()  # though nothing is known of tokens that succeed


def test_predictions_are_log_microseconds_and_know_what_was_told():
    sampler, picked = told(80)
    mean, deviation = sampler.predict(picked)
    assert mean == pytest.approx(np.log([cost(row) for row in picked]), abs=0.05)
    others = [row for row in ROWS if row not in picked]
    mean, deviation = sampler.predict(others)
    missed = np.abs(mean - np.log([cost(row) for row in others]))
    assert np.mean(missed < 3 * deviation) > 0.9
    assert np.median(missed) < 0.05


def test_telling_many_is_telling_each():
    sampler, picked = told(30)
    other = ModelSampler(ROWS, 0)
    for row in picked:
        other.tell(row, cost(row))
    assert sampler.ask(3) == other.ask(3)


def test_taken_rows_are_asked_no_more_and_may_be_told():
    sampler = ModelSampler(ROWS, 0)
    sampler.take(ROWS[7])
    assert not sampler.gains([ROWS[7]]).any()
    with pytest.raises(ValueError, match="asked or told before"):
        sampler.take(ROWS[7])
    with pytest.raises(ValueError, match="not in the set"):
        sampler.take(Config(A=1))
    sampler.tell(ROWS[7], 5.0)
    assert ROWS[7] not in sampler.ask(len(ROWS))


def test_a_row_being_measured_makes_its_neighbours_less_of_a_gain():
    sampler, _ = told(40)
    best = ROWS[int(np.argmax(sampler.gains()))]
    turns = 4  # views take turns: compare the same one
    before = sampler.gains()
    for row in [best, *ROWS[-turns + 1 :]]:
        if sampler.gains([row])[0]:
            sampler.take(row)
    near = sampler.near(best)
    indices = [ROWS.index(row) for row in near]
    assert sampler.gains(near).sum() < before[indices].sum()


def test_near_rows_are_unseen_and_differ_in_one_parameter():
    sampler, picked = told(40)
    for row in (ROWS[0], ROWS[100]):
        expected = {r for r in ROWS if sum(r[n] != row[n] for n in VALUES) == 1} - set(picked)
        assert set(sampler.near(row)) == expected


def test_strangers_are_refused_and_no_rows_gain_nothing():
    with pytest.raises(ValueError, match="not in the set"):
        told(10)[0].gains([Config(A=1)])
    with pytest.raises(ValueError, match="not in the set"):
        told(10)[0].predict([ROWS[0], Config(A=1)])
    empty = ModelSampler([], 0)
    assert empty.gains().shape == (0,) and not empty.ready
    assert told(10)[0].gains([]).shape == (0,)
    assert told(10)[0].predict([])[0].shape == (0,)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_gains_are_finite_before_there_is_a_model(count):
    sampler, _ = told(count)
    assert not sampler.ready
    assert np.isfinite(sampler.gains()).all() and sampler.gains().max() > 0


def test_before_anything_is_measured_a_prior_decides_the_gains():
    prior = np.log([cost(row) for row in ROWS])
    sampler = ModelSampler(ROWS, 0, prior)
    assert np.argmax(sampler.gains()) == np.argmin(prior)
    assert sampler.predict(ROWS)[0] == pytest.approx(prior, abs=1e-6)


def test_of_a_large_set_a_pool_is_looked_at_and_named_rows_always():
    rows = [Config(A=a, B=b, C=c) for a in range(1, 61) for b in range(1, 41) for c in range(1, 11)]
    sampler = ModelSampler(rows, 0)
    draw = np.random.default_rng(0)
    for i in draw.permutation(len(rows))[:20]:
        sampler.tell(rows[i], 10.0 + abs(rows[i].number("A") - 30) + abs(rows[i].number("B") - 20))
    gains = sampler.gains()
    assert 1000 < np.count_nonzero(gains) <= 10_000
    unlooked = [rows[i] for i in np.flatnonzero(gains == 0)[:500] if sampler.near(rows[i])]
    assert np.count_nonzero(sampler.gains(unlooked)) > 400


_LARGE = """
import itertools, resource, time
import numpy as np
from tktune.core.config import Config
from tktune.search.feasible_sampler import ModelSampler
values = {"A": range(1, 21), "B": range(1, 11), "C": range(1, 11), "D": (1, 2, 4, 8, 16), "E": range(2, 12)}
rows = [Config(zip(values, v)) for v in itertools.product(*values.values())]
assert len(rows) == 100_000
log_us = lambda row: sum(abs(np.log(row.number(n)) - 1) * k for k, n in enumerate(values, 1)) / 5
sampler = ModelSampler(rows, 0)
draw = np.random.default_rng(0)
sampler.tell_many((rows[i], float(np.exp(log_us(rows[i])))) for i in draw.permutation(len(rows))[:300])
sampler.gains()
before, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(48):
    row = rows[int(np.argmax(sampler.gains()))]
    sampler.take(row)
    sampler.tell(row, float(np.exp(log_us(row))))
print((time.process_time() - before) / 48 * 1e3, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / peak)
"""
_USUAL = """
import itertools, time, tracemalloc
from tktune.core.config import Config
from tktune.search.feasible_sampler import ModelSampler
values = {"A": range(16, 257, 16), "B": (1, 2, 4, 8), "C": (1, 2, 3, 4), "D": ("a", "b", "c"), "E": range(5)}
rows = [Config(zip(values, v)) for v in itertools.product(*values.values())]
sampler = ModelSampler(rows, 0)

def evaluate(count):
    for _ in range(count):
        (row,) = sampler.ask(1)
        us = 10.0 + abs(row["A"] - 96) + 7 * abs(row["B"] - 4) + row["E"]
        sampler.tell(row, None if (row["A"] * row["C"]) % 7 == 1 else us)

before = time.process_time()
evaluate(200)
ms = (time.process_time() - before) / 200 * 1e3
tracemalloc.start()
evaluate(120)
held = tracemalloc.get_traced_memory()[0]
evaluate(240)
print(ms, tracemalloc.get_traced_memory()[0] / held)
"""


@pytest.mark.slow
@pytest.mark.parametrize("code", [_LARGE, _USUAL], ids=["gains of 100 000 rows", "evaluations of 3840"])
def test_a_choice_takes_milliseconds_and_no_memory(code):
    """In a process of its own, so that neither tracing nor threads of linear algebra count."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment
    )
    ms, growth = map(float, found.stdout.split())
    assert ms < 20
    assert growth < 1.2
