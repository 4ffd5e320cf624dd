"""The C ABI of shared artifacts (csrc/abi.h) as ctypes, and one loaded artifact as an object.

Nothing here knows problems, configs or tables: addresses go in, a result comes out.
"""

from __future__ import annotations

import _ctypes
import ctypes
from ctypes import POINTER, Structure, c_char, c_int, c_int32, c_int64, c_uint64, c_void_p, sizeof
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

from tktune.core.config import Value
from tktune.core.errors import ArtifactError, LaunchFailed
from tktune.families import glu

ABI_VERSION = 2
MAX_WORLD = 8

DONE, ABORTED, SPIN_LIMIT, BAD_ARGUMENT, NO_THREADS = range(5)
END_CODES = {
    ABORTED: "aborted",
    SPIN_LIMIT: "spin_limit",
    BAD_ARGUMENT: "bad_argument",
    NO_THREADS: "no_threads",
}
_ENDS = {
    ABORTED: ("was told to abort and returned.", "Start it again."),
    SPIN_LIMIT: (
        "waited longer than its spin limit and gave up.",
        "The spin report says who waited for what.",
    ),
    BAD_ARGUMENT: (
        "refused its arguments: they do not fit the artifact.",
        "Build the artifact for this problem's world, layout and pad.",
    ),
    NO_THREADS: ("could not start its threads.", "Raise the limit on processes or use fewer seats."),
}

ORDERS = {"slot": 0, "token": 1}
RASTERS = {"rows": 0, "cols": 1}
LAYOUTS = {"ekn": 0, "enk": 1}
COMMUNICATE, COMPUTE, GATED, FINISH = 1, 2, 4, 8
FUSED = COMMUNICATE | COMPUTE | GATED


class SpinReportStruct(Structure):
    _fields_: ClassVar[Any] = [
        ("set", c_int32),
        ("rank", c_int32),
        ("block", c_int32),
        ("role", c_char * 16),
        ("word", c_char * 24),
        ("index", c_int32),
        ("expected", c_int64),
        ("seen", c_int64),
    ]


class Machine(Structure):
    """tkt_machine: seats, the seating order, and the bounds of waits. Pointers are addresses, 0 for none."""

    _fields_: ClassVar[Any] = [
        ("seats", c_int32),
        ("seating", c_int32),
        ("seating_seed", c_uint64),
        ("spin_limit_ns", c_int64),
        ("abort_word", c_void_p),
        ("report", c_void_p),
    ]


class Globals(Structure):
    """tkt_globals: everything one launch reads and writes. Pointers are addresses; the caller keeps them alive."""

    _fields_: ClassVar[Any] = [
        ("rank", c_int32),
        ("world", c_int32),
        ("hidden", c_int32),
        ("cols", c_int32),
        ("tokens", c_int32),
        ("top_k", c_int32),
        ("local_experts", c_int32),
        ("pad", c_int32),
        ("num_pad_blocks", c_int32),
        ("weight_layout", c_int32),
        ("x", c_void_p * MAX_WORLD),
        ("weights", c_void_p),
        ("gathered", c_void_p),
        ("out", c_void_p),
        ("packed", c_void_p),
        ("pull_indices", c_void_p),
        ("block_expert", c_void_p),
        ("block_rows", c_void_p),
        ("pull_tokens", c_void_p),
        ("pull_slots", c_void_p),
        ("num_pull_tokens", c_int32),
        ("arrivals", c_void_p),
        ("dispensers", c_void_p),
        ("barrier", c_void_p * MAX_WORLD),
        ("start_sequence", c_uint64),
        ("num_comp_blocks", c_int32),
        ("num_comm_blocks", c_int32),
        ("order", c_int32),
        ("raster", c_int32),
        ("backoff", c_int32),
        ("roles", c_int32),
        ("combine", c_void_p),
    ]


class Result(Structure):
    """tkt_result: `time_ns` from the end of the start barrier to the last block's end, `cpu_ns` of all threads."""

    _fields_: ClassVar[Any] = [("time_ns", c_int64), ("cpu_ns", c_int64), ("end", c_int32)]


class _FactsStruct(Structure):
    _fields_: ClassVar[Any] = [
        ("abi_version", c_int32),
        ("globals_bytes", c_int32),
        ("machine_bytes", c_int32),
        ("result_bytes", c_int32),
        ("report_bytes", c_int32),
        ("world", c_int32),
        ("row_block", c_int32),
        ("col_block", c_int32),
        ("red_block", c_int32),
        ("stages", c_int32),
        ("consumer_warps", c_int32),
        ("smem_bytes", c_int32),
        ("threads_per_block", c_int32),
        ("family", c_char * 24),
        ("strip_rows", c_int32),
        ("panel_cols", c_int32),
        ("glu", c_int32),
    ]


@dataclass(frozen=True)
class Facts:
    """What an artifact states of itself. `strip_rows` × `panel_cols` is the register tile of the micro-kernel; `glu` is the
    form of SwiGLU (`tktune.families.glu.CODES`).
    """

    family: str
    world: int
    row_block: int
    col_block: int
    red_block: int
    stages: int
    consumer_warps: int
    smem_bytes: int
    threads_per_block: int
    strip_rows: int
    panel_cols: int
    glu: int

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def build_part(self) -> dict[str, Value]:
        """The compile-time choices under the names of build parameters."""
        return {
            "ROW_BLOCK": self.row_block,
            "COL_BLOCK": self.col_block,
            "RED_BLOCK": self.red_block,
            "STAGES": self.stages,
            "CONSUMER_WARPS": self.consumer_warps,
            **glu.build_part(self.glu),
        }


class CpuKernel:
    """One shared artifact, opened privately (RTLD_LOCAL). Its threads live from the first launch until `close`.

    Calls release the GIL. Launches of one kernel run one at a time. Raises `ArtifactError` when the file cannot
    be loaded or speaks another ABI.

    >>> kernel = CpuKernel(artifact.path)                                   # doctest: +SKIP
    >>> kernel.launch(launch_globals, machine).time_ns                      # doctest: +SKIP
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
            describe = self._library.tkt_describe
            self._launch = self._library.tkt_launch
            self._barrier = self._library.tkt_barrier
            self._close = self._library.tkt_close
        except (OSError, AttributeError) as error:
            raise ArtifactError(f"{path} cannot be loaded: {error}.", "Build it again.") from error
        describe.restype = POINTER(_FactsStruct)
        self._launch.argtypes = [POINTER(Globals), POINTER(Machine), POINTER(Result)]
        self._barrier.argtypes = [POINTER(Globals), POINTER(Machine), c_uint64]
        self._launch.restype = self._barrier.restype = c_int
        self._close.restype = None
        self._open = True
        try:
            self.facts = self._checked_facts(describe().contents)
        except ArtifactError:
            self.close()
            raise

    def launch(self, launch_globals: Globals, machine: Machine) -> Result:
        """Run one launch; returns however it ends (see `result.end` and `raise_unless_done`)."""
        result = Result()
        self._launch(launch_globals, machine, result)
        return result

    def barrier(self, launch_globals: Globals, machine: Machine, sequence: int) -> int:
        """Meet all ranks at `sequence`; returns how it ended. Uses rank, world, barrier and backoff only."""
        end: int = self._barrier(launch_globals, machine, sequence)
        return end

    def close(self) -> None:
        """End the kernel's threads and unload it. Idempotent; no launch may be running."""
        if self._open:
            self._open = False
            self._close()
            _ctypes.dlclose(self._library._handle)

    def _checked_facts(self, found: _FactsStruct) -> Facts:
        ours = {
            "abi_version": ABI_VERSION,
            "globals_bytes": sizeof(Globals),
            "machine_bytes": sizeof(Machine),
            "result_bytes": sizeof(Result),
            "report_bytes": sizeof(SpinReportStruct),
        }
        for name, value in ours.items():
            if getattr(found, name) != value:
                raise ArtifactError(
                    f"{self.path} has {name} = {getattr(found, name)}, and this tktune speaks {value}.",
                    "Build it again with this version.",
                )
        names = [name for name in Facts.__dataclass_fields__ if name != "family"]
        return Facts(family=found.family.decode(), **{name: getattr(found, name) for name in names})


def raise_unless_done(end: int, rank: int) -> None:
    """Raise `LaunchFailed` with the code of `end` unless it is DONE."""
    if end != DONE:
        said, way_out = _ENDS[end]
        raise LaunchFailed(f"The launch of rank {rank} {said}", way_out, END_CODES[end])
