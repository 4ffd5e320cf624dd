"""What a lane does on its own thread: measure a config, join the other lanes, measure its noise. Files nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from statistics import fmean, median

from tktune.core import status
from tktune.core.config import Config
from tktune.core.errors import GangError
from tktune.gang.noise import NoiseFloor, noise_floor
from tktune.gang.trial import TrialResult
from tktune.search.budget import Budget
from tktune.search.judging import LEAST_BAND
from tktune.search.lanes import Lane
from tktune.search.ledger import Ledger
from tktune.search.measuring import Bench, slowest_by_seed, slowest_rank_us
from tktune.search.place import BuildPlace
from tktune.search.racing import trimmed

# The default against itself, interleaved: comparisons, rounds of each, launches in a round.
_COMPARISONS, _ROUNDS, _ITERATIONS = 3, 2, 2
NOISE_LAUNCHES = _COMPARISONS * 2 * _ROUNDS * _ITERATIONS
LAUNCHES_OF_A_HALF = _ROUNDS * _ITERATIONS


def trial_work(
    config: Config, place: BuildPlace, bench: Bench, ledger: Ledger, budget: Budget, *, is_default: bool
) -> Callable[[Lane], TrialResult]:
    """Measure `config`, in a race with the best config of now unless it is the default. Look for drift before when that is
    due, and after a time that the noise does not explain."""
    best_us, margin = ledger.best_us, ledger.margin
    rival = () if ledger.best is None else ledger.first_us.get(ledger.best, ())
    sigma, factor, artifact = margin.sigma, margin.value, place.artifact
    noise = max(LEAST_BAND, margin.noise(bench.plan.iterations))
    assert artifact is not None

    def work(lane: Lane) -> TrialResult:
        if lane.watch.due(budget.run_s):
            lane.watch.look(sigma, budget.run_s)
            lane.loaded = None
        drift = lane.watch.factor
        plan = dataclasses.replace(
            bench.plan,
            race_limit_us=None if is_default or best_us is None else best_us * drift,
            race_us=tuple(one * drift for one in rival),
            race_margin=factor,
        )
        result = bench.measure(lane.gang, config, place.build, artifact, plan, lane.marking(place.build))
        lane.watch.ended()
        if result.status == status.OK:
            us = slowest_rank_us(result)
            lane.watch.passed(config, place, us, is_default=is_default, now_s=budget.run_s)
            if best_us is not None and not is_default and score_us(result) / drift < best_us * (1 - noise):
                lane.watch.look(sigma, budget.run_s)  # is it the config that is so fast, or the machine?
                lane.loaded = None
        return result

    return work


def join_work(
    config: Config, place: BuildPlace, us: Sequence[float], budget: Budget
) -> Callable[[Lane], None]:
    """Measure the anchor, which took `us` on the first lane, so that this lane's times can be compared with its."""

    def work(lane: Lane) -> None:
        if lane.watch.adopt(config, place, us, budget.run_s):
            lane.say_offset(config)

    return work


def noise_work(config: Config, seed: int) -> Callable[[Lane], NoiseFloor | None]:
    """Measure the loaded `config` against itself, so that it is known how far equal configs lie apart."""

    def work(lane: Lane) -> NoiseFloor | None:
        try:
            return noise_floor(
                lane.gang, config, seed=seed, comparisons=_COMPARISONS, rounds=_ROUNDS, iterations=_ITERATIONS
            )
        except GangError as error:
            lane.said.append(("noise", str(error), {}))
            return None

    return work


def score_us(result: TrialResult) -> float:
    """A trial's time in microseconds, outliers on the slow side left out; what is stored is the plain median.

    For `ok` and `censored` alone.
    """
    if result.status != status.OK:
        assert result.time_us is not None
        return result.time_us
    return fmean(median(trimmed(us)) for us in slowest_by_seed(result).values())
