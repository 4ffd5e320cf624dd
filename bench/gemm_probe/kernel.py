"""One loaded variant: its TMA descriptors, its argument block (the host mirror of gemm_globals) and its launch."""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path

import torch
from cuda.bindings import driver as cu
from variants import Variant

GLOBALS_BYTES = 640  # gemm_globals_layout::kBytes in csrc/gemm/config.cuh


def ok(result: tuple) -> object:
    if result[0] != cu.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"driver call failed: {result[0]}")
    return result[1] if len(result) == 2 else result[1:]


def tensor_map(matrix: torch.Tensor, box_rows: int, box_cols: int, promotion: int) -> bytes:
    """A row-major (rows, cols) bf16 matrix in boxes of box_rows × box_cols (64 or 32), swizzled over their rows;
    `promotion` 0 to 3 lets L2 fetch nothing more, 64, 128 or 256 bytes at once."""
    swizzles = cu.CUtensorMapSwizzle
    rows, cols = matrix.shape
    assert matrix.is_contiguous() and cols % 8 == 0
    encoded = ok(
        cu.cuTensorMapEncodeTiled(
            cu.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            2,
            matrix.data_ptr(),
            [cu.cuuint64_t(cols), cu.cuuint64_t(max(rows, 1))],
            [cu.cuuint64_t(cols * 2)],
            [cu.cuuint32_t(box_cols), cu.cuuint32_t(box_rows)],
            [cu.cuuint32_t(1), cu.cuuint32_t(1)],
            cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzles.CU_TENSOR_MAP_SWIZZLE_128B if box_cols == 64 else swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
            cu.CUtensorMapL2promotion(promotion),
            cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return ctypes.string_at(encoded.getPtr(), 128)  # type: ignore[attr-defined]


class Kernel:
    def __init__(
        self, variant: Variant, cubin: Path, entry: str = "tktune_grouped_gemm", spin_limit_s: float = 2.0
    ) -> None:
        self.variant = variant
        self.spin_limit = int(spin_limit_s * 1e9 / 1024)  # units of 1024 ns
        self.module = ok(cu.cuModuleLoadData(cubin.read_bytes()))
        self.function = ok(cu.cuModuleGetFunction(self.module, entry.encode()))
        address, size = ok(cu.cuModuleGetGlobal(self.module, b"tktune_grouped_gemm_facts"))  # type: ignore[misc]
        facts = (ctypes.c_int32 * 4)()
        ok(cu.cuMemcpyDtoH(ctypes.addressof(facts), address, size))
        self.smem_bytes, self.threads, globals_bytes, self.cluster = facts
        assert globals_bytes == GLOBALS_BYTES, globals_bytes
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        ok(cu.cuFuncSetAttribute(self.function, attribute, self.smem_bytes))
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count
        self.resident = self.sms if self.cluster == 1 else self.cluster * self.resident_clusters()
        self.dispenser = torch.zeros(2, dtype=torch.int32, device="cuda")
        self.report = torch.zeros(96, dtype=torch.uint8).pin_memory()
        self.abort_word = torch.zeros(1, dtype=torch.int32).pin_memory()
        self.kept: list[object] = []

    def raise_abort(self) -> None:
        self.abort_word.fill_(1)

    def who_waited(self) -> str:
        """The spin report (tkt_spin_report of csrc/abi.h), readable after a trap because it is host memory."""
        fields = struct.unpack_from("<3i16s24siqq", bytes(self.report.tolist()))
        role, word = (name.split(b"\0")[0].decode() for name in fields[3:5])
        return (
            f"{self.variant.name}: block {fields[2]} {role} waits for {word} at {fields[5]}"
            if fields[0]
            else ""
        )

    def resident_clusters(self) -> int:
        """Clusters that the device seats at once; fewer than SMs ÷ 2 where a GPC has an odd number of SMs."""
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.sms // self.cluster * self.cluster, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes = self.smem_bytes
        return int(ok(cu.cuOccupancyMaxActiveClusters(self.function, config)))  # type: ignore[call-overload]

    def bind(
        self,
        activations: torch.Tensor,
        weights: torch.Tensor,
        outputs: torch.Tensor,
        walk: torch.Tensor,
        pad: int,
        hooks: bytes = b"",
    ) -> None:
        """`weights` is (E, N, K) or (E, K, N) as compiled; `walk` is int32 (entries, 4): expert, first row,
        rows, 0; an expert may have several."""
        variant, cluster = self.variant, self.cluster
        rows_box = 64 if variant.row_block >= 128 else variant.row_block
        red_block = variant.get("RED_BLOCK", 64)
        weights_box = variant.col_block // cluster if variant.enk else red_block
        deep = min(64, red_block)  # columns of a box that run along the reduction
        entries = len(walk)
        reduction = activations.shape[1]
        cols = outputs.shape[1]

        def view(matrix: torch.Tensor, box: int, wide: int) -> bytes:
            packed = tensor_map(matrix, box, wide, variant.launch.get("promotion", 3)) + struct.pack(
                "<Qii", matrix.data_ptr(), *matrix.shape
            )
            return packed.ljust(192, b"\0")

        packed = view(activations, rows_box, deep)
        packed += view(weights.reshape(-1, weights.shape[2]), weights_box, deep if variant.enk else 64)
        packed += view(outputs, rows_box, 64)
        packed += struct.pack("<QQ", walk.data_ptr(), self.dispenser.data_ptr())
        packed += struct.pack("<QQIi", self.report.data_ptr(), self.abort_word.data_ptr(), self.spin_limit, 0)
        launch = variant.launch
        raster, turn_back = launch.get("raster_rows", 0), launch.get("turn_back", 0)
        packed += struct.pack("<6i", entries, reduction, cols, pad, raster, turn_back)
        packed = packed.ljust(GLOBALS_BYTES, b"\0") + hooks
        self.arguments = ctypes.create_string_buffer(packed, len(packed) + 64)
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.arguments))
        self.kept = [activations, weights, outputs, walk]
        sms = min(launch.get("sms", self.sms), self.resident)
        self.grid = sms // cluster * cluster

    def launch(self) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        ok(
            cu.cuLaunchKernel(
                self.function,
                self.grid,
                1,
                1,
                self.threads,
                1,
                1,
                self.smem_bytes,
                stream,
                ctypes.addressof(self.pointers),
                0,
            )
        )
