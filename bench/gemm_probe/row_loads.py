"""Clocks of a 128-row step loaded by index, by way, number of warps, and with or without tensor work beside it.

python bench/gemm_probe/row_loads.py
"""

from __future__ import annotations

import ctypes
import struct
import tempfile
from pathlib import Path

import torch
from build import build_all
from cuda.bindings import driver as cu
from kernel import ok, tensor_map

SOURCE = Path(__file__).parent / "row_loads.cu"
ROWS, COLS, STEPS, TILE_STEPS = 2048, 4096, 640, 64
WAYS = {"copies": [1, 2, 3, 4], "boxes": [2, 4]}


def main() -> None:
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    rows = torch.zeros(ROWS, COLS, dtype=torch.bfloat16, device="cuda")
    index = torch.stack([torch.randperm(ROWS)[:128].sort().values for _ in range(blocks)]).int().cuda()
    weights = torch.zeros(16 << 20, dtype=torch.uint8, device="cuda")
    clocks = torch.zeros(blocks, 2, dtype=torch.int64, device="cuda")
    forms = [(way, warps) for way, counts in WAYS.items() for warps in counts]
    made = build_all(
        [{"LOADERS": warps, "BOXES": int(way == "boxes")} for way, warps in forms],
        Path(tempfile.mkdtemp()),
        8,
        SOURCE,
    )
    print("clocks a step: loads (tensor work); 1024 are needed by the tensor cores, 32 KB of weights a step")
    for (way, warps), built in zip(forms, made, strict=True):
        assert built.cubin is not None, built.log
        module = ok(cu.cuModuleLoadData(built.cubin.read_bytes()))
        function = ok(cu.cuModuleGetFunction(module, b"row_loads"))
        address, size = ok(cu.cuModuleGetGlobal(module, b"row_loads_facts"))  # type: ignore[misc]
        facts = (ctypes.c_int32 * 4)()
        ok(cu.cuMemcpyDtoH(ctypes.addressof(facts), address, size))
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        ok(cu.cuFuncSetAttribute(function, attribute, facts[0]))
        cells = []
        for multiplies, weighs in ((0, 0), (0, 1), (1, 0), (1, 1)):
            packed = (tensor_map(rows, 1, 64, 3) + struct.pack("<Qii", rows.data_ptr(), ROWS, COLS)).ljust(
                192, b"\0"
            )
            packed += struct.pack("<QQQ", index.data_ptr(), weights.data_ptr(), clocks.data_ptr())
            packed += struct.pack("<4i", STEPS, TILE_STEPS, multiplies, weighs)
            packed = packed.ljust(facts[2], b"\0")
            storage = ctypes.create_string_buffer(len(packed) + 64)
            start = (ctypes.addressof(storage) + 63) // 64 * 64
            ctypes.memmove(start, packed, len(packed))
            pointers = (ctypes.c_void_p * 1)(start)
            clocks.zero_()
            for _ in range(2):
                stream = torch.cuda.current_stream().cuda_stream
                ok(
                    cu.cuLaunchKernel(
                        function, blocks, 1, 1, 384, 1, 1, facts[0], stream, ctypes.addressof(pointers), 0
                    )
                )
            torch.cuda.synchronize()
            loads, products = (clocks.double().mean(0) / STEPS).tolist()
            cells.append(f"mma {multiplies} weights {weighs}: {loads:6.0f} ({products:5.0f})")
        print(f"{way:7} {warps} warps  " + "   ".join(cells), flush=True)


if __name__ == "__main__":
    main()
