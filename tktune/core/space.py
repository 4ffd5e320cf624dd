"""The search space as an object: parameters, named constraints, the feasible set and its waterfall."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from tktune.core.config import Config, Value
from tktune.core.device import DeviceClass
from tktune.core.errors import NothingFeasible, WordsError
from tktune.core.feasible import Counts, FeasibleSet, WaterfallRow, same_row
from tktune.core.problem import Problem


@dataclass(frozen=True)
class Parameter:
    """One tunable. `build` changes the artifact; `launch` is an argument of the launch. `absent`: what a config means that is
    older than the parameter; None where there is no such config.
    """

    name: str
    values: tuple[Value, ...]
    kind: Literal["build", "launch"]
    meaning: str
    absent: Value | None = None


Explanation = Callable[[Config, Problem, DeviceClass], str | None]


@dataclass(frozen=True)
class Constraint:
    """A named predicate over (config, problem, device).

    `broken` returns None when the config passes, else one sentence with the numbers ("needs 131072 bytes of
    shared memory, the device gives 101376"). `meaning` says in general what it asks. `over` names the
    parameters the verdict depends on (None: all); it lets a verdict be reached once for many configs.
    `way_out` says for a broken config what change of problem or device would let it pass ("use hidden = 2944"),
    and `excess` how large that change is, as a fraction of what there is.
    """

    name: str
    meaning: str
    broken: Explanation
    over: tuple[str, ...] | None = None
    way_out: Explanation | None = None
    excess: Callable[[Config, Problem, DeviceClass], float] | None = None


@dataclass
class _Grid:
    """The launches of a build: those kept, how many behave like another, and what each constraint (by its place) removed,
    with the sentence of the first."""

    kept: list[tuple[Value, ...]] = field(default_factory=list)
    same: int = 0
    removed: dict[int, tuple[int, str]] = field(default_factory=dict)


class Space:
    """Parameters and constraints of one family, bound to a problem and a device.

    `canonical` maps configs of one build that behave the same to one of them, so that inert values are never
    measured twice; `canonical_over` names the build parameters it looks at (None: any). `default_config` is what a person runs without tuning:
    `recommended`, a config that was measured to be fast on problems of this kind, where it is feasible; else `default`, which
    need not be either (then the nearest feasible one). Constraints over build parameters alone are judged first, once a build.
    """

    def __init__(
        self,
        problem: Problem,
        device: DeviceClass,
        parameters: Sequence[Parameter],
        constraints: Sequence[Constraint],
        default: Config,
        canonical: Callable[[Config], Config] | None = None,
        pinned: Sequence[str] = (),
        canonical_over: tuple[str, ...] | None = None,
        recommended: Config | None = None,
    ) -> None:
        self.problem = problem
        self.device = device
        self.parameters = tuple(sorted(parameters, key=lambda p: p.kind != "build"))
        build_names = {p.name for p in self.parameters if p.kind == "build"}
        self.constraints = tuple(
            sorted(constraints, key=lambda c: c.over is None or not build_names.issuperset(c.over))
        )
        self._first_launch = sum(c.over is not None and build_names.issuperset(c.over) for c in constraints)
        self.default = default
        self.recommended = recommended
        self.pinned = tuple(pinned)
        self._map_canonical = canonical
        self._canonical_over = canonical_over
        self._verdicts: list[dict[Any, str | None]] = [{} for _ in self.constraints]

    @property
    def build_names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.parameters if p.kind == "build")

    @property
    def launch_names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.parameters if p.kind == "launch")

    @property
    def size(self) -> int:
        return math.prod(len(p.values) for p in self.parameters)

    def build_part(self, config: Config) -> Config:
        return config.only(self.build_names)

    def launch_part(self, config: Config) -> Config:
        return config.only(self.launch_names)

    def completed(self, config: Config) -> Config:
        """`config` with what it means for parameters that it is older than."""
        new = {p.name: p.absent for p in self.parameters if p.absent is not None and p.name not in config}
        return config.replace(**new) if new else config

    def canonical(self, config: Config) -> Config:
        """The config that stands for all that behave like `config`; itself where pins exclude that one."""
        if self._map_canonical is None:
            return config
        mapped = self._map_canonical(config)
        if mapped is config or all(mapped[p.name] in p.values for p in self.parameters):
            return mapped
        return config

    def broken(self, config: Config) -> list[tuple[Constraint, str]]:
        """Every constraint that `config` breaks, each with its sentence."""
        return self._broken_in(config, range(len(self.constraints)))

    def is_feasible(self, config: Config) -> bool:
        return all(self._verdict(index, config) is None for index in range(len(self.constraints)))

    def restrict(self, pins: Mapping[str, Sequence[Value]]) -> Space:
        """The same space with some parameters limited to these values. Raises `WordsError` on an unknown one."""
        known = {p.name: p for p in self.parameters}
        for name in pins:
            if name not in known:
                raise WordsError(
                    f"There is no parameter {name!r} on {self.device}.", f"Use one of: {', '.join(known)}."
                )
        parameters = []
        for p in self.parameters:
            values = tuple(pins.get(p.name, p.values))
            strange = [v for v in values if v not in p.values]
            if strange or not values:
                allowed = ", ".join(map(str, p.values))
                raise WordsError(
                    f"{p.name} cannot be {', '.join(map(str, strange)) or 'empty'}.", f"Use: {allowed}."
                )
            parameters.append(dataclasses.replace(p, values=values))
        return Space(
            self.problem,
            self.device,
            parameters,
            self.constraints,
            self.default,
            self._map_canonical,
            (*self.pinned, *pins),
            self._canonical_over,
            self.recommended,
        )

    def all_configs(self) -> Iterator[Config]:
        """Every combination of values, feasible or not, in a fixed order (build parameters vary slowest)."""
        return itertools.chain.from_iterable(launches for _, launches in self._builds())

    @cached_property
    def feasible(self) -> FeasibleSet:
        """The feasible set. Raises `NothingFeasible` when it is empty."""
        found = self.enumerate()
        if not found.configs:
            raise self._nothing_feasible()
        return found

    def enumerate(self) -> FeasibleSet:
        """Enumerate without raising: the feasible set may be empty."""
        counts, left = self._counted()
        configs = tuple([self._config(build + launch) for build, grid in left for launch in grid.kept])
        return FeasibleSet(configs, counts.total, counts.waterfall)

    def count(self) -> Counts:
        """How large the feasible set is and what removed the rest, without making its configs."""
        return self._counted()[0]

    def _counted(self) -> tuple[Counts, list[tuple[tuple[Value, ...], _Grid]]]:
        """The counts, and each build that passes with what is left of its launches."""
        removed = [0] * len(self.constraints)
        example = [""] * len(self.constraints)
        same = 0
        left_of: list[tuple[tuple[Value, ...], _Grid]] = []
        grids: dict[tuple[Value, ...], _Grid] = {}
        builds = itertools.product(*(p.values for p in self.parameters if p.kind == "build"))
        for build in builds if self._launches else ():
            first = self._config(build + self._launches[0])
            index = self._first_broken(first, range(self._first_launch))
            if index is not None:
                removed[index] += len(self._launches)
                example[index] = example[index] or self._verdict(index, first) or ""
                continue
            key = tuple([build[place] for place in self._launch_looks_at])
            grid = grids.get(key)
            if grid is None:
                grid = grids[key] = self._grid(build)
            same += grid.same
            for index, (count, sentence) in grid.removed.items():
                removed[index] += count
                example[index] = example[index] or sentence
            if grid.kept:
                left_of.append((build, grid))

        rows = []
        left = self.size
        for index, constraint in enumerate(self.constraints):
            if index == self._first_launch and same:
                left -= same
                rows.append(same_row(same, left))
            left -= removed[index]
            rows.append(
                WaterfallRow(constraint.name, constraint.meaning, removed[index], left, example[index])
            )
        if same and self._first_launch == len(self.constraints):
            rows.append(same_row(same, left - same))
            left -= same
        return Counts(self.size, left, len(left_of), tuple(rows)), left_of

    def default_config(self) -> Config:
        """The recommended config, else the default, else the feasible one that differs from it in the fewest parameters and
        steps."""
        default = self.canonical(self.default)
        first = [] if self.recommended is None else [self.canonical(self.recommended)]
        for config in (*first, default):  # a lookup must not pay for the whole enumeration
            if all(config[p.name] in p.values for p in self.parameters) and self.is_feasible(config):
                return config
        return min(self.feasible.configs, key=lambda config: self.distance(config, default))

    def distance(self, one: Config, other: Config) -> tuple[int, int]:
        """How far two configs are apart: parameters that differ, then steps along the listed values."""
        differ = steps = 0
        for p in self.parameters:
            if one[p.name] != other[p.name]:
                differ += 1
                if one[p.name] in p.values and other[p.name] in p.values:
                    steps += abs(p.values.index(one[p.name]) - p.values.index(other[p.name]))
        return differ, steps

    def _broken_in(self, config: Config, indices: range) -> list[tuple[Constraint, str]]:
        verdicts = ((self.constraints[index], self._verdict(index, config)) for index in indices)
        return [(constraint, sentence) for constraint, sentence in verdicts if sentence is not None]

    def _verdict(self, index: int, config: Config) -> str | None:
        constraint = self.constraints[index]
        if constraint.over is None:
            return constraint.broken(config, self.problem, self.device)
        verdicts = self._verdicts[index]
        key = tuple([config[name] for name in constraint.over])
        if key in verdicts:
            return verdicts[key]
        verdict = verdicts[key] = constraint.broken(config, self.problem, self.device)
        return verdict

    def _first_broken(self, config: Config, indices: range) -> int | None:
        """The first of these constraints that `config` breaks."""
        return next((index for index in indices if self._verdict(index, config) is not None), None)

    def _config(self, values: Sequence[Value]) -> Config:
        """The config with these values, which stand in the order of the parameters."""
        return Config.of_sorted({name: values[place] for name, place in self._sorted_places})

    @cached_property
    def _sorted_places(self) -> list[tuple[str, int]]:
        """Every parameter's name and place, by name."""
        return sorted((parameter.name, place) for place, parameter in enumerate(self.parameters))

    @cached_property
    def _launches(self) -> list[tuple[Value, ...]]:
        """Every combination of launch values."""
        return list(itertools.product(*(p.values for p in self.parameters if p.kind == "launch")))

    @cached_property
    def _launch_looks_at(self) -> list[int]:
        """Places of the build parameters that the launches of a build can depend on: builds that agree in those have the
        same launches. All of them where a constraint or `canonical` does not say which."""
        overs = [constraint.over for constraint in self.constraints[self._first_launch :]]
        if self._map_canonical is not None:
            overs.append(self._canonical_over)
        known = {name for over in overs for name in (self.build_names if over is None else over)}
        return [place for place, name in enumerate(self.build_names) if name in known]

    def _grid(self, build: tuple[Value, ...]) -> _Grid:
        """What is left of the launches of one build."""
        grid = _Grid()
        seen: set[Config] = set()
        for launch in self._launches:
            config = self._config(build + launch)
            if self._map_canonical is not None:
                config = self.canonical(config)
                if config in seen:
                    grid.same += 1
                    continue
                seen.add(config)
            index = self._first_broken(config, range(self._first_launch, len(self.constraints)))
            if index is None:
                grid.kept.append(tuple([config[name] for name in self.launch_names]))
            else:
                count, sentence = grid.removed.get(index) or (0, self._verdict(index, config) or "")
                grid.removed[index] = count + 1, sentence
        return grid

    def _builds(self) -> Iterator[tuple[Config, Iterator[Config]]]:
        """Every build: its first config, and all its configs (the launches of that build) made one by one."""
        builds = itertools.product(*(p.values for p in self.parameters if p.kind == "build"))
        for build in builds if self._launches else ():
            yield (
                self._config(build + self._launches[0]),
                map(self._config, [build + launch for launch in self._launches]),
            )

    def _nothing_feasible(self) -> NothingFeasible:
        """Name the constraint that binds and the smallest relaxation that would let one config pass."""
        best: tuple[int, float, tuple[int, int]] | None = None
        nearest: Config | None = None
        values = {p.name: p.values for p in self.parameters}
        usual_launch = self.launch_part(self.default)
        listed = all(value in values[name] for name, value in usual_launch.items())
        for first, launches in self._builds():
            build_level = len(self._broken_in(first, range(self._first_launch)))
            if best is not None and build_level > best[0]:
                continue
            # Where the default's launch values pass, no other launch of this build is nearer.
            usual = first.replace(**dict(usual_launch))
            clean = listed and not self._broken_in(usual, range(self._first_launch, len(self.constraints)))
            for config in [usual] if clean else launches:
                broken = self.broken(config)
                excess = sum(
                    c.excess(config, self.problem, self.device) if c.excess else 1.0 for c, _ in broken
                )
                rank = (len(broken), round(excess, 6), self.distance(config, self.default))
                if best is None or rank < best:
                    best, nearest = rank, config
        subject = f"No config of {self.problem.family} fits {self.problem} on {self.device}"
        if nearest is None:
            empty = ", ".join(p.name for p in self.parameters if not p.values)
            return NothingFeasible(f"{subject}: {empty} has no values.", "Use a larger device.")
        sentences = self.broken(nearest)
        binding = "; and ".join(f"{constraint.name}: {sentence}" for constraint, sentence in sentences)
        ways = [
            constraint.way_out(nearest, self.problem, self.device) if constraint.way_out else None
            for constraint, _ in sentences
        ]
        hints = list(dict.fromkeys(way for way in ways if way))
        if self.pinned:
            hints.append(f"or take the pin off {', '.join(dict.fromkeys(self.pinned))}")
        hint = "; ".join(hints) or "change the shape, the pad or the device accordingly"
        return NothingFeasible(
            f"{subject}: the constraint that binds is {binding}.",
            f"The smallest relaxation lets {nearest} pass: {hint}.",
        )
