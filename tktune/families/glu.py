"""SwiGLU of a GEMM that makes gate and up together: its forms as a build parameter, the layout of packed columns as a
view, and what a second launch costs. Pure: arrays and tensors come in from outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tktune.core.config import Value
from tktune.core.device import DeviceClass
from tktune.core.problem import GLU_COLS, Problem
from tktune.core.space import Parameter

GLU = Parameter(
    "GLU",
    ("fused", "separate"),
    "build",
    "silu(gate) · up is made of the GEMM's accumulators, or of its outputs by a second launch",
)
CODES = {"fused": 1, "separate": 2}  # of TKT_GLU; 0 is none
# Rough rates for ranking only: bytes/s of a pass over memory, and microseconds of one more launch.
_PASS_BYTES = {"sm_90a": 3.6e12, "sm_90": 3.6e12, "sm_120a": 1.2e12}
_LAUNCH_US = 2.5


def parameters(problem: Problem) -> tuple[Parameter, ...]:
    """The build parameters that a problem's finish adds."""
    return (GLU,) if problem.finish == "swiglu" else ()


def default(problem: Problem) -> dict[str, Value]:
    """Their values in a default config."""
    return {p.name: p.values[0] for p in parameters(problem)}


def defines(build_part: Mapping[str, Value]) -> dict[str, str]:
    return {"TKT_GLU": str(CODES[str(build_part["GLU"])])} if "GLU" in build_part else {}


def build_part(code: int) -> dict[str, Value]:
    """The form that an artifact states, under the name of its build parameter."""
    known = {number: name for name, number in CODES.items()}
    return {"GLU": known[code]} if code in known else {}


def is_fused(config: Mapping[str, Value]) -> bool:
    return config.get("GLU") == "fused"


def is_separate(config: Mapping[str, Value]) -> bool:
    return config.get("GLU") == "separate"


def gate_and_up(packed: Any) -> tuple[Any, Any]:
    """Gate and up of packed columns (.., 2F), each (.., F): of an array or a tensor."""
    *rows, cols = packed.shape
    groups = packed.reshape(*rows, cols // (2 * GLU_COLS), 2, GLU_COLS)
    whole = (*rows, cols // 2)
    return groups[..., 0, :].reshape(whole), groups[..., 1, :].reshape(whole)


def pass_us(problem: Problem, device: DeviceClass, rows: float) -> float:
    """Estimated microseconds of the second launch on a GPU: packed rows in, half as much out."""
    return _LAUNCH_US + 1e6 * rows * 3 * problem.cols / _PASS_BYTES.get(device.arch, 1.2e12)
