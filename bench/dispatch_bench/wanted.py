"""What the dispatch bench measures of one problem: the winner of a database, the default, and the sweep of the split.
Reads a store; no CUDA here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tktune.core import status
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.core.space import Space
from tktune.families.base import family
from tktune.search.attribution import SPLIT, splits_of
from tktune.store.results import Store
from tktune.store.rows import STARTED, TrialRow, WinnerRow

NEVER_MEASURED = ("refused:", status.BUILD_FAILED, STARTED)


@dataclass(frozen=True)
class Cost:
    """What the tuner measured for its winner, against sweeps that would have found it: numbers of configs.

    `measured`: configs of this problem that a gang has launched. `line` are the splits at the winner's build and other
    launch values, of which it measured `on_line`. `tried_builds` × `launches` configs is a sweep of every launch value of
    the builds that it measured; `space` is everything feasible.
    """

    measured: int
    on_line: int
    line: int
    tried_builds: int
    launches: int
    space: int

    @property
    def tried(self) -> int:
        return self.tried_builds * self.launches


@dataclass(frozen=True)
class Wanted:
    """What is measured of `problem`; all configs belong to the winner's or the default's build.

    `provenance`: exact (a winner of this problem), uniform (that of the same shape with uniform routing), default
    (there is none: the default stands for it). `sweep` is the winner with every split of its space, by split.
    """

    problem: Problem
    provenance: str
    winner: Config
    default: Config
    sweep: tuple[Config, ...]
    artifact_digest: str = ""
    cost: Cost | None = None
    gemm: Config | None = None  # of our own grouped GEMM, for the rows of rank 0
    gemm_problem: Problem | None = None
    notes: list[str] = field(default_factory=list)


def wanted(store: Store | None, problem: Problem, device: DeviceClass, policy: str = "serving") -> Wanted:
    """Look up what the store knows of `problem`. Raises `DatabaseError`."""
    space = family(problem.family).space(problem, device)
    default = space.default_config()
    row, provenance = _winner(store, problem, device, policy)
    notes = []
    if row is not None and not space.is_feasible(row.config):
        notes.append(f"The stored winner {row.config} is not feasible any more; the default stands for it.")
        row, provenance = None, "default"
    winner = default if row is None else row.config
    gemm_problem = alone_problem(problem)
    gemm = None if store is None else store.winner(gemm_problem, device, policy)
    return Wanted(
        problem,
        provenance,
        winner,
        default,
        sweep_of(space, winner),
        "" if row is None else row.artifact_digest,
        None if store is None or row is None else cost_of(_trials(store, row), space, winner),
        None if gemm is None else gemm.config,
        None if gemm is None else gemm_problem,
        notes,
    )


def sweep_of(space: Space, winner: Config) -> tuple[Config, ...]:
    """Every feasible split at the winner's build and other launch values."""
    values = next(p.values for p in space.parameters if p.name == SPLIT)
    points = {space.canonical(winner.replace(**{SPLIT: value})) for value in values}
    return tuple(splits_of(winner, [point for point in points if space.is_feasible(point)]))


def alone_problem(problem: Problem) -> Problem:
    """The grouped GEMM of the rows that rank 0 of `problem` owns."""
    return problem.replace(family="grouped_gemm", ep_world=problem.world, ep_rank=0, world=1)


def cost_of(trials: Iterable[TrialRow], space: Space, winner: Config) -> Cost:
    """Count the configs that were measured, each once, against the sweeps."""
    measured = {row.config for row in trials if not row.status.startswith(NEVER_MEASURED)}
    line = sweep_of(space, winner)
    build = space.build_part(winner)
    launches = space.restrict({name: [build[name]] for name in build}).feasible
    return Cost(
        measured=len(measured),
        on_line=len(measured & set(line)),
        line=len(line),
        tried_builds=len({space.build_part(config) for config in measured}),
        launches=len(launches),
        space=len(space.feasible),
    )


def _winner(
    store: Store | None, problem: Problem, device: DeviceClass, policy: str
) -> tuple[WinnerRow | None, str]:
    if store is None:
        return None, "default"
    exact = store.winner(problem, device, policy)
    if exact is not None:
        return exact, "exact"
    uniform = store.winner(problem.replace(routing="uniform"), device, policy)
    return uniform, "default" if uniform is None else "uniform"


def _trials(store: Store, row: WinnerRow) -> list[TrialRow]:
    """The trials under the key that `row` won."""
    found: list[TrialRow] = []
    for facts in map(store.key_facts, store.keys()):
        same = (facts.problem, facts.device, facts.policy) == (row.problem, row.device, row.policy)
        if same and facts.toolchain == row.toolchain:
            found += store.trials(facts.key)
    return found
