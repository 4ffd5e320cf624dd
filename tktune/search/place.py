"""One build and what is known of it during a run: its artifact, its launch points, how far it was swept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tktune.build.artifact import Artifact
from tktune.core.build_spec import BuildSpec
from tktune.core.config import Config
from tktune.core.space import Space
from tktune.families.base import Family
from tktune.search.racing import LaunchSweep


@dataclass
class BuildPlace:
    """A build part, its feasible configs (`points`) and the sweep over them.

    `told` once the sampler knows the build's cost; `failed` when it cannot be built. `again` holds points that
    ended without a verdict and are tried once more.
    """

    build: Config
    spec: BuildSpec
    points: Sequence[Config]
    sweep: LaunchSweep
    name_of: Callable[[BuildSpec], str]
    artifact: Artifact | None = None
    build_seconds: float = 0.0
    told: bool = False
    failed: bool = False
    again: list[Config] = field(default_factory=list)

    @cached_property
    def digest(self) -> str:
        """The name of the artifact, whether or not it is built."""
        return self.name_of(self.spec)

    @property
    def exhausted(self) -> bool:
        return self.failed or self.sweep.closed() or (len(self.sweep) == 0 and not self.again)


def places_of(
    space: Space,
    family: Family,
    default: Config,
    cost_us: Mapping[Config, float],
    name_of: Callable[[BuildSpec], str],
) -> dict[Config, BuildPlace]:
    """Every build of the feasible set, in its order."""
    points: dict[Config, list[Config]] = {}
    for config in space.feasible:
        points.setdefault(space.build_part(config), []).append(config)
    return {
        build: BuildPlace(
            build,
            family.build_spec(build, space.problem, space.device),
            configs,
            LaunchSweep(space, configs, default, cost_us),
            name_of,
        )
        for build, configs in points.items()
    }
