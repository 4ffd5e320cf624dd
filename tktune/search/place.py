"""One build and what is known of it during a run: its artifact, its launch points, which of them are still to be had."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tktune.build.artifact import Artifact
from tktune.core.build_spec import BuildSpec
from tktune.core.config import Config, Value, columns
from tktune.core.space import Space
from tktune.families.base import Family

_FAILURES_BEFORE_CLOSED = 2


@dataclass
class BuildPlace:
    """A build part and its feasible configs (`points`).

    `left` are the points that were not handed out yet; `failures` and `passed` count those that ended. `failed` when
    it cannot be built, `ordered` once somebody builds it.
    """

    build: Config
    spec: BuildSpec
    points: Sequence[Config]
    name_of: Callable[[BuildSpec], str]
    artifact: Artifact | None = None
    build_seconds: float = 0.0
    ordered: bool = False
    failed: bool = False
    failures: int = 0
    passed: int = 0
    left: dict[Config, None] = field(init=False)

    def __post_init__(self) -> None:
        self.left = dict.fromkeys(self.points)

    @cached_property
    def digest(self) -> str:
        """The name of the artifact, whether or not it is built."""
        return self.name_of(self.spec)

    def ended(self, *, passed: bool) -> None:
        """One of its points was judged."""
        if passed:
            self.passed += 1
        else:
            self.failures += 1

    @property
    def closed(self) -> bool:
        """Whether no more of its points are handed out: it cannot be built, or seems broken, since its points fail and
        none has passed."""
        return self.failed or (not self.passed and self.failures >= _FAILURES_BEFORE_CLOSED)


def places_of(space: Space, family: Family, name_of: Callable[[BuildSpec], str]) -> dict[Config, BuildPlace]:
    """Every build of the feasible set, in its order."""
    configs = space.feasible.configs
    by_name = columns(configs)
    points: dict[tuple[Value, ...], list[Config]] = {}
    parts = (
        zip(*(by_name[name] for name in space.build_names), strict=True)
        if space.build_names
        else itertools.repeat(())
    )
    for part, config in zip(parts, configs, strict=False):
        points.setdefault(part, []).append(config)
    of_build = ((space.build_part(same[0]), same) for same in points.values())
    return {
        build: BuildPlace(build, family.build_spec(build, space.problem, space.device), configs, name_of)
        for build, configs in of_build
    }


def remembered(name_of: Callable[[BuildSpec], str]) -> Callable[[BuildSpec], str]:
    """`name_of`, asked once for each artifact: the problems of one run share most of theirs."""
    known: dict[Any, str] = {}

    def found(spec: BuildSpec) -> str:
        key = _told_apart_by(spec)
        name = known.get(key)
        if name is None:
            name = known[key] = name_of(spec)
        return name

    return found


def _told_apart_by(spec: BuildSpec) -> Any:
    """Everything that an artifact's name depends on, but the sources' content and the compiler."""
    parts = tuple(map(_told_apart_by, spec.parts))
    return (
        *(spec.name, spec.kind, spec.source, spec.arch, spec.flags, spec.include_dirs, parts),
        tuple(sorted(spec.defines.items())),
    )
