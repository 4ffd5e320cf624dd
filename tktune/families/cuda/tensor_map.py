"""TMA descriptors of row-major bf16 matrices, encoded once for each (pointer, shape, box).

The kernels take descriptors by value inside their globals; what is kept here is the encoded form.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

from tktune.core.errors import DeviceError, ProblemError
from tktune.families.cuda.driver import failed

MAP_BYTES = 128
PANEL_COLS = 64  # a box is one panel: 64 bf16, the 128 bytes of the widest swizzle
SWIZZLE_64B, SWIZZLE_128B = 2, 3  # of CUtensorMapSwizzle
_BFLOAT16, _L2_PROMOTION_256B = 9, 3  # of CUtensorMapDataType and CUtensorMapL2promotion
_KEPT = 4096


class MapKey(NamedTuple):
    """A matrix of `rows` × `cols` bf16 at `pointer`, moved in boxes of `box_rows` × `box_cols`."""

    pointer: int
    rows: int
    cols: int
    box_rows: int
    box_cols: int = PANEL_COLS  # or half of it

    @property
    def swizzle(self) -> int:
        """Over the whole row of a box, as the shared tile expects it (csrc/tile/st.cuh)."""
        return SWIZZLE_128B if self.box_cols == PANEL_COLS else SWIZZLE_64B


class TensorMaps:
    """Encoded descriptors, by what they describe. The bytes stay valid as long as the memory does."""

    def __init__(self) -> None:
        self._kept: dict[MapKey, bytes] = {}

    def get(self, key: MapKey) -> bytes:
        """128 bytes. Raises `ProblemError` for a matrix TMA cannot move, `DeviceError` when the driver refuses."""
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            found = self._kept[key] = encode(key)
        return found


def encode(key: MapKey) -> bytes:
    """Ask the driver for the descriptor of `key`."""
    if key.pointer % 16 or key.cols * 2 % 16:
        raise ProblemError(
            f"A matrix of {key.rows} × {key.cols} bf16 at {key.pointer:#x} is not aligned to 16 bytes.",
            "Use rows of a multiple of 8 elements, from the start of an allocation.",
        )
    storage, descriptor = aligned(MAP_BYTES)
    sizes = (ctypes.c_uint64 * 2)(key.cols, max(key.rows, 1))
    strides = (ctypes.c_uint64 * 1)(key.cols * 2)
    box = (ctypes.c_uint32 * 2)(key.box_cols, key.box_rows)
    steps = (ctypes.c_uint32 * 2)(1, 1)
    code = _library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(descriptor),
        _BFLOAT16,
        2,
        ctypes.c_void_p(key.pointer),
        sizes,
        strides,
        box,
        steps,
        0,
        key.swizzle,
        _L2_PROMOTION_256B,
        0,
    )
    if code != 0:
        raise _refused(code, key)
    encoded = ctypes.string_at(descriptor, MAP_BYTES)
    del storage
    return encoded


def aligned(nbytes: int, alignment: int = 64) -> tuple[Any, int]:
    """A zeroed buffer and an address of `nbytes` in it that `alignment` divides; the buffer keeps it alive."""
    buffer = ctypes.create_string_buffer(nbytes + alignment)
    return buffer, -(-ctypes.addressof(buffer) // alignment) * alignment


@cache
def _library() -> Any:
    # cuda-bindings has the same call, but keeps the descriptor where Python put its object: aligned to 16 bytes.
    return ctypes.CDLL("libcuda.so.1")


def _refused(code: int, key: MapKey) -> DeviceError:
    from cuda.bindings import driver as cu

    error = failed(cu.CUresult(code))
    return DeviceError(f"No descriptor for {key}: {error.sentence}", error.way_out, error.code)
