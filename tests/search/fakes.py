"""A world without compilers and ranks: true times by formula, noise and failures on demand, a clock that only ticks
when something is done. The store is the real one, and so is `measure_trial`."""

from __future__ import annotations

import hashlib
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tktune.build.artifact import Artifact, BuildOutcome
from tktune.build.toolchain import Toolchain
from tktune.core import status
from tktune.core.build_spec import BuildSpec
from tktune.core.canonical import digest
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.core.roles import Role, RoleModel
from tktune.core.space import Constraint, Parameter, Space
from tktune.gang.gang import Outcome
from tktune.search.budget import StopSignal
from tktune.search.driver import tune
from tktune.search.events import Event, Tee
from tktune.search.results import Rooms, TuneResult
from tktune.search.study import Study
from tktune.store.results import Store
from tktune.store.rows import TrialRow

CPU = DeviceClass("cpu", "x86-64-v3.2c", 4, 1 << 20, 1 << 25, "shm")
GPU = DeviceClass("cuda", "sm_90a", 132, 232448, 62914560, "nvlink")
PROBLEM = Problem("dispatch_gemm", hidden=64, cols=64, experts=4, top_k=2, tokens=16, world=2)
BUILD = {"TILE": (16, 32, 64, 128), "STAGES": (1, 2, 3)}
LAUNCH = {"num_comm_sms": (1, 2, 3), "order": ("slot", "token")}
BOTTOM = Config(TILE=64, STAGES=3, num_comm_sms=2, order="token")  # the fastest
DEFAULT = Config(TILE=32, STAGES=2, num_comm_sms=1, order="slot")


def true_us(config: Config) -> float:
    """A bowl with its bottom at TILE 64, STAGES 3, num_comm_sms 2, order token: 100 µs."""
    us = (
        100.0
        * (1 + 0.3 * abs(config.number("TILE") - 64) / 64)
        * (1 + 0.1 * abs(config.number("STAGES") - 3))
    )
    return (
        us * (1 + 0.15 * abs(config.number("num_comm_sms") - 2)) * (1.05 if config["order"] == "slot" else 1)
    )


@dataclass
class FakeFamily:
    """A family whose space is a dict; `forbidden` configs are infeasible."""

    build: Mapping[str, Sequence[int | str]] = field(default_factory=lambda: BUILD)
    launch: Mapping[str, Sequence[int | str]] = field(default_factory=lambda: LAUNCH)
    default: Config = DEFAULT
    forbidden: Callable[[Config], bool] = lambda config: False
    model_us: Callable[[Config], float] = lambda config: 1.0
    name: str = "dispatch_gemm"

    def space(self, problem: Problem, device: DeviceClass) -> Space:
        parameters = [Parameter(n, tuple(v), "build", "") for n, v in self.build.items()]
        parameters += [Parameter(n, tuple(v), "launch", "") for n, v in self.launch.items()]

        def broken(config: Config, problem: Problem, device: DeviceClass) -> str | None:
            return "it is forbidden" if self.forbidden(config) else None

        return Space(
            problem, device, parameters, [Constraint("allowed", "not forbidden", broken)], self.default
        )

    def roles(self, config: Config, problem: Problem, device: DeviceClass) -> RoleModel:
        return RoleModel((Role("gemm", 1),), 4, 2.0)

    def cost_us(self, config: Config, problem: Problem, device: DeviceClass) -> float:
        return self.model_us(config)

    def build_spec(self, build_part: Config, problem: Problem, device: DeviceClass) -> BuildSpec:
        defines = {name: str(value) for name, value in build_part.items()}
        facts = {"smem_bytes": 1024, "threads_per_block": 64}
        return BuildSpec(f"fake {build_part}", "shared", Path("fake.cpp"), "native", defines, facts=facts)


@dataclass
class World:
    """The truth, and what was done in it."""

    truth: Callable[[Config], float] = true_us
    noise: float = 0.0
    disturbed: float = 0.0  # the share of launches that take four times as long
    seed: int = 0
    fate: Callable[[Config, str], str] = lambda config, command: status.OK  # status of a command on a config
    fails_to_build: Callable[[BuildSpec], bool] = lambda spec: False
    version: str = "1"
    mismatch: str = ""  # what the compiler says against the formulas
    trial_s: float = 1.0
    load_s: float = 0.0
    build_s: float = 2.0
    now: float = 0.0
    compiled: list[str] = field(default_factory=list)
    published: dict[str, Artifact] = field(default_factory=dict)
    gated: list[Config] = field(default_factory=list)
    timed: list[tuple[Config, str]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    building: bool = False
    loads: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def sample_us(self, config: Config, mode: str) -> float:
        split = config.get("num_comm_sms", 1)
        assert isinstance(split, int)
        share = {"fused": 1.0, "comp": 0.8, "comm": 0.3 + 0.2 * abs(split - 3), "serial": 1.2, "peer": 0.9}[
            mode
        ]
        share *= 4 if self.random.random() < self.disturbed else 1
        return self.truth(config) * share * (1 + self.noise * self.random.random())


class FakeCache:
    """Artifacts that are names; `fails_to_build` ones do not compile."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._folder = tempfile.TemporaryDirectory()
        self.root = Path(self._folder.name)

    def toolchain(self, spec: BuildSpec) -> Toolchain:
        return Toolchain("g++", Path("/usr/bin/g++"), "fake 1", ())

    def digest(self, spec: BuildSpec) -> str:
        return digest([spec.name, self.world.version])

    def holds(self, name: str) -> bool:
        return name in self.world.published

    def build(self, specs, jobs=None, on_done=None, cancel=None) -> list[BuildOutcome]:
        world, outcomes = self.world, []
        world.building = True
        for spec in specs:
            name = self.digest(spec)
            if world.fails_to_build(spec):
                outcome = BuildOutcome(spec, name, None, world.build_s, error_sentence=f"{spec.name} fails.")
            elif name in world.published:
                outcome = BuildOutcome(spec, name, world.published[name], cached=True)
            else:
                world.now += world.build_s
                world.compiled.append(spec.name)
                sha256 = hashlib.sha256(name.encode()).hexdigest()
                made = Artifact(
                    name, Path(f"/fake/{name}.so"), sha256, 1, {}, "t", "2026-01-01", world.build_s
                )
                world.published[name] = made
                against = (world.mismatch,) if world.mismatch else ()
                outcome = BuildOutcome(spec, name, made, world.build_s, mismatches=against)
            outcomes.append(outcome)
            if on_done is not None:
                on_done(outcome)
        world.building = False
        return outcomes


class FakeGang:
    """A gang without ranks: two of them, equally fast."""

    def __init__(self, world: World, problem: Problem, device: DeviceClass, policy: Policy) -> None:
        self.world, self.problem, self.device, self.policy = world, problem, device, policy
        self.respawns = self.survived = 0
        self.loaded: Config | None = None

    def __enter__(self) -> FakeGang:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def start(self) -> None:
        return None

    def close(self) -> None:
        return None

    def interrupt(self) -> None:
        return None

    def turn_to(self, problem: Problem) -> None:
        self.problem, self.loaded = problem, None

    def load(self, artifact: Path, sha256: str, build_part: Config) -> Outcome:
        self._alone()
        if build_part != self.loaded:
            self.world.loads += 1
            self.world.now += self.world.load_s
        self.loaded = build_part
        return Outcome(status.OK, replies=[{"facts": {}}] * 2)

    def gate(self, config: Config, routing: str, seed: int) -> Outcome:
        self._alone()
        self.world.gated.append(config)
        end = self.world.fate(config, "gate")
        body = {"passed": end == status.OK, "worst_error": 0.001, "tolerance": 0.01, "sentence": ""}
        return self._ended(end, [body] * 2)

    def time(self, config: Config, mode: str, seed: int, iterations: int) -> Outcome:
        self._alone()
        self.world.now += self.world.trial_s / 2
        self.world.timed.append((config, mode))
        end = self.world.fate(config, "time" if mode == "fused" else mode)
        us = [self.world.sample_us(config, mode) for _ in range(iterations)]
        return self._ended(end, [{"us": us}] * 2, us)

    def _ended(self, end: str, bodies: list[dict[str, object]], us: Sequence[float] = ()) -> Outcome:
        if end in (status.OK, status.WRONG):
            return Outcome(end, "" if end == status.OK else "It is wrong.", list(bodies), list(us))
        self.respawns += 1
        self.loaded = None
        return Outcome(end, f"It ended as {end}.", [None, None], gang_lives=False)

    def _alone(self) -> None:
        if self.device.backend == "cpu":
            assert not self.world.building, "building and timing overlap"


def study(trials: int = 20, seconds: float = 1e6, **changes: object) -> Study:
    fields: dict[str, object] = {
        "name": "fake",
        "family": "dispatch_gemm",
        "device": "cpu",
        "problems": (PROBLEM,),
        "trials": trials,
        "seconds": seconds,
        "seed": 0,
        "finalists": 3,
    }
    return Study(**{**fields, **changes})  # type: ignore[arg-type]


def tune_in(
    world: World,
    url: str,
    a_study: Study | None = None,
    *,
    family: FakeFamily | None = None,
    device: DeviceClass = CPU,
    stop: StopSignal | None = None,
    listen: Callable[[Event], None] = lambda event: None,
) -> TuneResult:
    """One run in `world`; its events are kept there."""

    def heard(event: Event) -> None:
        world.events.append(event)
        listen(event)

    rooms = Rooms(
        make_gang=lambda problem, device, policy, **_: FakeGang(world, problem, device, policy),  # type: ignore[arg-type,return-value]
        family=lambda name: family or FakeFamily(),
        clock=lambda: world.now,
        overlap=False,
    )
    cache = FakeCache(world)
    results = tune(
        a_study or study(),
        url,
        cache,  # type: ignore[arg-type]
        listener=Tee(heard),
        stop=stop,
        rooms=rooms,
        device=device,
    )
    (result,) = results
    return result


def of_kind(world: World, kind: type) -> list:
    return [event for event in world.events if isinstance(event, kind)]


def rows(url: str) -> list[TrialRow]:
    """Every trial in the database, in order."""
    with Store.open(url) as store:
        keys = store.keys()
        return [row for key in keys for row in store.trials(key)]
