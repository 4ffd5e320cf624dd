"""The search space as an object: parameters, named constraints, the feasible set and its waterfall."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from tktune.core.config import Config, Value
from tktune.core.device import DeviceClass
from tktune.core.errors import NothingFeasible, WordsError
from tktune.core.problem import Problem


@dataclass(frozen=True)
class Parameter:
    """One tunable. `build` changes the artifact; `launch` is an argument of the launch."""

    name: str
    values: tuple[Value, ...]
    kind: Literal["build", "launch"]
    meaning: str


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


@dataclass(frozen=True)
class WaterfallRow:
    """What one constraint removed from those that the ones before it left."""

    name: str
    meaning: str
    removed: int
    left: int
    example: str


@dataclass(frozen=True)
class FeasibleSet:
    """Every config that passes, in a fixed order, and how the others fell.

    `total` counts the product of all values; each waterfall row takes its part, and what the last row leaves is
    `len(self)`.
    """

    configs: tuple[Config, ...]
    total: int
    waterfall: tuple[WaterfallRow, ...]

    def __len__(self) -> int:
        return len(self.configs)

    def __iter__(self) -> Iterator[Config]:
        return iter(self.configs)

    @cached_property
    def members(self) -> frozenset[Config]:
        return frozenset(self.configs)


SAME_BEHAVIOUR = "same_behaviour"


class Space:
    """Parameters and constraints of one family, bound to a problem and a device.

    `canonical` maps configs that behave the same to one of them, so that inert values are never measured
    twice. `default` is what a person would run without tuning; it need not be feasible (`default_config`
    finds the nearest one that is). Constraints over build parameters alone are judged first, once a build.
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
        self.pinned = tuple(pinned)
        self._map_canonical = canonical
        self._verdicts: list[dict[Any, str | None]] = [{} for _ in self.constraints]
        self._firsts: dict[int, tuple[tuple[str, ...] | None, dict[Any, int | None]]] = {}

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
            parameters.append(Parameter(p.name, values, p.kind, p.meaning))
        return Space(
            self.problem,
            self.device,
            parameters,
            self.constraints,
            self.default,
            self._map_canonical,
            (*self.pinned, *pins),
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
        removed = [0] * len(self.constraints)
        example = [""] * len(self.constraints)
        same = 0
        seen: set[Config] = set()
        kept: list[Config] = []
        build_level = range(self._first_launch)
        launch_level = range(self._first_launch, len(self.constraints))
        launch_count = math.prod(len(p.values) for p in self.parameters if p.kind == "launch")
        for first, launches in self._builds():
            index = self._first_broken(first, build_level)
            if index is not None:
                removed[index] += launch_count
                example[index] = example[index] or self._verdict(index, first) or ""
                continue
            for config in launches:
                if self._map_canonical is not None:
                    config = self.canonical(config)
                    if config in seen:
                        same += 1
                        continue
                    seen.add(config)
                index = self._first_broken(config, launch_level)
                if index is None:
                    kept.append(config)
                else:
                    removed[index] += 1
                    example[index] = example[index] or self._verdict(index, config) or ""

        rows = []
        left = self.size
        for index, constraint in enumerate(self.constraints):
            if index == self._first_launch and same:
                left -= same
                rows.append(_same_row(same, left))
            left -= removed[index]
            rows.append(
                WaterfallRow(constraint.name, constraint.meaning, removed[index], left, example[index])
            )
        if same and not launch_level:
            rows.append(_same_row(same, left - same))
        return FeasibleSet(tuple(kept), self.size, tuple(rows))

    def default_config(self) -> Config:
        """The default, or the feasible config that differs from it in the fewest parameters and steps."""
        default = self.canonical(self.default)
        listed = all(default[p.name] in p.values for p in self.parameters)
        if listed and self.is_feasible(default):  # a lookup must not pay for the whole enumeration
            return default
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
        """The first of these constraints that `config` breaks, remembered by the parameters they look at."""
        if not indices:
            return None
        if indices.start not in self._firsts:
            overs = [self.constraints[index].over for index in indices]
            names = None if None in overs else tuple({name: None for over in overs for name in over or ()})
            self._firsts[indices.start] = (names, {})
        names, firsts = self._firsts[indices.start]
        key = None if names is None else tuple([config[name] for name in names])
        if key in firsts:
            return firsts[key]
        first = next((index for index in indices if self._verdict(index, config) is not None), None)
        if key is not None:
            firsts[key] = first
        return first

    def _builds(self) -> Iterator[tuple[Config, Iterator[Config]]]:
        """Every build: its first config, and all its configs (the launches of that build) made one by one."""
        names = [p.name for p in self.parameters]
        order = sorted(range(len(names)), key=names.__getitem__)
        ordered = [names[i] for i in order]

        def config(values: tuple[Value, ...]) -> Config:
            return Config.of_sorted(dict(zip(ordered, [values[i] for i in order], strict=True)))

        builds = itertools.product(*(p.values for p in self.parameters if p.kind == "build"))
        launches = list(itertools.product(*(p.values for p in self.parameters if p.kind == "launch")))
        for build in builds if launches else ():
            yield config(build + launches[0]), map(config, [build + launch for launch in launches])

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


def _same_row(removed: int, left: int) -> WaterfallRow:
    return WaterfallRow(
        SAME_BEHAVIOUR,
        "behaves like another config that is listed",
        removed,
        left,
        "a value has no effect here",
    )
