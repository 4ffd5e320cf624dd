"""A layer and its two kernels: which problems they solve, and how their configs make one config of the layer. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from tktune.core.config import Config, Value
from tktune.core.errors import ProblemError, WordsError
from tktune.core.problem import GLU_COLS, Problem

FAMILY_NAME = "moe_layer"
DISPATCH, COMBINE = "dispatch", "combine"
PARTS = (DISPATCH, COMBINE)
FAMILIES = {DISPATCH: "dispatch_gemm", COMBINE: "gemm_combine"}
# The first GEMM's matrix has gate and up columns, and its kernel applies silu(gate) · up to what it stores.
GATE_AND_UP = 2
NO_EXPERT = -1  # an id that picks none, of tokens that are not there

T = TypeVar("T")


def is_layer(problem: Problem) -> bool:
    return problem.family == FAMILY_NAME


def part_problem(layer: Problem, part: str) -> Problem:
    """What one kernel of the layer computes.

    A layer's `hidden` is the length of a token, its `cols` the length of an expert's row between the two GEMMs. The
    dispatch multiplies with 2 × `cols` columns, gate and up; the combine goes from `cols` back to `hidden`. Both share
    the pad, so that one plan serves both. Raises `ProblemError` where gate and up cannot be packed.
    """
    if layer.finish != "none":
        raise ProblemError(
            f"A {FAMILY_NAME} always applies SwiGLU, and finish = {layer.finish!r} was asked for.",
            "Leave finish out.",
        )
    if layer.cols % GLU_COLS:
        raise ProblemError(
            f"cols = {layer.cols}, an expert's columns between its two GEMMs, is not a multiple of {GLU_COLS}.",
            f"Use a multiple of {GLU_COLS}.",
        )
    if part == DISPATCH:
        return layer.replace(family=FAMILIES[part], cols=GATE_AND_UP * layer.cols, finish="swiglu")
    return layer.replace(family=FAMILIES[part], hidden=layer.cols, cols=layer.hidden)


def part_problems(layer: Problem) -> dict[str, Problem]:
    return {part: part_problem(layer, part) for part in PARTS}


def joined(parts: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    """{"dispatch": {"STAGES": 3}, …} as {"dispatch.STAGES": 3, …}."""
    return {f"{part}.{name}": value for part in PARTS for name, value in parts[part].items()}


def joined_config(dispatch: Config, combine: Config) -> Config:
    """The config of a layer: every parameter of both kernels under the name of its part."""
    values: dict[str, Mapping[str, Value]] = {DISPATCH: dispatch, COMBINE: combine}
    return Config(joined(values))


def part_config(config: Mapping[str, Value], part: str) -> Config:
    """One kernel's values out of a layer's."""
    start = f"{part}."
    return Config(
        {name.removeprefix(start): value for name, value in config.items() if name.startswith(start)}
    )


def part_pins(pins: Mapping[str, Sequence[Value]], part: str) -> dict[str, tuple[Value, ...]]:
    """The pins of a layer's study that concern one kernel. Raises `WordsError` for a pin that names no kernel."""
    for name in pins:
        of, _, parameter = name.rpartition(".")
        if parameter in PARTS:
            raise WordsError(
                f"The pin {name!r} names a kernel of the layer and none of its parameters.",
                f"Write {parameter}.STAGES, for example.",
            )
        if of not in PARTS:
            raise WordsError(
                f"The pin {name!r} does not say which kernel of the layer it is for.",
                f"Write {DISPATCH}.{parameter} or {COMBINE}.{parameter}.",
            )
    start = f"{part}."
    return {name.removeprefix(start): tuple(v) for name, v in pins.items() if name.startswith(start)}
