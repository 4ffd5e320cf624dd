"""Clocks of mma.sync and ldmatrix on this device, alone and together: the ceiling of the mma.sync main loop.

python bench/gemm_probe/pipes.py
"""

from __future__ import annotations

import ctypes
import sys
import tempfile
from pathlib import Path

import torch
from cuda.bindings import driver as cu

sys.path.insert(0, str(Path(__file__).parent))
from build import build
from kernel import ok

ROUNDS = 512  # kRounds of pipes.cu, two slices each
SOURCE = Path(__file__).parent / "pipes.cu"
ENTRIES = {
    "products_64": 4,
    "fetches_64": 4,
    "both_64": 4,
    "both_48": 3,
    "both_32": 2,
}  # chunks of 16 columns


def main() -> None:
    torch.zeros(1, device="cuda")
    built = build({}, Path(tempfile.mkdtemp()), source=SOURCE)
    assert built.cubin is not None, built.log
    module = ok(cu.cuModuleLoadData(built.cubin.read_bytes()))
    blocks = torch.cuda.get_device_properties(0).multi_processor_count
    clocks = torch.zeros(blocks, dtype=torch.int64, device="cuda")
    sink = torch.zeros(1, device="cuda")
    values = [ctypes.c_void_p(clocks.data_ptr()), ctypes.c_void_p(sink.data_ptr())]
    arguments = (ctypes.c_void_p * 2)(*(ctypes.addressof(value) for value in values))
    for name, chunks in ENTRIES.items():
        function = ok(cu.cuModuleGetFunction(module, name.encode()))
        for warps in (4, 8):
            times = []
            for _ in range(3):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                ok(
                    cu.cuLaunchKernel(
                        function,
                        blocks,
                        1,
                        1,
                        32 * warps,
                        1,
                        1,
                        0,
                        torch.cuda.current_stream().cuda_stream,
                        ctypes.addressof(arguments),
                        0,
                    )
                )
                end.record()
                torch.cuda.synchronize()
                times.append(1000 * start.elapsed_time(end))
            a_slice = float(clocks.float().median()) / (2 * ROUNDS)
            products = 8 * chunks * warps / 4  # of one sub-partition and slice
            fragments = (4 + chunks) * warps  # of one SM and slice
            print(
                f"{name:12} {warps} warps: {a_slice:7.1f} clocks a slice, {a_slice / products:5.2f} a product,"
                f" {a_slice / fragments:5.2f} a fragment, {min(times):7.1f} us"
            )


if __name__ == "__main__":
    main()
