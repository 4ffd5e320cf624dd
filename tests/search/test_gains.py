"""The chooser of gain a second, on gains that are written down: what it prefers, and what it never proposes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tktune.core.config import Config
from tktune.search.choosing import Asked
from tktune.search.costs import BuildSeconds, Costs, trial_price_s
from tktune.search.feasible_sampler import ModelSampler
from tktune.search.gains import GainChooser
from tktune.search.prior import log_prior
from tktune.search.random import RandomSampler

ROWS = [Config(TILE=tile, split=split) for tile in (16, 32, 64) for split in (1, 2)]
BUILD_OF = {row: row.only(["TILE"]) for row in ROWS}
B16, B32, B64 = (Config(TILE=tile) for tile in (16, 32, 64))


class Written:
    """A model whose gains are given; what is taken or told gains nothing any more."""

    ready = True

    def __init__(self, gains: dict[Config, float]) -> None:
        self.left = dict(gains)

    def ask(self, count: int) -> list[Config]:
        return []

    def take(self, row: Config) -> None:
        self.left[row] = 0.0

    def tell(self, row: Config, cost_us: float | None) -> None:
        self.left[row] = 0.0

    def gains(self, rows=None, unlooked=0):
        chosen = ROWS if rows is None else [ROWS[number] for number in rows]
        return np.array([self.left.get(row, 0.0) for row in chosen])

    def near_number(self, number: int):
        return np.zeros(0, np.int64)


def costs(build_s: float = 10.0, load_s: float = 0.0, trial_s: float = 1.0, jobs: int = 2) -> Costs:
    found = Costs(jobs, dict.fromkeys((B16, B32, B64), build_s))
    found.note_load(load_s)
    found.note_trial(trial_s)
    return found


def chooser(gains: dict[tuple[int, int], float], what: Costs, made=(), held=()) -> GainChooser:
    written = {Config(TILE=tile, split=split): gain for (tile, split), gain in gains.items()}
    found = GainChooser(ROWS, BUILD_OF, Written(written), what, held)
    for build in made:
        found.made(build)
    return found


def test_of_what_is_made_the_most_gain_comes_first():
    one = chooser({(16, 1): 0.01, (32, 2): 0.03}, costs(), made=(B16, B32))
    assert one.measure(None, 0.0, building=False) == Config(TILE=32, split=2)


@pytest.mark.parametrize(("load_s", "tile"), [(0.1, 32), (5.0, 16)])
def test_a_dear_load_keeps_it_with_what_is_loaded(load_s, tile):
    one = chooser({(16, 1): 0.01, (32, 2): 0.03}, costs(load_s=load_s), made=(B16, B32))
    assert one.measure(B16, 0.0, building=False)["TILE"] == tile


@pytest.mark.parametrize(("build_s", "builds"), [(1.0, True), (100.0, False)])
def test_a_build_is_made_when_it_gains_more_a_second_than_what_is_there(build_s, builds):
    one = chooser({(16, 1): 0.01, (64, 1): 0.05}, costs(build_s), made=(B16,))
    assert (one.measure(None, 0.0, building=True) is None) is builds
    assert one.build(1, 0.0) == [Config(TILE=64, split=1)]


def test_where_builds_cost_no_measuring_they_are_no_rivals():
    one = chooser({(16, 1): 0.0001, (64, 1): 0.05}, costs(1.0), made=(B16,))
    assert one.measure(None, 0.0, building=False) == Config(TILE=16, split=1)


def test_an_artifact_of_an_earlier_run_costs_nothing():
    gains = {(16, 1): 0.01, (32, 1): 0.02, (64, 1): 0.03}
    assert chooser(gains, costs(100.0), made=(B16,)).build(1, 0.0) == [Config(TILE=64, split=1)]
    held = chooser(gains, costs(100.0), made=(B16,), held=(B32,))
    assert held.measure(None, 0.0, building=True) is None
    assert held.build(1, 0.0) == [Config(TILE=32, split=1)]


def test_where_trials_are_scarce_a_small_gain_waits_for_the_build_under_way():
    gains = {(16, 1): 0.001, (64, 1): 0.05}
    plenty, scarce = chooser(gains, costs(), made=(B16,)), chooser(gains, costs(), made=(B16,))
    for one in (plenty, scarce):
        assert one.build(1, 0.0) == [Config(TILE=64, split=1)]
    assert plenty.measure(None, 0.0, building=False) == Config(TILE=16, split=1)
    assert scarce.measure(None, 100.0, building=False) is None


def test_builds_proposed_together_differ():
    gains = {(tile, split): tile / 100 + split / 1000 for tile in (16, 32, 64) for split in (1, 2)}
    found = chooser(gains, costs()).build(9, 0.0)
    assert [row["TILE"] for row in found] == [64, 32, 16]


def test_a_dropped_or_begun_row_is_never_chosen():
    gains = {(16, 1): 0.03, (16, 2): 0.02, (32, 1): 0.01}
    one = chooser(gains, costs(), made=(B16, B32))
    one.drop([Config(TILE=16, split=1)])
    one.begin(Config(TILE=16, split=2))
    assert one.measure(None, 0.0, building=False) == Config(TILE=32, split=1)


class Neighbourly(Written):
    """As `Written`, where every row with a gain below a thousandth is near the best."""

    def near_number(self, number: int):
        return np.array([ROWS.index(one) for one, gain in self.left.items() if 0 < gain < 1e-3], np.int64)


@pytest.mark.parametrize("building", [True, False])
def test_neighbours_that_promise_nothing_do_not_keep_it_from_what_promises_most(building):
    """A turn among the neighbours of the best is no reason to build while other made rows are worth their time."""
    gains = {(16, 1): 0.03, (16, 2): 1e-7, (32, 1): 0.02, (32, 2): 2e-7, (64, 1): 1e-4}
    model = Neighbourly({Config(TILE=tile, split=split): gain for (tile, split), gain in gains.items()})
    one = GainChooser(ROWS, BUILD_OF, model, costs(10.0))
    one.made(B16)
    one.made(B32)
    one.tell([(Config(TILE=64, split=2), 100.0)])
    chosen = [one.measure(None, 0.0, building=building) for _ in range(8)]
    assert None not in chosen


def test_a_neighbour_worth_its_time_has_its_turn_before_rows_that_promise_more():
    gains = {(16, 1): 0.03, (16, 2): 1e-4, (32, 1): 0.02}
    model = Neighbourly({Config(TILE=tile, split=split): gain for (tile, split), gain in gains.items()})
    one = GainChooser(ROWS, BUILD_OF, model, costs(10.0))
    one.made(B16)
    one.made(B32)
    one.tell([(Config(TILE=64, split=2), 100.0)])
    assert [one.measure(None, 0.0, building=True)["split"] for _ in range(4)].count(2) == 1


@given(seed=st.integers(0, 1000), kind=st.sampled_from(["model", "prior", "random"]), ahead=st.booleans())
@settings(max_examples=25, deadline=None)
def test_every_row_comes_once_whatever_becomes_of_the_others(seed, kind, ahead):
    rows = [Config(A=a, B=b, split=s) for a, b, s in itertools.product(range(4), range(3), range(3))]
    build_of = {row: row.only(["A", "B"]) for row in rows}
    draw = np.random.default_rng(seed)
    if kind == "random":
        one = Asked(RandomSampler(rows, seed), build_of)
    else:
        estimates = {row: 1.0 + row.number("A") for row in rows} if kind == "prior" else None
        prior = None if estimates is None else log_prior(rows, estimates)
        one = GainChooser(rows, build_of, ModelSampler(rows, seed, prior), Costs(2), prior=prior)
    made: set[Config] = set()
    seen: list[Config] = []

    def ended(row: Config) -> None:
        seen.append(row)
        one.begin(row)
        one.tell([(row, None if draw.random() < 0.2 else 10.0 + float(draw.random()))])

    while len(seen) < len(rows):
        row = one.measure(None, 0.0, building=not ahead)
        if row is not None:
            assert build_of[row] in made
            ended(row)
            continue
        asked = one.build(3, 0.0)
        assert asked, "nothing is proposed although rows are left"
        for row in asked:
            if build_of[row] not in made:
                made.add(build_of[row])
                one.made(build_of[row])
            ended(row)
    assert len(set(seen)) == len(seen)


def test_compiles_are_learnt_by_their_parameters():
    seconds = BuildSeconds()
    for stages, tile in itertools.product((1, 2, 3), (16, 32, 64)):
        if (stages, tile) != (3, 64):
            seconds.note(Config(STAGES=stages, TILE=tile), 2.0 * stages * tile)
    assert seconds.of(Config(STAGES=3, TILE=64)) == pytest.approx(384.0, rel=0.5)
    assert seconds.of(Config(STAGES=3, TILE=64)) > seconds.of(Config(STAGES=2, TILE=64))
    assert BuildSeconds().of(B16) > 0
    assert Costs(4, {B16: 8.0}).build_share_s(B16) == pytest.approx(2.0)


def test_a_trial_has_a_price_where_trials_run_out_before_seconds():
    assert trial_price_s(10, 100.0, 1.0) == 9.0
    assert trial_price_s(1000, 100.0, 1.0) == 0.0
    assert (
        trial_price_s(None, 100.0, 1.0) == trial_price_s(10, None, 1.0) == trial_price_s(0, 5.0, 1.0) == 0.0
    )


@pytest.mark.parametrize("seed", range(5))
def test_many_compilers_take_the_prior_at_its_word_with_half_of_their_first_builds(seed):
    rows = [Config(A=a, B=b, split=s) for a, b, s in itertools.product(range(12), range(5), range(2))]
    build_of = {row: row.only(["A", "B"]) for row in rows}
    draw = np.random.default_rng(seed)
    expected = {
        build: float(us)
        for build, us in zip(dict.fromkeys(build_of.values()), draw.permutation(60) + 1.0, strict=True)
    }
    prior = log_prior(rows, {row: expected[build_of[row]] for row in rows})
    one = GainChooser(rows, build_of, ModelSampler(rows, seed, prior), Costs(32), prior=prior)
    builds = [build_of[row] for row in one.build(26, 0.0)]
    ranks = {sorted(expected.values()).index(expected[build]) for build in builds}
    assert set(range(10)) <= ranks, "the ten best of the prior are among 26 builds"
    assert max(ranks) > 30, "others look elsewhere"
