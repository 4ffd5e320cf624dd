"""How many choices one look at a model serves, and what a chooser makes of it: measured, never a repeat, never neighbours."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tktune.core.config import Config
from tktune.search.costs import Costs
from tktune.search.feasible_sampler import ModelSampler
from tktune.search.gains import GainChooser
from tktune.search.pace import Pace
from tktune.search.prior import log_prior

ROWS = [Config(A=a, B=b, C=c) for a, b, c in itertools.product(range(5), range(4), range(4))]
BUILD_OF = {row: row.only(["A", "B"]) for row in ROWS}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """A real sampler that notes how often it is looked at; each look takes `look_s` on `clock`."""

    def __init__(self, seed: int, clock: Clock, look_s: float, prior: np.ndarray | None = None) -> None:
        self._sampler, self._clock, self._look_s = ModelSampler(ROWS, seed, prior), clock, look_s
        self.looks = 0

    def __getattr__(self, name: str):
        return getattr(self._sampler, name)

    def gains(self, rows=None, unlooked=0):
        if rows is None:
            self.looks += 1
            self._clock.now += self._look_s
        return self._sampler.gains(rows, unlooked)


def us(row: Config) -> float:
    return 100.0 + 7 * abs(row.number("A") - 3) + 5 * abs(row.number("B") - 1) + 3 * abs(row.number("C") - 2)


def taken(
    look_s: float, count: int, seed: int = 0, trial_s: float = 0.02
) -> tuple[list[Config], int, Watched]:
    """`count` rows with everything built and two trials open, how many looks they took, and the sampler."""
    clock = Clock()
    sampler = Watched(seed, clock, look_s)
    costs = Costs(2)
    costs.note_trial(trial_s)
    one = GainChooser(ROWS, BUILD_OF, sampler, costs, pace=Pace(clock))
    for build in dict.fromkeys(BUILD_OF.values()):
        one.made(build)
    for row in ROWS[::9]:
        one.begin(row)
        one.tell([(row, us(row))])
    best = min(map(us, ROWS[::9]))
    found: list[Config] = []
    looks = sampler.looks
    while len(found) < count:
        row = one.measure(None, 0.0, building=False)
        assert row is not None
        one.begin(row)
        found.append(row)
        if len(found) > 2:
            ended = found[-3]
            one.tell([(ended, max(us(ended), best + 1))])  # never a new best
    return found, sampler.looks - looks, sampler


def test_on_a_clock_that_stands_still_each_choice_has_its_look():
    pace = Pace()
    for _ in range(5):
        with pace.look():
            pass
    assert pace.choices(0.001) == 1
    assert taken(0.0, 20)[1] == 20


@pytest.mark.parametrize(("look_s", "choices"), [(0.005, 1), (0.010, 1), (0.011, 2), (0.020, 2), (1.0, 3)])
def test_a_look_serves_more_choices_where_it_takes_more_of_a_trial(look_s, choices):
    clock = Clock()
    pace = Pace(clock)
    assert pace.choices(0.020) == 1  # nothing is known yet
    for _ in range(3):
        with pace.look():
            clock.now += look_s
    assert pace.choices(0.020) == choices
    pace.lanes = 2
    assert pace.choices(0.040) == choices


def test_slow_looks_serve_several_choices_that_are_not_neighbours():
    found, looks, _ = taken(1.0, 24)
    assert looks == 8
    for at in range(0, 24, 3):
        for one, other in itertools.combinations(found[at : at + 3], 2):
            assert sum(one[name] != other[name] for name in one) > 1


def test_with_fewer_looks_nothing_is_lost_of_what_is_found():
    best = sorted(ROWS, key=us)[:3]
    for seed in range(4):
        found, _, _ = taken(1.0, 30, seed)
        assert set(best) <= {*found, *ROWS[::9]}


def test_a_new_best_is_looked_at_before_the_next_choice():
    clock = Clock()
    sampler = Watched(0, clock, 1.0)
    costs = Costs(2)
    costs.note_trial(0.02)
    one = GainChooser(ROWS, BUILD_OF, sampler, costs, pace=Pace(clock))
    for build in dict.fromkeys(BUILD_OF.values()):
        one.made(build)
    for row in ROWS[::9]:
        one.begin(row)
        one.tell([(row, us(row))])
    for time_us in (50.0, 40.0, 30.0):
        before = sampler.looks
        row = one.measure(None, 0.0, building=False)
        assert sampler.looks == before + 1
        one.begin(row)
        one.tell([(row, time_us)])


def test_the_views_of_the_model_take_turns_over_looks(monkeypatch):
    from tktune.search.outlook import Outlook
    from tktune.search.pool_search import _FAST, _WHOLE

    seen = []
    look = Outlook.look

    def watched(self, *given):
        seen.append(self._view)
        return look(self, *given)

    monkeypatch.setattr(Outlook, "look", watched)
    taken(0.015, 16)  # two choices a look
    looked = [view for view, _ in itertools.groupby(seen)]
    assert len(looked) >= 7 and {*looked} == {_FAST, _WHOLE}


@given(
    seed=st.integers(0, 1000),
    look_s=st.sampled_from([0.0, 0.015, 1.0]),
    known=st.booleans(),
    ahead=st.booleans(),
    depth=st.integers(1, 4),
)
@settings(max_examples=30, deadline=None)
def test_every_row_comes_once_however_many_are_open(seed, look_s, known, ahead, depth):
    clock, draw = Clock(), np.random.default_rng(seed)
    prior = log_prior(ROWS, {row: us(row) for row in ROWS}) if known else None
    costs = Costs(2)
    costs.note_trial(0.02)
    sampler = Watched(seed, clock, look_s, prior)
    one = GainChooser(ROWS, BUILD_OF, sampler, costs, prior=prior, pace=Pace(clock))
    made: set[Config] = set()
    seen: list[Config] = []
    queue: list[Config] = []
    open_: list[Config] = []
    while len(seen) < len(ROWS):
        ready = next((row for row in queue if BUILD_OF[row] in made), None)
        if ready is not None:
            queue.remove(ready)
        row = ready or one.measure(None, 0.0, building=not ahead)
        if row is not None:
            assert BUILD_OF[row] in made
            seen.append(row)
            one.begin(row)
            open_.append(row)
            while len(open_) >= depth:
                ended = open_.pop(0)
                one.tell([(ended, None if draw.random() < 0.2 else us(ended))])
            continue
        asked = one.build(3, 0.0)
        assert asked or open_, "nothing is proposed although rows are left"
        queue += asked
        for row in asked:
            if BUILD_OF[row] not in made:
                made.add(BUILD_OF[row])
                one.made(BUILD_OF[row])
        if not asked:
            ended = open_.pop(0)
            one.tell([(ended, us(ended))])
    assert len(set(seen)) == len(seen)
