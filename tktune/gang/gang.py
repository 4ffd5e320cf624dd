"""The gang: rank processes that live and die together and do one numbered command at a time.

It turns whatever happens in a rank into one status; it decides nothing about configs, races or winners.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tktune.core import status
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.device_cuda import gpus_of_ranks
from tktune.core.errors import GangError
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.families.base import RankSeat, family
from tktune.families.control_page import ControlPage
from tktune.gang.exchange import Exchange
from tktune.gang.limits import Deadlines, renewal
from tktune.gang.protocol import Command, encode_command, seat_to_json
from tktune.gang.rank_process import RankProcess
from tktune.gang.telemetry import Telemetry
from tktune.gang.verdict import RankEnd, Verdict, judge, judge_gate, judge_samples

GATE_SEQUENCES = 4096
SEQUENCES_PER_ITERATION = 64


@dataclass(frozen=True)
class Outcome:
    """What one command of the whole gang came to.

    `status` is "ok" or how the trial ends; `sentence` says why, who waited for what, and what follows.
    `replies[r]` is the body of rank r's reply, None when it had none. `worst_us` is, for `time`, the slowest
    rank's microseconds of each iteration, and `clocks` what NVML told of the last moments (`Telemetry.lately`).
    `gang_lives`: the same ranks will serve the next command. `took_turns`: ranks shared a GPU, so that times are those
    of waiting for a turn.
    """

    status: str
    sentence: str = ""
    replies: list[dict[str, Any] | None] = field(default_factory=list)
    worst_us: list[float] = field(default_factory=list)
    gang_lives: bool = True
    clocks: dict[str, Any] = field(default_factory=dict)
    took_turns: bool = False

    @property
    def ok(self) -> bool:
        return self.status == status.OK

    @property
    def bodies(self) -> list[dict[str, Any]]:
        """The replies of an outcome in which every rank has one."""
        return [reply for reply in self.replies if reply is not None]


@dataclass(frozen=True)
class Loaded:
    """The artifact that the ranks hold ready."""

    path: Path
    sha256: str
    build_part: Config


class Gang:
    """One rank process a device, spawned when first needed, killed and replaced as a whole.

    >>> with Gang(problem, device, policy) as gang:                         # doctest: +SKIP
    ...     gang.load(artifact.path, artifact.sha256, build_part)
    ...     gang.gate(config, "uniform", seed=0)
    ...     gang.time(config, "fused", seed=0, iterations=15).worst_us

    After a death, a rank that stays silent, or (on a GPU) a fault, the gang is gone and `loaded` is None; the
    next `load` starts a fresh one. Ranks die with the thread that started them, and one thread at a time may use a
    gang. `turn_to` another problem keeps the processes. `watcher` hears what the ranks begin to do ("start" or a
    command) and "" when it ends. The driver holds no device context. `ranks_env` adds to the environment of the ranks. `device_indices[r]` is the
    device of rank r (None: its rank, or where ranks may share GPUs, `gpus_of_ranks`), so that several gangs can sit side
    by side on one host.
    """

    def __init__(
        self,
        problem: Problem,
        device: DeviceClass,
        policy: Policy,
        *,
        deadlines: Deadlines | None = None,
        spin_limit_s: float = 2.0,
        ranks_env: Mapping[str, str] | None = None,
        renew_after: int | None = None,
        device_indices: Sequence[int] | None = None,
    ) -> None:
        self.problem = problem
        self.device = device
        self.policy = policy
        self.world = problem.world
        self.deadlines = deadlines or Deadlines()
        self.spin_limit_s = spin_limit_s
        self.family = family(problem.family)
        self.respawns = 0  # fresh gangs after a death
        self.renewals = 0  # fresh gangs after `renew_after` loads
        self.loads = 0  # artifacts loaded by the ranks that live now
        self.survived = 0  # faults that the ranks that live now came back from
        self.loaded: Loaded | None = None
        self.watcher: Callable[[str], None] = lambda doing: None
        self._ranks_env = dict(ranks_env or {})
        self._renew_after = renew_after or renewal(device)
        self._device_indices = tuple(
            gpus_of_ranks(self.world, device) if device_indices is None else device_indices
        )
        self._telemetry = Telemetry.open(self._device_indices) if device.backend == "cuda" else None
        self._ranks: list[RankProcess] = []
        self._control: ControlPage | None = None
        self._memory_fds: list[int] = []
        self._held: set[str] = set()
        self._loaded_outcome = Outcome(status.OK)
        self._died = False
        self._number = 0
        self._sequence = 1
        if not 0 < spin_limit_s < min(self.deadlines.gate_s, self.deadlines.time_s):
            raise GangError(
                f"A spin limit of {spin_limit_s:g} s is not below the deadlines of gate and time.",
                "Use a shorter spin limit or longer deadlines.",
            )
        if len(self._device_indices) != self.world:
            raise GangError(
                f"A gang of {self.world} was given {len(self._device_indices)} devices.", "Name one a rank."
            )

    # A gang's life.

    @property
    def alive(self) -> bool:
        return bool(self._ranks) and all(rank.alive for rank in self._ranks)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks, in rank order; empty when there is no gang."""
        return [rank.pid for rank in self._ranks]

    @property
    def takes_turns(self) -> bool:
        """Whether ranks share a GPU: what they compute can be judged, and how fast cannot."""
        return self.device.backend == "cuda" and len(set(self._device_indices)) < self.world

    def __enter__(self) -> Gang:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Spawn the ranks and give each its seat. Nothing when they live. Raises `GangError` when one fails."""
        if self.alive:
            return
        if self._ranks:
            self._died = True
            self.kill()
        if self._died:
            self.respawns += 1
            self._died = False
        self.watcher("start")
        self._control = ControlPage.create(self.world)
        for rank in range(self.world):
            self._memory_fds.append(os.memfd_create(f"tktune-rank-{rank}"))
        started = False
        try:
            fds = [self._control.fd, *self._memory_fds]
            for rank in range(self.world):
                self._ranks.append(RankProcess(rank, fds, self._ranks_env))
            outcome = self._take_seats()
            started = outcome.ok
        finally:
            if not started:
                self.kill()
            self.watcher("")
        if not started:
            raise GangError(
                f"A gang of {self.world} could not start. {outcome.sentence}", "Run `tktune doctor`."
            )

    def turn_to(self, problem: Problem) -> None:
        """Measure another problem of the same family and world from now on: living ranks leave their seats and take new
        ones, and what a process pays once (imports, device context) is not paid again.

        Raises ValueError for a problem of another family or world, `GangError` when the ranks can neither go on nor be
        replaced.
        """
        if (problem.family, problem.world) != (self.problem.family, self.world):
            raise ValueError(f"a gang of {self.problem} cannot turn to {problem}")
        alive, self.problem = self.alive, problem
        if not alive:
            return
        self._forget_loads()
        if self._exchange("leave", [{}] * self.world, self.deadlines.leave_s).ok:
            for fd in self._memory_fds:  # the new seats find shared memory as fresh ranks would
                os.ftruncate(fd, 0)
            if self._take_seats().ok:
                return
        self.kill()
        self.start()

    def close(self) -> None:
        """Let the ranks leave by end of file; kill those that stay."""
        for rank in self._ranks:
            rank.channel.close()
        gone_by = time.monotonic() + self.deadlines.grace_s
        for rank in self._ranks:
            rank.wait(max(0.0, gone_by - time.monotonic()))
        self.kill()
        self._died = False

    def kill(self) -> None:
        """SIGKILL to every rank, then reap them. Raises `GangError` when one cannot be killed."""
        for rank in self._ranks:
            rank.kill()
        gone_by = time.monotonic() + self.deadlines.kill_s
        wedged = [rank for rank in self._ranks if not rank.wait(max(0.0, gone_by - time.monotonic()))]
        for rank in self._ranks:
            rank.close()
        for fd in self._memory_fds:
            os.close(fd)
        if self._control is not None:
            self._control.close()
        self._ranks, self._memory_fds, self._control = [], [], None
        self._forget_loads()
        self.survived = 0
        if wedged:
            raise GangError(
                f"Rank {wedged[0].rank} (process {wedged[0].pid}) cannot be killed: its device is stuck.",
                "Reset the device or restart the host.",
            )

    def interrupt(self) -> None:
        """Kill the ranks, so that a command under way in another thread ends at once. That thread finds them dead."""
        for rank in list(self._ranks):
            if rank.alive:
                rank.kill()

    def renew(self) -> None:
        """Replace the ranks by fresh ones; `loaded` becomes None."""
        self.close()
        self.renewals += 1
        self.start()

    # Commands.

    def load(self, artifact: Path | str, sha256: str, build_part: Config) -> Outcome:
        """Open an artifact on every rank; nothing when it is the one they hold ready.

        An artifact that states other facts of itself than its family's formulas predict is loaded, and the
        sentence names the formula that is wrong.
        """
        wanted = Loaded(Path(artifact).absolute(), sha256, build_part)
        if self.alive and self.loaded == wanted:
            return self._loaded_outcome
        if self.alive and sha256 not in self._held and self.loads >= self._renew_after:
            self.renew()
        self.start()
        self.loaded = None
        args = {"artifact": str(wanted.path), "sha256": sha256, "build_part": dict(build_part)}
        outcome = self._exchange("load", [args] * self.world, self.deadlines.load_s)
        if not outcome.ok:
            return outcome
        self.loads += sha256 not in self._held
        self._held.add(sha256)
        self.loaded = wanted
        self._loaded_outcome = Outcome(status.OK, self._mismatch(build_part, outcome.bodies), outcome.replies)
        return self._loaded_outcome

    def gate(self, config: Config, routing: str, seed: int) -> Outcome:
        """Is the output right on every rank? `wrong` when not. Each reply has passed, worst_error, tolerance."""
        args = {"config": dict(config), "routing": routing, "seed": seed}
        outcome = self._launch("gate", args, self.deadlines.gate_s, GATE_SEQUENCES)
        return self._judged(outcome, judge_gate(outcome.bodies, routing)) if outcome.ok else outcome

    def time(self, config: Config, mode: str, seed: int, iterations: int) -> Outcome:
        """Time `iterations` launches; `worst_us` has the slowest rank of each, each reply its own `us`. Ranks that share a
        GPU make the launches all the same, and the outcome says so."""
        args = {"config": dict(config), "mode": mode, "seed": seed, "iterations": iterations}
        deadline_s = self.deadlines.time_s + self.deadlines.iteration_s * iterations
        sequences = (iterations + self.policy.warmup + 1) * SEQUENCES_PER_ITERATION
        outcome = self._launch("time", args, deadline_s, sequences)
        if not outcome.ok:
            return outcome
        clocks = self._telemetry.lately() if self._telemetry else {}
        judged = self._judged(outcome, judge_samples(outcome.bodies, iterations))
        if not judged.ok:
            return judged
        worst = [max(us) for us in zip(*(body["us"] for body in outcome.bodies), strict=True)]
        return Outcome(status.OK, "", outcome.replies, worst, clocks=clocks, took_turns=self.takes_turns)

    def report(self) -> Outcome:
        """CPU seconds, peak memory and preemptions of each rank so far."""
        self.start()
        return self._exchange("report", [{}] * self.world, self.deadlines.report_s)

    # Below: one command, from its bytes to its outcome.

    def _take_seats(self) -> Outcome:
        seats = [seat_to_json(self._seat(rank)) for rank in range(self.world)]
        return self._exchange("prepare", seats, self.deadlines.prepare_s)

    def _forget_loads(self) -> None:
        self._held.clear()
        self.loaded, self.loads = None, 0

    def _launch(self, command: str, args: Mapping[str, Any], deadline_s: float, sequences: int) -> Outcome:
        if self.loaded is None:
            raise GangError(f"No artifact is loaded, so there is nothing to {command}.", "Load one first.")
        first, self._sequence = self._sequence, self._sequence + sequences
        return self._exchange(command, [{**args, "sequence": first}] * self.world, deadline_s)

    def _judged(self, outcome: Outcome, verdict: Verdict) -> Outcome:
        return Outcome(verdict.status, verdict.sentence, outcome.replies)

    def _seat(self, rank: int) -> RankSeat:
        assert self._control is not None
        return RankSeat(
            self.problem,
            self.device,
            self.policy,
            rank,
            self.world,
            tuple(self._memory_fds),
            self._control.fd,
            self.spin_limit_s,
            self._device_indices[rank],
        )

    def _mismatch(self, build_part: Config, bodies: Sequence[Mapping[str, Any]]) -> str:
        predicted = self.family.build_spec(build_part, self.problem, self.device).facts
        stated = bodies[0]["facts"]
        wrong = [
            f"{name} is {stated[name]} and the formula says {value}"
            for name, value in predicted.items()
            if name in stated and stated[name] != value
        ]
        if not wrong:
            return ""
        return f"The artifact's {', its '.join(wrong)}: correct the formula of {self.problem.family}."

    def _exchange(self, command: str, args: Sequence[Mapping[str, Any]], deadline_s: float) -> Outcome:
        """Send one command, gather what becomes of it, and kill the gang unless it can serve the next one."""
        assert self._control is not None
        self._number += 1
        settled = False
        self.watcher(command)
        try:
            self._control.clear()
            return_s = self.spin_limit_s + self.deadlines.grace_s
            exchange = Exchange(self._ranks, self._control, self._number, deadline_s, return_s)
            ends = exchange.run([encode_command(Command(self._number, command, one)) for one in args])
            reports = [one for one in map(self._control.report, range(self.world)) if one is not None]
            verdict = judge(
                command,
                ends,
                reports,
                deadline_s=deadline_s,
                spin_limit_s=self.spin_limit_s,
                return_s=return_s,
            )
            settled = verdict.status == status.OK or self._survives(ends)
        finally:
            if not settled:
                self._died = True
                self.kill()
            self.watcher("")
        if verdict.status != status.OK:
            self.survived += settled
        replies = [
            None if end.reply is None or end.failure is not None else dict(end.reply.body) for end in ends
        ]
        sentence = verdict.said if command == "prepare" else verdict.sentence
        return Outcome(verdict.status, sentence, replies, gang_lives=settled)

    def _survives(self, ends: Iterable[RankEnd]) -> bool:
        """Whether the gang can go on: every rank lives and came back with its one reply.

        On a GPU only aborted launches leave the context usable; the process of a CPU rank outlives any of
        its launches.
        """
        for end in ends:
            if end.death or end.broken or end.reply is None:
                return False
            failure = end.failure
            clean = failure is None or (failure.kind == "launch" and failure.code == "aborted")
            if self.device.backend != "cpu" and not clean:
                return False
        return True
