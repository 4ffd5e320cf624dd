"""The pure half of the family `moe_layer`: the pair of kernels of an expert layer, tuned on the layer's time.

Its parameters are those of both kernels, under the names of their parts; its artifact is a pair. Nothing here imports
torch, numpy or a compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tktune.core.build_spec import BuildSpec
from tktune.core.config import Config, Value
from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.core.roles import RoleModel
from tktune.core.space import Constraint, Parameter, Space
from tktune.families.base import Family, RankSeat, Workbench, family
from tktune.moe.parts import (
    COMBINE,
    DISPATCH,
    FAMILIES,
    FAMILY_NAME,
    PARTS,
    joined_config,
    part_config,
    part_problem,
)

R = TypeVar("R")


class MoeLayer:
    """Dispatch with the first expert GEMM and SwiGLU, then the second GEMM with its weighted sum: one layer.

    The whole space is the product of both kernels' spaces: far too large to enumerate, and not meant to be. Restrict it
    before that, as the joint stage of a study does (`tktune.search.layer_study`).
    """

    name = FAMILY_NAME
    purpose = "an expert layer: dispatch, gate and up, SwiGLU, down, weighted sum; both kernels tuned on the layer's time"

    def space(self, problem: Problem, device: DeviceClass) -> Space:
        """Raises `WordsError` for a device class that one of the kernels does not run on, and `NothingFeasible` where no
        config of one of them fits: the default is made of those that do."""
        spaces = {part: family(FAMILIES[part]).space(part_problem(problem, part), device) for part in PARTS}

        def canonical(config: Config) -> Config:
            mapped = {part: space.canonical(part_config(config, part)) for part, space in spaces.items()}
            return joined_config(mapped[DISPATCH], mapped[COMBINE])

        return Space(
            problem,
            device,
            [_named(parameter, part) for part in PARTS for parameter in spaces[part].parameters],
            [_of_part(rule, part) for part in PARTS for rule in spaces[part].constraints],
            joined_config(_plain(spaces[DISPATCH]), _plain(spaces[COMBINE])),
            canonical,
            recommended=joined_config(spaces[DISPATCH].default_config(), spaces[COMBINE].default_config()),
        )

    def roles(self, config: Config, problem: Problem, device: DeviceClass) -> RoleModel:
        """Of the second launch. The first one's rules are constraints of the space, as this one's are: the launches follow
        each other in one stream, and no block of one waits for the other."""
        of_combine = part_problem(problem, COMBINE)
        return family(FAMILIES[COMBINE]).roles(part_config(config, COMBINE), of_combine, device)

    def cost_us(self, config: Config, problem: Problem, device: DeviceClass) -> float:
        """One kernel after the other."""
        return sum(
            family(FAMILIES[part]).cost_us(part_config(config, part), part_problem(problem, part), device)
            for part in PARTS
        )

    def build_spec(self, build_part: Config, problem: Problem, device: DeviceClass) -> BuildSpec:
        parts = tuple(
            family(FAMILIES[part]).build_spec(
                part_config(build_part, part), part_problem(problem, part), device
            )
            for part in PARTS
        )
        defines = {
            f"{part}.{name}": value
            for part, spec in zip(PARTS, parts, strict=True)
            for name, value in spec.defines.items()
        }
        return BuildSpec(
            name=" + ".join(spec.name for spec in parts),
            kind="pair",
            source=parts[0].source,
            arch=parts[0].arch,
            defines=defines,
            parts=parts,
        )

    def workbench(self, seat: RankSeat) -> Workbench:
        bench: Workbench
        if seat.device.backend == "cuda":
            from tktune.moe.bench_cuda import CudaLayerWorkbench

            bench = CudaLayerWorkbench(seat)
        else:
            from tktune.moe.bench_cpu import CpuLayerWorkbench

            bench = CpuLayerWorkbench(seat)
        return bench


def narrowed(space: Space, dispatch: Sequence[Config], combine: Sequence[Config]) -> Space:
    """`space` with every parameter limited to the values that it has in these configs of the kernels; the first of each
    make its default."""
    values: dict[str, tuple[Value, ...]] = {}
    for parameter in space.parameters:
        part, _, name = parameter.name.partition(".")
        used = {config[name] for config in (dispatch if part == DISPATCH else combine)}
        values[parameter.name] = tuple(value for value in parameter.values if value in used)
    limited = space.restrict(values)
    return Space(
        space.problem,
        space.device,
        limited.parameters,
        space.constraints,
        joined_config(dispatch[0], combine[0]),
        space.canonical,
        limited.pinned,
    )


def _plain(space: Space) -> Config:
    """A kernel's default as it stands, where it is feasible."""
    return space.default if space.is_feasible(space.default) else space.default_config()


def _named(parameter: Parameter, part: str) -> Parameter:
    meaning = f"{FAMILIES[part]}: {parameter.meaning}"
    return Parameter(f"{part}.{parameter.name}", parameter.values, parameter.kind, meaning)


def _of_part(rule: Constraint, part: str) -> Constraint:
    """A kernel's constraint as one of the layer."""

    def asked(question: Callable[[Config, Problem, DeviceClass], R]) -> Callable[..., R]:
        def answer(config: Config, problem: Problem, device: DeviceClass) -> R:
            return question(part_config(config, part), part_problem(problem, part), device)

        return answer

    way_out: Any = None if rule.way_out is None else asked(rule.way_out)
    excess: Any = None if rule.excess is None else asked(rule.excess)
    over = None if rule.over is None else tuple(f"{part}.{name}" for name in rule.over)
    return Constraint(f"{part}.{rule.name}", rule.meaning, asked(rule.broken), over, way_out, excess)


FAMILY: Family = MoeLayer()
