"""Counting a space and making its configs: alike, and as plain filtering says, for what families declare they look at."""

from __future__ import annotations

import pytest

from tktune.core.config import Config
from tktune.core.device import PRESETS, DeviceClass
from tktune.core.feasible import SAME_BEHAVIOUR
from tktune.core.problem import Problem
from tktune.core.space import Parameter, Space
from tktune.families.base import family

CPU = DeviceClass("cpu", "test", 4, 1 << 20, 1 << 22, "shm")
PROBLEMS = (
    Problem("grouped_gemm", 256, 192, 8, 2, 64, weight_layout="enk", ep_world=2),
    Problem("dispatch_gemm", 256, 192, 8, 2, 64, world=2, weight_layout="enk"),
    Problem("dispatch_gemm", 256, 256, 8, 1, 64, world=2, weight_layout="enk", finish="swiglu"),
    Problem("gemm_combine", 256, 192, 8, 2, 64, world=2, weight_layout="enk"),
    Problem("gemm_combine", 256, 192, 8, 2, 64, world=1, weight_layout="enk"),
)


def cut_down(space: Space) -> Space:
    """Two values of each build parameter, first and last, and every launch."""
    ends = {
        p.name: tuple(dict.fromkeys((p.values[0], p.values[-1])))
        for p in space.parameters
        if p.kind == "build"
    }
    return space.restrict(ends)


@pytest.mark.parametrize("device", [CPU, PRESETS["sm_90a"], PRESETS["sm_120a"]], ids=lambda d: d.arch)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{p.family}-{p.finish}-{p.world}")
def test_a_family_names_all_that_its_launches_depend_on(problem: Problem, device: DeviceClass) -> None:
    space = cut_down(family(problem.family).space(problem, device))
    plain = {
        space.canonical(config)
        for config in space.all_configs()
        if all(rule.broken(space.canonical(config), problem, device) is None for rule in space.constraints)
    }
    found, counts = space.enumerate(), space.count()
    assert found.members == plain and len(found) == len(plain)
    assert (counts.total, counts.feasible, counts.waterfall) == (found.total, len(found), found.waterfall)
    assert counts.builds == len({space.build_part(config) for config in found})
    assert found.waterfall[-1].left == len(found)


def test_a_canonical_form_that_says_what_it_looks_at_is_asked_once_for_builds_that_agree() -> None:
    asked: list[Config] = []

    def alike(config: Config) -> Config:
        asked.append(config)
        return config.replace(late=0) if config["A"] == 1 else config

    parameters = (
        Parameter("A", (1, 2), "build", ""),
        Parameter("B", (1, 2, 3), "build", ""),
        Parameter("late", (0, 1), "launch", ""),
    )
    default = Config(A=1, B=1, late=0)
    for over, times in ((("A",), 4), (None, 12)):
        asked.clear()
        space = Space(PROBLEMS[0], CPU, parameters, (), default, alike, canonical_over=over)
        counts = space.count()
        assert len(asked) == times
        assert (counts.feasible, counts.builds) == (9, 6)
        assert [(row.name, row.removed) for row in counts.waterfall] == [(SAME_BEHAVIOUR, 3)]
