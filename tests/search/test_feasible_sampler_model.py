"""The model behind our sampler: coordinates, slopes, updates against the whole, large sets, memory and time."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from tktune.search import surrogate as surrogate_module
from tktune.search.acquisition import log_expected_improvement
from tktune.search.coordinates import FeasibleRows
from tktune.search.kernel import Kernel, prior
from tktune.search.minimise import minimise
from tktune.search.pool_search import PoolSearch
from tktune.search.success import SuccessModel
from tktune.search.surrogate import Surrogate

VALUES = [list(range(32, 256, 8)), [1, 2, 4, 8], [0, 1, 2], ["a", "b", "c"], [0, 1], [7]]


def some_rows(keep: float = 0.5, seed: int = 0) -> FeasibleRows:
    codes = np.array(list(itertools.product(*(range(len(v)) for v in VALUES))))
    return FeasibleRows(VALUES, codes[np.random.default_rng(seed).random(len(codes)) < keep])


def test_features_say_how_values_differ():
    kinds = [(f.parameter, f.kind) for f in some_rows().features]
    assert kinds == [
        (0, "position"),
        (0, "alignment"),
        (1, "position"),
        (2, "position"),
        (2, "choice"),
        (3, "choice"),
        (4, "choice"),
    ]


def test_neighbours_are_the_rows_that_differ_in_one_parameter():
    rows = some_rows()
    for row in (0, 17, len(rows) - 1):
        apart = (rows.codes != rows.codes[row]).sum(axis=1)
        assert sorted(rows.neighbours(row)) == list(np.flatnonzero(apart == 1))


def test_the_slope_of_the_fit_is_that_of_its_value(monkeypatch):
    rows, draw = some_rows(), np.random.default_rng(1)
    observed = [int(row) for row in draw.choice(len(rows), 30, replace=False)]
    checked = []

    def check(value_and_slope, start, steps, *, lower, upper):
        at = start + 0.3 * draw.standard_normal(len(start))
        slope = value_and_slope(at)[1]
        for i, unit in enumerate(np.eye(len(at)) * 1e-5):
            difference = (value_and_slope(at + unit)[0] - value_and_slope(at - unit)[0]) / 2e-5
            assert slope[i] == pytest.approx(difference, abs=1e-4)
        checked.append(len(at))
        return at

    monkeypatch.setattr(surrogate_module, "minimise", check)
    surrogate_module.fit(
        rows, observed, draw.standard_normal(30), np.full((len(rows), 1), 2.0)[observed], *start(rows)
    )
    assert checked


def start(rows: FeasibleRows):
    belief = prior(rows)
    return belief[0], belief


def test_observations_one_by_one_come_to_what_all_at_once_give():
    rows, draw = some_rows(), np.random.default_rng(2)
    observed = [int(row) for row in draw.choice(len(rows), 40, replace=False)]
    y = draw.standard_normal(40)
    trend = np.full((len(rows), 1), 2.0)
    pool = np.arange(len(rows))
    hot = rows.one_hot(pool, np.float32)
    model = Surrogate(rows, prior(rows))
    model.learn(observed[:10], y[:10], trend[:10], briefly=False)
    model.condition(observed[:10], trend, pool, hot)
    model.follow([*observed[:10], *observed[20:25]])  # then those turn out otherwise
    model.follow(observed)
    mean, deviation = model.predict(y)
    assert model.mean_rows(pool, y) == pytest.approx(mean, abs=2e-3)
    for got, again in zip((mean, deviation), model.predict_rows(pool, y), strict=True):
        assert got == pytest.approx(again, abs=2e-3)

    kernel = Kernel(rows, model._theta)
    own, every = rows.one_hot(observed), rows.one_hot(pool)
    k = kernel.between(own, own) + 4 + kernel.nugget * np.eye(40)
    cross = kernel.between(own, every) + 4
    assert mean == pytest.approx(cross.T @ np.linalg.solve(k, y), abs=2e-3)
    variance = 5 + kernel.nugget - np.einsum("ij,ij->j", cross, np.linalg.solve(k, cross))
    scale = (2 + y @ np.linalg.solve(k, y)) / 42
    assert deviation**2 == pytest.approx(np.maximum(variance, 0) * scale, abs=2e-3)
    assert kernel.from_row(observed[0], pool) == pytest.approx(kernel.between(own[:1], every)[0])


@pytest.mark.parametrize("counts", [(10, 40), (25, 29, 40), (3, 40)])
def test_observations_that_come_together_are_worth_those_that_come_one_by_one(counts):
    rows, draw = some_rows(), np.random.default_rng(3)
    observed = [int(row) for row in draw.choice(len(rows), 45, replace=False)]
    y = draw.standard_normal(45)
    trend = np.column_stack([np.full(len(rows), 2.0), draw.standard_normal(len(rows))])
    pool = np.arange(len(rows))
    hot = rows.one_hot(pool, np.float32)
    one, together = Surrogate(rows, prior(rows)), Surrogate(rows, prior(rows))
    for model in (one, together):
        model.condition(observed[: counts[0]], trend, pool, hot)
    for count in range(counts[0], 45):
        one.follow(observed[: count + 1])
    for count in counts[1:]:
        together.follow([*observed[:count], *observed[42:]])  # then those turn out otherwise
        together.follow(observed[:count])
    together.follow(observed)
    assert together.observed == one.observed
    for got, expected in zip(together.predict(y), one.predict(y), strict=True):
        assert got == pytest.approx(expected, abs=2e-3)
    for got, expected in zip(together.predict_rows(pool, y), one.predict_rows(pool, y), strict=True):
        assert got == pytest.approx(expected, abs=1e-8)


def test_expected_improvement_is_right_near_and_far():
    z = np.array([3.0, 1.0, 0.0, -1.0, -3.5, -4.5, -8.0])
    expected = [
        z_ * 0.5 * math.erfc(-z_ / math.sqrt(2)) + math.exp(-z_ * z_ / 2) / math.sqrt(2 * math.pi) for z_ in z
    ]
    assert log_expected_improvement(-z, np.ones(7), 0.0)[:6] == pytest.approx(np.log(expected)[:6], abs=0.03)
    far = log_expected_improvement(np.array([8.0, 80.0, 800.0]), np.ones(3), 0.0)
    assert np.isfinite(far).all() and (np.diff(far) < 0).all()


def test_the_success_model_learns_a_limit_on_a_product():
    sizes = [1, 2, 4, 8, 16, 32]
    codes = np.array(list(itertools.product(range(6), range(6), range(4))))
    rows = FeasibleRows([sizes, sizes, [1, 2, 3, 4]], codes)
    fits = codes[:, 0] + codes[:, 1] <= 6
    seen = [int(row) for row in np.random.default_rng(0).choice(len(rows), 30, replace=False)]
    probability = SuccessModel(rows).probability(
        seen, fits[seen], rows.one_hot(np.arange(len(rows)), np.float32)
    )
    assert ((probability > 0.5) == fits).mean() > 0.9


def test_minimise_finds_the_bottom_within_bounds():
    def bowl(x):
        return float((x[0] - 3) ** 2 + 10 * (x[1] - x[0]) ** 2), np.array(
            [2 * (x[0] - 3) - 20 * (x[1] - x[0]), 20 * (x[1] - x[0])]
        )

    free = minimise(bowl, np.zeros(2), 50, lower=np.full(2, -9.0), upper=np.full(2, 9.0))
    assert free == pytest.approx([3, 3], abs=0.05)
    bounded = minimise(bowl, np.zeros(2), 50, lower=np.full(2, -9.0), upper=np.full(2, 1.0))
    assert bounded == pytest.approx([1, 1], abs=0.05)


def times(codes: np.ndarray) -> np.ndarray:
    middle = (codes.max(axis=0) + codes.min(axis=0)) // 2
    return 10 + np.abs(codes.astype(int) - middle).sum(axis=1)


@pytest.mark.slow
def test_more_than_a_million_rows_are_searched_through_a_drawn_pool():
    codes = np.stack(np.unravel_index(np.arange(2**20 + 5), (128, 16, 16, 40)), axis=1)
    rows = FeasibleRows(
        [list(range(1, 129)), list(range(1, 17)), list(range(1, 17)), list(range(1, 41))], codes
    )
    search, cost = PoolSearch(rows, 0), times(codes)
    seen = []
    for _ in range(40):
        seen.append(search.choose())
        search.tell(seen[-1], float(cost[seen[-1]]))
    assert len(set(seen)) == 40
    assert all(len(outlook.pool.members) <= 10_000 for outlook in search._outlooks.values())
    assert (cost < cost[seen].min()).mean() < 1e-4  # chance alone comes to 1 / 40
