"""What a report says, as plain facts: no database, no text. `collect` fills these, `markdown` and `csv_form` show them."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from tktune.core.config import Config, Value
from tktune.core.device import DeviceClass
from tktune.core.feasible import WaterfallRow
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.core.rehearsal import rehearsal_name
from tktune.search.account import Spent


@dataclass(frozen=True)
class TimedConfig:
    """One config with the median of its slowest-rank times. `quartiles_us` are of the raw samples."""

    config: Config
    time_us: float
    samples: int
    quartiles_us: tuple[float, float] | None = None
    artifact_digest: str = ""
    status: str = "ok"


@dataclass(frozen=True)
class Verified:
    """One finalist of the last verification, re-measured interleaved with the others."""

    role: str
    config: Config
    time_us: float
    samples: int
    chosen: bool
    reason: str = ""


@dataclass(frozen=True)
class Attribution:
    """Where the winner's time goes (medians of the slowest rank, microseconds; None where it was not measured).

    `comm_us` is communication alone at the winner's split, `comm_best_us` its minimum over splits, reached at
    `comm_best_split`. Definitions: design, "Judging".
    """

    fused_us: float | None = None
    comp_us: float | None = None
    comm_us: float | None = None
    comm_best_us: float | None = None
    comm_best_split: int | None = None
    serial_us: float | None = None
    peer_us: float | None = None

    @property
    def overlap_at_split(self) -> float | None:
        return _overlap(self.comp_us, self.comm_us, self.fused_us)

    @property
    def overlap_at_best(self) -> float | None:
        return _overlap(self.comp_us, self.comm_best_us, self.fused_us)

    @property
    def exposed_us(self) -> float | None:
        """Communication that compute does not hide: fused − comp."""
        return None if self.fused_us is None or self.comp_us is None else self.fused_us - self.comp_us


def _overlap(comp_us: float | None, comm_us: float | None, fused_us: float | None) -> float | None:
    """(comp + comm − fused) ÷ min(comp, comm): 1 when the shorter one is hidden, 0 when nothing is."""
    if comp_us is None or comm_us is None or fused_us is None or min(comp_us, comm_us) <= 0:
        return None
    return (comp_us + comm_us - fused_us) / min(comp_us, comm_us)


@dataclass(frozen=True)
class Importance:
    """How much one parameter matters: the range of the medians over its values, as a share of the best median."""

    parameter: str
    spread: float
    medians_us: tuple[tuple[Value, float, int], ...]  # value, median, configs measured


@dataclass(frozen=True)
class SplitTime:
    """The best and the median time over all measured configs with this many communication SMs."""

    num_comm_sms: int
    best_us: float
    median_us: float
    configs: int


@dataclass(frozen=True)
class Failure:
    """One way in which configs failed: how many, and one of them with its sentence."""

    status: str
    configs: int
    config: Config
    sentence: str


@dataclass(frozen=True)
class RunTime:
    """Where the wall time of one run of one problem went, in seconds.

    `gating_s`, `timing_s` and `loading_s` are sums over trials, of all `gangs` that worked side by side; `waiting_s`, for
    builds, is summed over gangs too. `finals_s` is the verification of finalists and the attribution, in which one gang
    gates and times without a pause. Where the run kept an account (`spent`), all of them come from it, finalists are
    part of gating and timing, and `finals_s` is 0.
    """

    wall_s: float
    search_s: float
    gating_s: float
    timing_s: float
    loading_s: float
    finals_s: float
    waiting_s: float = 0.0
    gangs: int = 1
    spent: Spent | None = None

    @property
    def busy_s(self) -> float:
        """Seconds of gangs that gate or time: in the finals all devices but those of one gang rest."""
        return self.gating_s + self.timing_s + self.finals_s

    @property
    def busy_share(self) -> float:
        """The share of the wall time of all gangs."""
        return self.busy_s / (self.gangs * self.wall_s) if self.wall_s > 0 else 0.0

    @property
    def built_s(self) -> float:
        """Seconds in which, on average, a gang did not wait for a build."""
        return max(0.0, self.wall_s - self.waiting_s / self.gangs)

    @property
    def busy_share_built(self) -> float:
        """The share of the time in which no build was waited for."""
        return self.busy_s / (self.gangs * self.built_s) if self.built_s > 0 else 0.0


@dataclass(frozen=True)
class SpacePicture:
    """How many configs there are and what each constraint removed."""

    total: int
    feasible: int
    waterfall: tuple[WaterfallRow, ...]


@dataclass(frozen=True)
class ProblemReport:
    """Everything known of one problem on one device class under one policy and toolchain.

    `statuses` count each config once, by the trial that speaks for it. `space` is None where the family is not
    known here. `tie_band` and `noise` (A/A, of one config against itself) are fractions.
    """

    problem: Problem
    device: DeviceClass
    policy: Policy
    toolchain: str
    space: SpacePicture | None
    statuses: tuple[tuple[str, int], ...]
    builds: int
    top: tuple[TimedConfig, ...]
    importances: tuple[Importance, ...]
    splits: tuple[SplitTime, ...]
    failures: tuple[Failure, ...] = ()
    finalists: tuple[Verified, ...] = ()
    attribution: Attribution | None = None
    tie_band: float | None = None
    noise: float | None = None
    first_at: str = ""
    last_at: str = ""
    verified_at: str = ""
    run_time: RunTime | None = None

    @property
    def winner(self) -> Verified | None:
        return next((v for v in self.finalists if v.chosen), None)

    @property
    def default(self) -> Verified | None:
        return next((v for v in self.finalists if v.role == "default"), None)

    @property
    def speedup(self) -> float | None:
        """Default time ÷ winner time, both from the same interleaved rounds."""
        winner, default = self.winner, self.default
        return None if winner is None or default is None else default.time_us / winner.time_us

    @property
    def configs_tried(self) -> int:
        return sum(count for _, count in self.statuses)


@dataclass(frozen=True)
class Report:
    """A set of problems and where they come from. `command` makes the report's numbers again."""

    title: str
    problems: tuple[ProblemReport, ...]
    made_at: str
    made_by: str
    database: str
    command: str
    notes: tuple[str, ...] = field(default=())


def importances(configs: list[TimedConfig]) -> tuple[Importance, ...]:
    """Parameters by the range of their values' medians, largest first; parameters with one value are left out."""
    found = []
    for name in sorted({name for timed in configs for name in timed.config}):
        groups: dict[Value, list[float]] = {}
        for timed in configs:
            if name in timed.config:
                groups.setdefault(timed.config[name], []).append(timed.time_us)
        if len(groups) < 2:
            continue
        rows = [(value, median(times), len(times)) for value, times in groups.items()]
        rows.sort(key=lambda row: (isinstance(row[0], str), row[0]))
        best = min(row[1] for row in rows)
        spread = max(row[1] for row in rows) / best - 1 if best > 0 else 0.0
        found.append(Importance(name, spread, tuple(rows)))
    return tuple(sorted(found, key=lambda importance: (-importance.spread, importance.parameter)))


def split_times(configs: list[TimedConfig]) -> tuple[SplitTime, ...]:
    """Best and median time per `num_comm_sms`; empty for a family without a split."""
    groups: dict[int, list[float]] = {}
    for timed in configs:
        split = timed.config.get("num_comm_sms")
        if isinstance(split, int):
            groups.setdefault(split, []).append(timed.time_us)
    return tuple(
        SplitTime(split, min(times), median(times), len(times)) for split, times in sorted(groups.items())
    )


def lookup_command(problem: Problem, device: DeviceClass, policy: str) -> str:
    """The command that asks for this problem's config."""
    import shlex

    words = ["tktune lookup"]
    skipped = {"dtype": "bf16", "weight_layout": "ekn", "routing": "uniform"}
    for name, value in problem.key.items():
        if skipped.get(name) == value or (problem.ep_world is not None and name == "world"):
            continue
        words.append(f"--{name.replace('_', '-')} {shlex.quote(str(value))}")
    named = "cpu" if device.backend == "cpu" else rehearsal_name(device)
    words += [f"--device {named}"] if named else []
    words += [f"--policy {shlex.quote(policy)}"] if policy != "serving" else []
    return " ".join(words)
