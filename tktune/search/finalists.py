"""The last round of judging: finalists gated afresh and re-measured in interleaved rounds, then one is chosen.

Rows and events are the driver's; the arithmetic is `judging`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from tktune.build.artifact import Artifact
from tktune.core import status
from tktune.core.config import Config
from tktune.gang.gang import Gang, Outcome
from tktune.search.events import FinalistRound, Listener, Note
from tktune.search.judging import LEAST_BAND, NOISY, Verdict, choose, paired_ratio, steadier, tie_band
from tktune.store.rows import Role, VerificationRow

ROUNDS = 12
LEAST_ROUNDS = 3
MOST_ROUNDS = 36  # where the noise after ROUNDS is above _FINE_NOISE, or hides which of the fastest is faster
_FINE_NOISE = 0.02
GATE_SEED = 104729  # inputs that no trial saw


@dataclass(frozen=True)
class Finalist:
    """A config that may win. `resources` orders ties: fewer is better, item by item."""

    config: Config
    build: Config
    artifact: Artifact
    role: Role
    resources: tuple[int, ...]


@dataclass
class Arm:
    """A finalist's measurements, or how it ended. The default runs in a second, equal arm that gives the noise.

    `median_us` and `best_us` have one value a round: of its launches, each counted by its slowest rank.
    """

    finalist: Finalist
    median_us: list[float] = field(default_factory=list)
    best_us: list[float] = field(default_factory=list)
    samples: list[float] = field(default_factory=list)
    end: str = status.OK
    sentence: str = ""

    @property
    def ok(self) -> bool:
        return self.end == status.OK


@dataclass(frozen=True)
class Verified:
    """What verification came to: the verdict (None when no finalist finished), its rows, and those that failed.

    `noise` is the A/A noise of the statistic that judged: the median launch of each round or, with `by_best`, the
    best one.
    """

    verdict: Verdict | None
    rows: list[VerificationRow]
    noise: float
    rounds: int
    failed: list[Arm]
    by_best: bool = False


@dataclass(frozen=True)
class FinalsPlan:
    """How much verification may do.

    `time_is_up` is asked after each round once `LEAST_ROUNDS` are done; after `rounds` it goes on to `most_rounds`
    while the noise is too large to tell close configs apart.
    """

    gate_routings: Sequence[str]
    seeds: Sequence[int]
    iterations: int
    time_is_up: Callable[[], bool]
    rounds: int = ROUNDS
    most_rounds: int = MOST_ROUNDS


def resources_of(artifact: Artifact, facts: Mapping[str, Any], config: Config) -> tuple[int, ...]:
    """Shared memory × threads of a block, registers, then communication SMs: what a tie is decided by."""
    known = {**facts, **artifact.facts}
    smem_bytes, threads = int(known.get("smem_bytes", 0)), int(known.get("threads_per_block", 1))
    split = config.get("num_comm_sms", 0)
    return smem_bytes * threads, int(known.get("registers", 0)), split if isinstance(split, int) else 0


def verify(gang: Gang, finalists: Sequence[Finalist], plan: FinalsPlan, listener: Listener) -> Verified:
    """Gate every finalist on fresh inputs, measure all in interleaved rounds, choose, and gate the chosen again.

    Raises `GangError` when no gang can be had. A finalist that fails is out; the others go on.
    """
    arms = [Arm(finalist) for finalist in finalists]
    for arm in arms:
        _gate(gang, arm, plan, GATE_SEED)
    default = next((arm for arm in arms if arm.finalist.role == "default"), None)
    twin_of = default if default is not None and default.ok else next((a for a in arms if a.ok), None)
    if twin_of is None:
        return Verified(None, [], 0.0, 0, arms)
    twin = Arm(twin_of.finalist)
    rounds, noise, by_best = 0, 0.0, False
    while rounds < (plan.most_rounds if _undecided(arms, noise, by_best) else plan.rounds):
        one_round(gang, [arm for arm in (*arms, twin) if arm.ok], rounds, plan)
        rounds += 1
        noise, by_best = _noise(twin_of, twin)
        lasting = [arm for arm in arms if arm.ok]
        medians = tuple((arm.finalist.config, median(_values(arm, by_best))) for arm in lasting)
        listener.on_event(
            FinalistRound(rounds, plan.rounds if rounds <= plan.rounds else plan.most_rounds, medians)
        )
        if not lasting or (rounds >= LEAST_ROUNDS and plan.time_is_up()):
            break
    if by_best or noise > NOISY:
        listener.on_event(Note(_disturbed(noise, by_best)))
    verdict = _choose(gang, arms, plan, noise, by_best, default)
    failed = [arm for arm in arms if not arm.ok]
    return Verified(verdict, _rows(arms, verdict, by_best), noise, rounds, failed, by_best)


def _undecided(arms: Sequence[Arm], noise: float, by_best: bool) -> bool:
    """Whether more rounds may tell configs apart: of the fastest there are several within a noise above the least band."""
    if noise > _FINE_NOISE:
        return True
    rounds = [_values(arm, by_best) for arm in arms if arm.ok]
    if noise <= LEAST_BAND or not rounds:
        return False
    fastest = min(rounds, key=median)
    return sum(paired_ratio(one, fastest) <= 1 + noise for one in rounds) > 1


def _noise(one: Arm, again: Arm) -> tuple[float, bool]:
    if not (one.ok and again.ok):
        return 0.0, False
    return steadier((one.median_us, again.median_us), (one.best_us, again.best_us))


def _disturbed(noise: float, by_best: bool) -> str:
    how = (
        ", so finalists are compared by the best launch of each round; one config still"
        if by_best
        else ": one config"
    )
    return (
        f"This machine is disturbed{how} differs from itself by up to {noise:.1%}, and configs closer than that count "
        "as equal. For a finer choice, close other programs and run with more trials."
    )


def _values(arm: Arm, by_best: bool) -> list[float]:
    return arm.best_us if by_best else arm.median_us


def _choose(
    gang: Gang, arms: Sequence[Arm], plan: FinalsPlan, noise: float, by_best: bool, default: Arm | None
) -> Verdict | None:
    """The choice; one whose output is wrong after timing is out, and the choice is made again."""
    while True:
        lasting = {arm.finalist.config: arm for arm in arms if arm.ok}
        if not lasting:
            return None
        verdict = choose(
            {config: _values(arm, by_best) for config, arm in lasting.items()},
            None if default is None else default.finalist.config,
            {config: arm.finalist.resources for config, arm in lasting.items()},
            tie_band(noise),
        )
        chosen = lasting[verdict.config]
        _gate(gang, chosen, plan, GATE_SEED + 1)
        if chosen.ok:
            return verdict


def one_round(gang: Gang, arms: Sequence[Arm], number: int, plan: FinalsPlan) -> None:
    """One round: every arm once, in an order that turns each round, so that drift falls on all alike."""
    shift = number % len(arms)
    order = [*arms[shift:], *arms[:shift]]
    if number % 2:
        order.reverse()
    seed = plan.seeds[number % len(plan.seeds)]
    for arm in order:
        outcome = _load(gang, arm)
        if outcome.ok:
            outcome = gang.time(arm.finalist.config, "fused", seed, plan.iterations)
        if not _passed(arm, outcome):
            continue
        arm.samples += outcome.worst_us
        arm.median_us.append(median(outcome.worst_us))
        arm.best_us.append(min(outcome.worst_us))


def _gate(gang: Gang, arm: Arm, plan: FinalsPlan, seed: int) -> None:
    if not _passed(arm, _load(gang, arm)):
        return
    for routing in plan.gate_routings:
        if not _passed(arm, gang.gate(arm.finalist.config, routing, seed)):
            return


def _load(gang: Gang, arm: Arm) -> Outcome:
    artifact = arm.finalist.artifact
    return gang.load(artifact.path, artifact.sha256, arm.finalist.build)


def _passed(arm: Arm, outcome: Outcome) -> bool:
    if not outcome.ok:
        arm.end, arm.sentence = outcome.status, outcome.sentence
    return outcome.ok


def _rows(arms: Sequence[Arm], verdict: Verdict | None, by_best: bool) -> list[VerificationRow]:
    rows = []
    for arm in arms:
        if not arm.samples:
            continue
        config = arm.finalist.config
        chosen = verdict is not None and arm.ok and config == verdict.config
        if chosen and verdict is not None:
            reason = verdict.reason
        elif not arm.ok:
            reason = f"{arm.end}: {arm.sentence}"
        else:
            ratio = verdict.ratios.get(config) if verdict is not None else None
            reason = "" if ratio is None else _beside_fastest(ratio)
        rows.append(
            VerificationRow(
                config,
                arm.finalist.artifact.digest,
                arm.finalist.role,
                median(_values(arm, by_best)),
                tuple(arm.samples),
                chosen,
                reason,
            )
        )
    return rows


def _beside_fastest(ratio: float) -> str:
    """A finalist's time by that of the fastest, both of the same rounds, for people."""
    return "the fastest" if ratio == 1 else f"{ratio:.3f} × the fastest's time in the median round"
