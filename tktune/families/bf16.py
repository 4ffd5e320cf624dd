"""bf16 without a bf16 type: uint16 arrays that hold the upper half of a float32, converted with numpy alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bf16 = npt.NDArray[np.uint16]
Float32 = npt.NDArray[np.float32]

NAN = 0x7FC0


def to_float(values: Bf16) -> Float32:
    """float32 of the same shape; exact."""
    widened = values.astype(np.uint32)
    np.left_shift(widened, 16, out=widened)
    return widened.view(np.float32)


def from_float(values: npt.NDArray[Any]) -> Bf16:
    """Round float32 to nearest, ties to even; NaN becomes 0x7fc0."""
    floats = np.ascontiguousarray(values, dtype=np.float32)
    bits = floats.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(floats), NAN, rounded).astype(np.uint16)


def gemm_tolerance(hidden: int) -> float:
    """The relative error ‖out − ref‖ ÷ ‖ref‖ allowed of a bf16 GEMM over `hidden` terms with fp32 accumulation.

    Rounding one output to bf16 errs by at most 2⁻⁹ of it; twice that is allowed, for a kernel that rounds an
    accumulator which differs from the reference's. Summing K products in fp32 errs by about K · 2⁻²⁴ of the sum
    of magnitudes in the worst order; four times that is allowed.
    """
    return 2.0**-8 + hidden * 2.0**-22


def swiglu_tolerance(hidden: int, separate: bool) -> float:
    """The same for silu(gate) · up of a GEMM's columns.

    Two sums enter an output, and neither factor has a slope above 1.1 times the other: twice the error of summing. A
    separate pass reads gate and up rounded: three roundings, together at most 3.1 · 2⁻⁹, are within what is allowed then.
    """
    return (2 if separate else 1) * 2.0**-8 + 2 * hidden * 2.0**-22
