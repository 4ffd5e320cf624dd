"""What the dispatch bench measures of one problem: the winner of a database, the default, the sweep of the split, and the
sweep that is made by hand. Reads a store and committed results; no CUDA here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from dispatch_bench.hand import hand_sweep
from tktune.core import status
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.core.space import Space
from tktune.families.base import family
from tktune.search.attribution import SPLIT, splits_of
from tktune.store.results import Store
from tktune.store.rows import STARTED, TrialRow, WinnerRow

RESULTS = Path(__file__).resolve().parents[1] / "results"
NEVER_MEASURED = ("refused:", status.BUILD_FAILED, STARTED)


@dataclass(frozen=True)
class Cost:
    """What the tuner measured for its winner: numbers of configs, each once.

    `measured` were launched by a gang, of `builds` builds; the winner was the `found_after`th of them. `on_line` differ
    from it at most in their split, which has `line` values; `in_sweep` belong to the sweep that is made by hand; `space`
    is everything feasible.
    """

    measured: int
    found_after: int
    builds: int
    on_line: int
    line: int
    in_sweep: int
    space: int


@dataclass(frozen=True)
class Wanted:
    """What is measured of `problem`.

    `provenance`: exact (a winner of this problem), uniform (that of the same shape with uniform routing), default
    (there is none: the default stands for it). `sweep` is the winner with every split of its space, by split; `hand`
    what the tuner is held against (`dispatch_bench.hand`), empty where that is not measured.
    """

    problem: Problem
    provenance: str
    winner: Config
    default: Config
    sweep: tuple[Config, ...]
    hand: tuple[Config, ...] = ()
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
    gemm, said = gemm_config(store, gemm_problem, device, policy)
    notes += [said] if said else []
    hand = hand_sweep(space)
    return Wanted(
        problem,
        provenance,
        winner,
        default,
        sweep_of(space, winner),
        hand,
        "" if row is None else row.artifact_digest,
        None if store is None or row is None else cost_of(_trials(store, row), space, winner, hand),
        gemm,
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


def gemm_config(
    store: Store | None, problem: Problem, device: DeviceClass, policy: str
) -> tuple[Config | None, str]:
    """Our grouped GEMM's winner for `problem`, with a sentence where it is not the store's own: then that of uniform
    routing, or the one whose measurement is committed. None where there is none that this version can build.
    """
    space = family(problem.family).space(problem, device)
    uniform = problem.replace(routing="uniform")
    for asked in dict.fromkeys((problem, uniform)):
        row = None if store is None else store.winner(asked, device, policy)
        if row is not None and space.is_feasible(row.config):
            return row.config, ""
    for path in sorted(RESULTS.glob("gpu_grouped_gemm_*.json"), reverse=True):
        for shape in json.loads(path.read_text())["shapes"]:
            config = space.default.replace(**shape["winner"]["config"])
            same = Problem(**shape["problem"]) == uniform and set(config) == set(space.default)
            if same and space.is_feasible(config):
                return config, f"Our grouped GEMM runs the winner of {path.name}: this database has none."
    return None, ""


def cost_of(trials: Iterable[TrialRow], space: Space, winner: Config, hand: Iterable[Config]) -> Cost:
    """Count the configs that were measured, each once, in the order in which they were begun."""
    launched = [row for row in trials if not row.status.startswith(NEVER_MEASURED)]
    measured = list(dict.fromkeys(row.config for row in sorted(launched, key=lambda row: row.id)))
    line = sweep_of(space, winner)
    return Cost(
        measured=len(measured),
        found_after=measured.index(winner) + 1 if winner in measured else len(measured),
        builds=len({space.build_part(config) for config in measured}),
        on_line=len({*measured} & {*line}),
        line=len(line),
        in_sweep=len({*measured} & {*hand}),
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
