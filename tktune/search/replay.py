"""`replay`: the driver, unchanged, over a recorded space on a virtual clock, and what its choice is truly worth.

The store is in memory and goes with the replay: nothing replayed is ever served.
"""

from __future__ import annotations

import dataclasses
import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tktune.core.config import Config
from tktune.search.budget import StopSignal
from tktune.search.driver import tune
from tktune.search.effort import Effort
from tktune.search.events import Listener
from tktune.search.recording import Recording
from tktune.search.replay_rooms import (
    Disturbance,
    ReplayBuilder,
    ReplayCache,
    ReplayFamily,
    ReplayGang,
    VirtualClock,
    true_us,
)
from tktune.search.results import Rooms, TuneResult
from tktune.search.sampler import SamplerMaker
from tktune.search.study import Study


@dataclass(frozen=True)
class Replayed:
    """What a replay came to, beside the truth. Times in microseconds, without noise or drift.

    `winner_us` is None without a winner. `optimum_us` is the best of the configs that the search could have: within its
    pins, and not made to fail. `charged_s` is the virtual clock at the end; `build_s` sums the compiles, `run_s` the
    seconds of the gang.
    """

    result: TuneResult
    winner_us: float | None
    optimum: Config
    optimum_us: float
    default_us: float | None
    charged_s: float
    build_s: float
    run_s: float

    @property
    def gap(self) -> float | None:
        """How much slower the winner truly is than the optimum, as a fraction."""
        return None if self.winner_us is None else self.winner_us / self.optimum_us - 1


def study_of(recording: Recording, profile: Effort, seed: int = 0) -> Study:
    """The study that a replay of `recording` runs when nobody wrote one."""
    return on_recording(
        Study(
            name=recording.name,
            family=recording.problem.family,
            device="recorded",
            problems=(recording.problem,),
            trials=profile.trials,
            seconds=profile.seconds,
            seed=seed,
            finalists=profile.finalists,
            rounds=profile.rounds,
            stop_early=profile.stop_early,
        ),
        recording,
    )


def on_recording(study: Study, recording: Recording) -> Study:
    """`study` with its budget, pins and starts, on the recording's problem, device and policy."""
    return dataclasses.replace(
        study,
        family=recording.problem.family,
        device="recorded",
        problems=(recording.problem,),
        policy_changes=recording.policy.key | {"routing_seeds": recording.policy.routing_seeds},
    )


def replay(
    recording: Recording,
    study: Study,
    *,
    disturbance: Disturbance | None = None,
    listener: Listener | None = None,
    stop: StopSignal | None = None,
    clock: VirtualClock | None = None,
    make_sampler: SamplerMaker | None = None,
    store_url: str = "sqlite://",
) -> Replayed:
    """Tune `study` (of `study_of` or `on_recording`) against `recording`; the same words give the same answer.

    >>> recording = read_recording(Path("space.json.xz"))                          # doctest: +SKIP
    >>> replay(recording, study_of(recording, PROFILES["quick"])).gap              # doctest: +SKIP
    0.004

    Raises what `tune` raises.
    """
    disturbance, clock = disturbance or Disturbance(), clock or VirtualClock()
    gangs: list[ReplayGang] = []

    def make_gang(*_: Any, **__: Any) -> Any:
        gangs.append(ReplayGang(recording, disturbance, clock))
        return gangs[-1]

    rooms = Rooms(
        make_gang=make_gang,
        make_sampler=make_sampler,
        make_builder=functools.partial(ReplayBuilder, clock=clock, jobs=recording.build_jobs),
        family=lambda name: ReplayFamily(recording),
        clock=clock,
        seats=lambda problem, device: [tuple(range(problem.world))],
        overlap=False,
    )
    with tempfile.TemporaryDirectory(prefix="tktune-replay-") as folder:
        cache: Any = ReplayCache(recording, Path(folder))
        (result,) = tune(
            study,
            store_url,
            cache,
            listener=listener,
            stop=stop,
            rooms=rooms,
            device=recording.device,
        )
    optimum, optimum_us = _optimum(recording, study, disturbance)
    return Replayed(
        result,
        None if result.winner is None else true_us(recording, result.winner),
        optimum,
        optimum_us,
        true_us(recording, result.default),
        clock.now,
        cache.build_s,
        sum(gang.run_s for gang in gangs),
    )


def _optimum(recording: Recording, study: Study, disturbance: Disturbance) -> tuple[Config, float]:
    """The best config that a perfect search would have chosen."""
    space = recording.space()
    space = space.restrict(study.pins) if study.pins else space
    times = {config: true_us(recording, config) for config in space.feasible}
    timed = {config: us for config, us in times.items() if us is not None}
    passing = {config: us for config, us in timed.items() if disturbance.lets_pass(config)}
    left = passing or timed or {recording.optimum.config: recording.optimum.time_us or 0.0}
    best = min(left, key=lambda config: (left[config], config.digest))
    return best, left[best]
