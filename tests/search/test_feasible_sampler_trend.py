"""A prior as a trend: it comes first, says where its basins are, may know little, and is unlearnt when it is wrong."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tktune.search.coordinates import FeasibleRows
from tktune.search.kernel import Kernel
from tktune.search.kernel import prior as kernel_prior
from tktune.search.pool_search import PoolSearch
from tktune.search.trend import Trend

CODES = np.array(list(itertools.product(range(6), range(5), range(4), range(3))))
ROWS = FeasibleRows([[1, 2, 4, 8, 16, 32], [1, 2, 3, 4, 5], [2, 4, 6, 8], ["a", "b", "c"]], CODES)
MIDDLE = np.array([3, 1, 2, 1])
LOG_COST = 0.3 * np.abs(CODES - MIDDLE).sum(axis=1) + 0.2 * ((CODES[:, 0] + CODES[:, 1]) % 2)


def best_after(evaluations: int, prior: np.ndarray | None, seed: int) -> float:
    """How far in log cost the best found is from the best there is."""
    search = PoolSearch(ROWS, seed, prior)
    seen = []
    for _ in range(evaluations):
        seen.append(search.choose())
        search.tell(seen[-1], float(np.exp(LOG_COST[seen[-1]])))
    return float(LOG_COST[seen].min() - LOG_COST.min())


def test_basins_are_the_rows_better_than_all_their_neighbours():
    prior = np.random.default_rng(0).standard_normal(len(ROWS))
    found = Trend(ROWS, prior).basins
    expected = [row for row in range(len(ROWS)) if prior[row] <= prior[ROWS.neighbours(row)].min()]
    assert list(found) == sorted(expected, key=lambda row: prior[row])


def test_of_equal_rows_one_is_a_basin():
    plateau = Trend(ROWS, np.where(CODES[:, 0] == 2, 0.0, 1.0) + 0.0 * LOG_COST)
    assert len(plateau.basins) == 1


def test_a_prior_without_differences_is_none():
    assert Trend(ROWS, np.full(len(ROWS), 3.0)).expected is None
    assert Trend(ROWS, np.full(len(ROWS), np.nan)).expected is None
    flat, without = PoolSearch(ROWS, 0, np.zeros(len(ROWS))), PoolSearch(ROWS, 0)
    assert [flat.choose() for _ in range(5)] == [without.choose() for _ in range(5)]


def test_a_prior_of_another_set_is_refused():
    with pytest.raises(ValueError, match="does not fit"):
        Trend(ROWS, np.zeros(3))


def test_a_good_prior_helps_and_its_unit_of_time_does_not_matter():
    noisy = LOG_COST + 0.15 * np.random.default_rng(1).standard_normal(len(ROWS))
    with_it = [best_after(12, noisy, seed) for seed in range(6)]
    without = [best_after(12, None, seed) for seed in range(6)]
    assert np.mean(with_it) < np.mean(without)
    scaled = PoolSearch(ROWS, 0, noisy + 7.0), PoolSearch(ROWS, 0, noisy)
    for _ in range(10):
        rows = [search.choose() for search in scaled]
        assert rows[0] == rows[1]
        for search, row in zip(scaled, rows, strict=True):
            search.tell(row, float(np.exp(LOG_COST[row])))


@pytest.mark.parametrize("kind", ["reversed", "noise"])
def test_a_wrong_prior_is_unlearnt(kind):
    draw = np.random.default_rng(2)
    wrong = -LOG_COST if kind == "reversed" else draw.permutation(LOG_COST)
    assert np.mean([best_after(40, wrong, seed) for seed in range(6)]) < 0.05


def test_few_evaluations_follow_a_reversed_prior():
    """The second row is a middling one; when it is faster, the prior's other favourites are left alone."""
    search = PoolSearch(ROWS, 0, -LOG_COST)
    seen = []
    for _ in range(10):
        seen.append(search.choose())
        search.tell(seen[-1], float(np.exp(LOG_COST[seen[-1]])))
    slowest_tenth = np.quantile(LOG_COST, 0.9)
    assert sum(LOG_COST[seen] >= slowest_tenth) <= 4


def test_a_default_that_was_measured_before_does_not_stand_for_the_prior():
    """However slow it is, the prior's favourites come next, a middling row among them."""
    slowest = int(np.argmax(LOG_COST))
    prior = LOG_COST + np.random.default_rng(4).random(len(ROWS))
    search = PoolSearch(ROWS, 0, prior)
    search.tell(slowest, float(np.exp(LOG_COST[slowest])))
    seen = []
    for _ in range(4):
        seen.append(search.choose())
        search.tell(seen[-1], float(np.exp(LOG_COST[seen[-1]])))
    assert [seen[0], *seen[2:]] == list(Trend(ROWS, prior).basins[:3])
    assert 0.3 < np.mean(prior < prior[seen[1]]) < 0.7


def test_a_prior_of_one_basin_spreads_the_rest_of_the_opening_over_its_best_rows():
    assert len(Trend(ROWS, LOG_COST).basins) < 3
    search = PoolSearch(ROWS, 0, LOG_COST)
    seen = []
    for _ in range(6):
        seen.append(search.choose())
        search.tell(seen[-1], float(np.exp(LOG_COST[seen[-1]])))
    fast = np.quantile(LOG_COST, 0.2) > LOG_COST
    assert sum(fast[seen]) >= 4


def test_measurements_overrule_what_a_reversed_prior_expects():
    search = PoolSearch(ROWS, 0, -LOG_COST)
    for row in np.random.default_rng(3).permutation(len(ROWS))[:40]:
        search.tell(int(row), float(np.exp(LOG_COST[row])))
    mean, _ = search.predict(np.arange(len(ROWS)))
    assert np.corrcoef(mean, LOG_COST)[0, 1] > 0.9


def test_rows_without_an_estimate_stand_in_the_slow_half():
    prior = np.where(CODES[:, 3] == 2, np.nan, LOG_COST)
    trend = Trend(ROWS, prior)
    known = CODES[:, 3] != 2
    assert (trend.expected[~known] > np.median(trend.expected[known])).all()
    assert CODES[trend.foremost[0], 3] != 2


def test_what_a_prior_misses_is_smooth_in_sizes_and_abrupt_between_choices():
    def alike(one: int, other: int, *, of_misses: bool) -> float:
        theta, _ = kernel_prior(ROWS, of_misses=of_misses)
        return float(Kernel(ROWS, theta).from_row(one, [other])[0])

    row = 0
    other_choice = int(np.flatnonzero((CODES[row] + [0, 0, 0, 1] == CODES).all(axis=1))[0])
    other_size = int(np.flatnonzero((CODES[row] + [1, 0, 0, 0] == CODES).all(axis=1))[0])
    assert alike(row, other_choice, of_misses=True) < 0.85 * alike(row, other_choice, of_misses=False)
    assert alike(row, other_size, of_misses=True) > alike(row, other_size, of_misses=False)


@pytest.mark.parametrize("seed", range(4))
def test_a_prior_that_is_wrong_about_a_choice_alone_is_soon_put_right(seed):
    wrong = LOG_COST + 0.9 * (CODES[:, 3] == MIDDLE[3])
    assert best_after(25, wrong, seed) < 0.15


def test_agreement_is_a_rank_correlation_and_silence_is_no_disagreement():
    trend = Trend(ROWS, LOG_COST)
    some = [int(row) for row in np.random.default_rng(5).permutation(len(ROWS))[:20]]
    assert trend.agreement({row: float(LOG_COST[row]) ** 3 for row in some}) > 0.99
    assert trend.agreement({row: -float(LOG_COST[row]) for row in some}) < -0.99
    assert trend.agreement({}) == trend.agreement({some[0]: 1.0}) == 1.0
    assert trend.agreement(dict.fromkeys(some, 2.0)) == 1.0
    assert Trend(ROWS, None).agreement({row: float(row) for row in some}) == 1.0


@pytest.mark.parametrize("wrong", [True, False])
def test_a_model_without_the_prior_decides_where_its_order_is_reversed(wrong):
    """Three turns of four are those of a search that never had a prior and was told the same."""
    prior = (-LOG_COST if wrong else LOG_COST) + 0.3 * np.random.default_rng(6).random(len(ROWS))
    with_it, without = PoolSearch(ROWS, 0, prior), PoolSearch(ROWS, 0)
    for row in np.random.default_rng(7).permutation(len(ROWS))[:20]:
        for search in (with_it, without):
            search.tell(int(row), float(np.exp(LOG_COST[row])))
    same = []
    for _ in range(5):
        gains = [search.gains() for search in (with_it, without)]
        same.append(bool(np.allclose(*gains)))
        row = int(np.argmax(gains[1]))
        for search in (with_it, without):
            search.tell(row, float(np.exp(LOG_COST[row])))
    assert same == [wrong and (20 + turn) % 4 != 3 for turn in range(5)]
