"""One trial of one config: load, gate, time a little, race, time the rest, gate again. The gang does the work.

Nothing here chooses configs, writes rows or builds artifacts.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tktune.core import status
from tktune.core.config import Config
from tktune.core.errors import GangError
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.core.routing import GATE_ROUTINGS
from tktune.gang.gang import Gang, Outcome
from tktune.gang.verdict import worst_error

# How far above the incumbent's time the best of the first samples must lie for a config to stop there.
RACE_MARGIN = 1.5
RECHECK_SEED = 7919  # added to the seed, so that the gate after timing sees inputs that the first did not

TrialListener = Callable[[str, Outcome], None]


class ArtifactOnDisk(Protocol):
    """What a trial needs of an artifact of the build room."""

    @property
    def path(self) -> Path: ...
    @property
    def sha256(self) -> str: ...


class Sample(NamedTuple):
    """One launch on one rank, in microseconds."""

    routing_seed: int
    iteration: int
    rank: int
    us: float


@dataclass(frozen=True)
class TrialPlan:
    """How much one trial does.

    Every routing of `gate_routings` is gated with the first seed. Each seed of `seeds` is timed for `iterations`
    launches, of which `first_iterations` come before the race against `race_limit_us` (the time of the config to
    beat; None: no race) and its launches `race_us`, in the order in which they are made here. `deadline_s` bounds the
    whole trial.
    """

    gate_routings: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    first_iterations: int = 3
    iterations: int = 15
    race_limit_us: float | None = None
    race_margin: float = RACE_MARGIN
    race_us: tuple[float, ...] = ()
    deadline_s: float = 600.0

    @classmethod
    def of(cls, problem: Problem, policy: Policy, race_limit_us: float | None = None) -> TrialPlan:
        """The plan that the policy asks for: the problem's own routing, an empty expert and a hot one are gated."""
        return cls(
            tuple(GATE_ROUTINGS(problem)),
            policy.routing_seeds,
            policy.first_iterations,
            policy.iterations,
            race_limit_us,
        )


@dataclass(frozen=True)
class TrialResult:
    """How a trial ended.

    `time_us`: median over iterations of the slowest rank, averaged over seeds; of the first iterations only when
    `censored`; None for every other status but `ok`. `gate_error`: the largest ‖out − ref‖ ÷ ‖ref‖ that any gate
    saw, None when there was none or it is not a number. `sentence` is for people, "" when all is well. `detail`
    is plain JSON.
    """

    status: str
    time_us: float | None = None
    samples: list[Sample] = field(default_factory=list)
    gate_error: float | None = None
    sentence: str = ""
    detail: dict[str, Any] = field(default_factory=dict)


def score_us(samples: list[Sample]) -> float:
    """The slowest rank of each iteration, the median over iterations, the mean over seeds."""
    worst: dict[int, dict[int, float]] = {}
    for one in samples:
        iterations = worst.setdefault(one.routing_seed, {})
        iterations[one.iteration] = max(one.us, iterations.get(one.iteration, 0.0))
    return statistics.fmean(statistics.median(iterations.values()) for iterations in worst.values())


def clearly_slower(
    first_us: Sequence[float],
    limit_us: float,
    margin: float = RACE_MARGIN,
    rival_us: Sequence[float] = (),
) -> bool:
    """Whether a config loses its race: even the best of its first times is more than `margin` × what it must beat.

    That is the rival's launch of the same number (`rival_us`), so that what first launches have in common falls on
    both; without as many of those it is `limit_us`. Interference only ever makes a launch slower, so the best of a
    few is the fair one to compare.
    """
    if len(rival_us) < len(first_us):
        return min(first_us) > margin * limit_us
    return min(one / rival for one, rival in zip(first_us, rival_us, strict=False)) > margin


def measure_trial(
    gang: Gang,
    config: Config,
    build_part: Config,
    artifact: ArtifactOnDisk,
    plan: TrialPlan,
    on_event: TrialListener | None = None,
) -> TrialResult:
    """Judge and time one config; every end is a status, never an exception of the config's making.

    `on_event(stage, outcome)` is called after each command, with stages loaded, gated, raced, timed, rechecked.
    Since `wrong` is terminal, ranks that came back from an earlier fault do not give it at their first gate: they
    are replaced and the trial is repeated. Raises `GangError` when no gang can be started, or its ranks share a GPU.
    """
    result = _Trial(gang, config, build_part, artifact, plan, on_event).run()
    if result.status == status.WRONG and gang.survived and not result.samples:
        gang.renew()
        result = _Trial(gang, config, build_part, artifact, plan, on_event).run()
    return result


class _Ended(Exception):
    """A trial is over before its last command."""

    def __init__(self, ended: str, sentence: str) -> None:
        self.status = ended
        self.sentence = sentence
        super().__init__(sentence)


class _Trial:
    def __init__(
        self,
        gang: Gang,
        config: Config,
        build_part: Config,
        artifact: ArtifactOnDisk,
        plan: TrialPlan,
        on_event: TrialListener | None,
    ) -> None:
        self.gang = gang
        self.config = config
        self.build_part = build_part
        self.artifact = artifact
        self.plan = plan
        self.on_event = on_event
        self.samples: list[Sample] = []
        self.errors: list[float] = []
        self.gates: list[dict[str, Any]] = []
        self.seconds: dict[str, float] = {}
        self.facts: dict[str, Any] = {}
        self.clocks: dict[str, Any] = {}
        self.sentence = ""
        self._ends_at = time.monotonic() + plan.deadline_s

    def run(self) -> TrialResult:
        try:
            self._run()
        except _Ended as end:
            time_us = score_us(self.samples) if end.status == status.CENSORED else None
            return self._result(end.status, time_us, end.sentence)
        return self._result(status.OK, score_us(self.samples), self.sentence)

    def _run(self) -> None:
        plan = self.plan
        first = min(plan.first_iterations, plan.iterations)
        rest = plan.iterations - first
        loaded = self._do(
            "loaded", lambda: self.gang.load(self.artifact.path, self.artifact.sha256, self.build_part)
        )
        self.sentence = loaded.sentence
        self.facts = next((body["facts"] for body in loaded.bodies), {})
        for routing in plan.gate_routings:
            self._gate("gated", routing, plan.seeds[0])
        for seed in plan.seeds:
            self._time("raced", seed, first, 0)
        if plan.race_limit_us is not None and clearly_slower(
            self._worst_us(), plan.race_limit_us, plan.race_margin, plan.race_us
        ):
            raise _Ended(
                status.CENSORED,
                f"Even the best of {len(self._worst_us())} first launches took {min(self._worst_us()):.0f} µs, more "
                f"than {plan.race_margin:g} × the {plan.race_limit_us:.0f} µs to beat.",
            )
        if rest > 0:
            for seed in plan.seeds:
                self._time("timed", seed, rest, first)
        self._gate("rechecked", plan.gate_routings[0], plan.seeds[0] + RECHECK_SEED)

    def _gate(self, stage: str, routing: str, seed: int) -> None:
        outcome = self._do(stage, lambda: self.gang.gate(self.config, routing, seed), judged=True)
        error = worst_error(outcome.bodies)
        tolerance = max(body["tolerance"] for body in outcome.bodies)
        self.gates.append({"routing": routing, "seed": seed, "worst_error": error, "tolerance": tolerance})
        if not outcome.ok:
            after = " It passed before it was timed." if stage == "rechecked" else ""
            raise _Ended(outcome.status, outcome.sentence + after)

    def _time(self, stage: str, seed: int, iterations: int, done: int) -> None:
        outcome = self._do(stage, lambda: self.gang.time(self.config, "fused", seed, iterations))
        if outcome.took_turns:
            raise GangError(
                "Ranks took turns on one GPU, so their launches have no times.",
                "Give each rank a GPU of its own.",
            )
        self.clocks = outcome.clocks or self.clocks
        for rank, body in enumerate(outcome.bodies):
            self.samples += [Sample(seed, done + at, rank, us) for at, us in enumerate(body["us"])]

    def _do(self, stage: str, work: Callable[[], Outcome], judged: bool = False) -> Outcome:
        """One command. An end without a verdict on the output ends the trial here."""
        begin = time.monotonic()
        if begin >= self._ends_at:
            raise _Ended(
                status.timeout("trial"),
                f"The trial had used up its {self.plan.deadline_s:g} s before it was {stage}. Give it longer.",
            )
        outcome = work()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - begin
        if self.on_event is not None:
            self.on_event(stage, outcome)
        if outcome.ok or (judged and outcome.status == status.WRONG):
            return outcome
        raise _Ended(outcome.status, outcome.sentence)

    def _worst_us(self) -> list[float]:
        worst: dict[tuple[int, int], float] = {}
        for one in self.samples:
            at = (one.routing_seed, one.iteration)
            worst[at] = max(one.us, worst.get(at, 0.0))
        return list(worst.values())

    def _result(self, ended: str, time_us: float | None, sentence: str) -> TrialResult:
        errors = [gate["worst_error"] for gate in self.gates]
        gate_error = None if not errors or None in errors else max(errors)
        detail: dict[str, Any] = {
            "gates": self.gates,
            "seconds": {stage: round(seconds, 4) for stage, seconds in self.seconds.items()},
            "respawns": self.gang.respawns,
        }
        if self.facts:
            detail["facts"] = self.facts
        if self.clocks:
            detail["clocks"] = self.clocks
        if self.samples:
            ranks = sorted({one.rank for one in self.samples})
            detail["rank_median_us"] = [
                statistics.median(one.us for one in self.samples if one.rank == rank) for rank in ranks
            ]
        return TrialResult(ended, time_us, self.samples, gate_error, sentence, detail)
