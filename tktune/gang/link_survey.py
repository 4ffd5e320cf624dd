"""Measures a machine for `tktune doctor`: a gang runs the link probe's ways one after another, each gated before it is
timed. Ends within its budget whatever the ranks do; prints and stores nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tktune.build.artifact import BuildOutcome
from tktune.build.cache import ArtifactCache
from tktune.build.toolchain import Toolchain
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.errors import ArtifactError, GangError
from tktune.core.policy import Policy
from tktune.families.link_model import PEER_WAYS, Curve, LinkFacts
from tktune.families.link_probe import space
from tktune.gang.gang import Gang
from tktune.gang.limits import Deadlines

BUDGET_S = 60.0
DEADLINES = Deadlines(prepare_s=60.0, load_s=20.0, gate_s=15.0, time_s=10.0, iteration_s=0.5)
POLICY = Policy(name="doctor", launch_mode="direct", cache_state="warm", warmup=1)
ITERATIONS = 5
FEW_SMS = (2, 8, 16, 32)  # where other row lengths are looked at
OTHER_ROWS_FAN = 4
MOST_DEATHS = 2  # of the gang; then the rest is left alone

Listen = Callable[[str], None]
Loadable = tuple[Path, str, Config]  # an artifact, its SHA-256, its build part


@dataclass(frozen=True)
class Survey:
    """`facts` of one device class, with what could not be measured as sentences in `missing`.

    `gates`: copies found right before anything was timed.
    """

    facts: LinkFacts
    toolchain: Toolchain
    gates: int
    seconds: float
    missing: tuple[str, ...] = ()


def survey(
    world: int,
    device: DeviceClass,
    cache: ArtifactCache,
    *,
    device_indices: Sequence[int] | None = None,
    budget_s: float = BUDGET_S,
    listen: Listen = lambda sentence: None,
) -> Survey:
    """Measure `world` GPUs of one class at once (1: what needs no peer).

    Builds while the ranks sit down. Raises `GangError` when they cannot or share a GPU, `ToolchainError`, `CacheError` or
    `ArtifactError` when the probe cannot be built.
    """
    begin = time.monotonic()
    problem = space.probe_problem(world)
    gemm_part = space.gemm_build_part(problem, device)
    specs = [space.FAMILY.build_spec(part, problem, device) for part in (space.LINK_BUILD, gemm_part)]
    toolchain = cache.toolchain(specs[0])
    with (
        ThreadPoolExecutor(1) as builder,
        Gang(problem, device, POLICY, deadlines=DEADLINES, device_indices=device_indices) as gang,
    ):
        if gang.takes_turns:
            raise GangError("Ranks that share a GPU have no link to measure.", "Give each a GPU of its own.")
        building = builder.submit(cache.build, specs)
        try:
            gang.start()
        finally:
            link, gemm = building.result()
        listen(f"{world} {'rank sits' if world == 1 else 'ranks sit'} at their GPUs; measuring.")
        work = _Survey(gang, begin + budget_s, (*_built(link), space.LINK_BUILD))
        curves = work.curves(world)
        single = work.single_numbers(world)
        gemm_us = work.gemm(gemm, gemm_part)
    facts = LinkFacts(
        world,
        device.sm_count,
        curves,
        single.get("copy_engine"),
        single.get("echo"),
        single.get("launch"),
        gemm_us,
    )
    return Survey(facts, toolchain, work.gates, time.monotonic() - begin, tuple(work.missing))


def curve_plan(world: int, device: DeviceClass) -> list[tuple[str, int, int, tuple[int, ...]]]:
    """(way, fan, bytes of a row, numbers of SMs) of every curve, what a cost model asks for first."""
    usual, sms = space.USUAL_ROW_BYTES, space.sm_counts(device)
    few = tuple(count for count in FEW_SMS if count in sms)
    ways = [way for way in ("scatter", "scatter_own") if world > 1 or way not in PEER_WAYS]
    plan = [(way, fan, usual, sms) for way in ways for fan in space.FANS]
    others = [size for size in space.ROW_BYTES if size != usual]
    plan += [(way, OTHER_ROWS_FAN, size, few) for way in ways for size in others]
    plain = ("pull", "push", "own", "plain_pull", "plain_push")
    plan += [(way, 1, usual, sms) for way in plain if world > 1 or way not in PEER_WAYS]
    return [
        entry for entry in plan if entry[0].startswith("plain") or space.row_slots(entry[2], device.smem_optin_bytes)[0] >= 2
    ]  # fmt: skip


@dataclass
class _Survey:
    """One gang at work until `end` (on the monotonic clock)."""

    gang: Gang
    end: float
    probe: Loadable
    gates: int = 0
    deaths: int = 0
    missing: list[str] = field(default_factory=list)

    def curves(self, world: int) -> tuple[Curve, ...]:
        """Every curve of the plan whose copies were found right, with the points that could be had."""
        found, device = [], self.gang.device
        for way, fan, row_bytes, sms in curve_plan(world, device):
            if not self._gate(_config(way, min(8, sms[-1]), fan, row_bytes)):
                continue
            times = [self._time(_config(way, count, fan, row_bytes)) for count in sms]
            points = [
                (count, space.stored_bytes(_config(way, count, fan, row_bytes)) / us / 1e3)
                for count, us in zip(sms, times, strict=True)
                if us is not None
            ]
            if points:
                slots = space.slots_of_block(way, row_bytes, device)
                counts, rates = zip(*points, strict=True)
                found.append(Curve(way, fan, row_bytes, slots, counts, tuple(round(r, 2) for r in rates)))
        return tuple(found)

    def single_numbers(self, world: int) -> dict[str, float]:
        """Of the copy engine (1e9 bytes a second), of a round trip and of a launch (µs); those that were measured."""
        found = {}
        for way in ("copy_engine", "echo", "launch"):
            if world == 1 and way in space.NEEDS_PEER:
                continue
            config = _config(way)
            us = self._time(config)
            if us is not None:
                found[way] = round(space.stored_bytes(config) / us / 1e3 if way == "copy_engine" else us, 3)
        return found

    def gemm(self, built: BuildOutcome, part: Config) -> tuple[tuple[int, float], ...]:
        """(SMs given away, µs) of the grouped GEMM, once it was found right on the fewest SMs."""
        if built.artifact is None:
            self._tell(f"The GEMM on fewer SMs is not measured. {built.error_sentence}")
            return ()
        sm_count, given = self.gang.device.sm_count, space.given_away(self.gang.device)
        if not self._ready() or not self._load((built.artifact.path, built.artifact.sha256, part)):
            return ()
        if not self._gate(_config("gemm", sm_count - given[-1])):
            return ()
        times = [(count, self._time(_config("gemm", sm_count - count))) for count in given]
        return tuple((count, round(us, 2)) for count, us in times if us is not None)

    # One command, whatever becomes of it.

    def _gate(self, config: Config) -> bool:
        if not self._ready():
            return False
        outcome = self.gang.gate(config, "uniform", 0)
        self._note(f"{config['way']} is not measured", outcome.status, outcome.sentence, outcome.gang_lives)
        self.gates += outcome.ok
        return outcome.ok

    def _time(self, config: Config) -> float | None:
        """The median over launches of the slowest rank, µs; None when it could not be had."""
        if not self._ready():
            return None
        outcome = self.gang.time(config, "comm", 0, ITERATIONS)
        self._note(f"{config} is not measured", outcome.status, outcome.sentence, outcome.gang_lives)
        return statistics.median(outcome.worst_us) if outcome.ok else None

    def _ready(self) -> bool:
        """Whether there is time, and a gang that holds an artifact: a fresh one after a death, but not for ever."""
        if time.monotonic() > self.end:
            self._tell("Time is up: the rest is not measured. Run it again with: tktune doctor --measure.")
            return False
        if self.deaths >= MOST_DEATHS:
            return False
        return self.gang.loaded is not None or self._load(self.probe)

    def _load(self, artifact: Loadable) -> bool:
        """Load it after the probe, to which the ranks' meeting belongs. A gang that died is replaced here."""
        try:
            for one in dict.fromkeys((self.probe, artifact)):
                outcome = self.gang.load(*one)
                self._note("The rest is not measured", outcome.status, outcome.sentence, outcome.gang_lives)
                if not outcome.ok:
                    return False
        except GangError as error:
            self.deaths = MOST_DEATHS
            self._tell(f"The rest is not measured. {error}")
            return False
        return True

    def _note(self, what: str, status: str, sentence: str, gang_lives: bool) -> None:
        if status != "ok":
            self._tell(f"{what} ({status}). {sentence}")
        self.deaths += not gang_lives

    def _tell(self, sentence: str) -> None:
        if sentence not in self.missing:
            self.missing.append(sentence)


def _config(way: str, sms: int = 1, fan: int = 1, row_bytes: int = space.USUAL_ROW_BYTES) -> Config:
    return Config(way=way, sms=sms, fan=fan, row_bytes=row_bytes)


def _built(outcome: BuildOutcome) -> tuple[Path, str]:
    if outcome.artifact is None:
        raise ArtifactError(
            f"The probe cannot be built: {outcome.error_sentence}", "Run tktune doctor --debug."
        )
    return outcome.artifact.path, outcome.artifact.sha256
