"""tkt_combine of csrc/abi.h as ctypes: what a launch of gemm_combine reads and writes beside `families.abi.Globals`."""

from __future__ import annotations

from ctypes import Structure, c_int32, c_uint64, c_void_p
from typing import Any, ClassVar

from tktune.families.abi import MAX_WORLD

FORMS = {"prereduce": 0, "pull": 1}
FIXED_COUNTERS = 48  # then one for each announced run of columns of each pad block


class Combine(Structure):
    """Pointers are addresses; the caller keeps them alive. `bytes` is the structure's own size."""

    _fields_: ClassVar[Any] = [
        ("bytes", c_int32),
        ("form", c_int32),
        ("signal_groups", c_int32),
        ("rows_in_flight", c_int32),
        ("num_reduce_blocks", c_int32),
        ("num_jobs", c_int32),
        ("epoch", c_uint64),
        ("jobs", c_void_p),
        ("topk_weights", c_void_p),
        ("push_expected", c_void_p),
        ("final_contrib", c_void_p),
        ("owners", c_void_p),
        ("owner_slots", c_void_p),
        ("y", c_void_p),
        ("counters", c_void_p),
        ("num_counters", c_int32),
        ("landed_stride", c_int32),
        ("rows", c_void_p * MAX_WORLD),
        ("staging", c_void_p * MAX_WORLD),
        ("watermarks", c_void_p * MAX_WORLD),
        ("landed", c_void_p * MAX_WORLD),
    ]
