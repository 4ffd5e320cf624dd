"""The search space as an object: parameters, named constraints, the feasible set and its waterfall."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

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
    shared memory, the device gives 101376"). `meaning` says in general what it asks.
    """

    name: str
    meaning: str
    broken: Explanation


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
    """Every config that passes, in a fixed order, and how the others fell."""

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


class Space:
    """Parameters and constraints of one family, bound to a problem and a device.

    `canonical` maps configs that behave the same to one of them, so that inert values are never measured
    twice. `default` is what a person would run without tuning; it need not be feasible (`default_config`
    finds the nearest one that is).
    """

    def __init__(
        self,
        problem: Problem,
        device: DeviceClass,
        parameters: Sequence[Parameter],
        constraints: Sequence[Constraint],
        default: Config,
        canonical: Callable[[Config], Config] | None = None,
    ) -> None:
        self.problem = problem
        self.device = device
        self.parameters = tuple(parameters)
        self.constraints = tuple(constraints)
        self.default = default
        self._canonical = canonical or (lambda config: config)

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

    def broken(self, config: Config) -> list[tuple[Constraint, str]]:
        """Every constraint that `config` breaks, each with its sentence."""
        found = []
        for constraint in self.constraints:
            sentence = constraint.broken(config, self.problem, self.device)
            if sentence is not None:
                found.append((constraint, sentence))
        return found

    def is_feasible(self, config: Config) -> bool:
        return all(c.broken(config, self.problem, self.device) is None for c in self.constraints)

    def restrict(self, pins: Mapping[str, Sequence[Value]]) -> Space:
        """The same space with some parameters limited to these values. Raises `WordsError` on an unknown one."""
        known = {p.name: p for p in self.parameters}
        for name in pins:
            if name not in known:
                raise WordsError(f"There is no parameter {name!r}.", f"Use one of: {', '.join(known)}.")
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
        return Space(self.problem, self.device, parameters, self.constraints, self.default, self._canonical)

    def all_configs(self) -> Iterator[Config]:
        names = [p.name for p in self.parameters]
        for values in itertools.product(*(p.values for p in self.parameters)):
            yield Config(zip(names, values, strict=True))

    @cached_property
    def feasible(self) -> FeasibleSet:
        """The feasible set. Raises `NothingFeasible` when it is empty."""
        found = self.enumerate()
        if not found.configs:
            raise self._nothing_feasible()
        return found

    def enumerate(self) -> FeasibleSet:
        """Enumerate without raising: the feasible set may be empty."""
        seen: set[Config] = set()
        kept: list[Config] = []
        removed = [0] * len(self.constraints)
        example = [""] * len(self.constraints)
        total = 0
        for raw in self.all_configs():
            config = self._canonical(raw)
            if config in seen:
                continue
            seen.add(config)
            total += 1
            for index, constraint in enumerate(self.constraints):
                sentence = constraint.broken(config, self.problem, self.device)
                if sentence is not None:
                    removed[index] += 1
                    example[index] = example[index] or sentence
                    break
            else:
                kept.append(config)
        rows = []
        left = total
        for index, constraint in enumerate(self.constraints):
            left -= removed[index]
            rows.append(
                WaterfallRow(constraint.name, constraint.meaning, removed[index], left, example[index])
            )
        return FeasibleSet(tuple(kept), total, tuple(rows))

    def default_config(self) -> Config:
        """The default, or the feasible config that differs from it in the fewest parameters and steps."""
        default = self._canonical(self.default)
        if default in self.feasible.members:
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

    def _nothing_feasible(self) -> NothingFeasible:
        """Name the constraint that binds and the smallest relaxation that would let one config pass."""
        best: tuple[int, tuple[int, int]] | None = None
        sentences: list[tuple[Constraint, str]] = []
        nearest = self.default
        for config in map(self._canonical, self.all_configs()):
            broken = self.broken(config)
            rank = (len(broken), self.distance(config, self.default))
            if best is None or rank < best:
                best, sentences, nearest = rank, broken, config
        binding = "; and ".join(f"{constraint.name}: {sentence}" for constraint, sentence in sentences)
        return NothingFeasible(
            f"No config of {self.problem.family} fits {self.problem} on {self.device}: the constraint that binds is {binding}.",
            f"The smallest relaxation lets {nearest} pass; change the shape, pad or device accordingly.",
        )
