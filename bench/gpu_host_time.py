"""What a call costs the host, and where that goes: each piece of a call, the operator, its library form, and a Triton
autotuned kernel beside them.

    python bench/gpu_host_time.py [--out bench/results/NAME.json]

Median over bursts of calls that stay below the depth of the launch queue, so that the device never holds the host up.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

import tktune
from tktune.core.device_cuda import cuda_device_classes
from tktune.families.cuda.driver import current_stream

CALLS, BURSTS = 50, 40
SHAPE: dict[str, Any] = {"hidden": 512, "cols": 256, "experts": 8, "top_k": 2, "tokens": 64}
Call = Callable[[], Any]


def micros(call: Call) -> float:
    for _ in range(5):
        call()
    samples = []
    for _ in range(BURSTS):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        samples.append((time.perf_counter() - begin) / CALLS * 1e6)
    return round(statistics.median(samples), 2)


def triton_call() -> Call | None:
    """A Triton kernel with an autotuner whose answer is cached; None without Triton."""
    if triton is None:
        return None
    x = torch.randn(1 << 14, device="cuda")
    y = torch.empty_like(x)

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (triton.cdiv(x.numel(), meta["BLOCK"]),)

    return lambda: scale[grid](x, y, x.numel())


if triton is not None:

    @triton.autotune(configs=[triton.Config({"BLOCK": block}) for block in (256, 512)], key=["n"])
    @triton.jit
    def scale(x, y, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)


def allocations(shape: tuple[int, int], like: torch.Tensor) -> dict[str, Call]:
    """The ways torch has to make an output."""
    from torch._C._dynamo import guards

    bf16, device, stride = torch.bfloat16, torch.device("cuda", 0), (shape[1], 1)
    ways: dict[str, Call] = {
        "torch.empty": lambda: torch.empty(shape, dtype=bf16, device=device),
        "torch.empty_strided": lambda: torch.empty_strided(shape, stride, dtype=bf16, device=device),
        "torch.empty_like": lambda: torch.empty_like(like),
        "x.new_empty": lambda: like.new_empty(shape),
    }
    quick = getattr(guards, "_empty_strided_cuda", None)
    if quick is not None:
        ways["_empty_strided_cuda"] = lambda: quick(shape, stride, bf16)
    return ways


def launches(launch: Any) -> dict[str, Call]:
    """The ways cuda-bindings has to launch one prebuilt kernel."""
    from cuda.bindings import driver as cu

    stream = current_stream(0)
    grid, threads, smem_bytes = launch._shape
    arguments = (launch._function, grid, 1, 1, threads, 1, 1, smem_bytes, stream, launch._pointers, 0)
    launch(stream)
    return {
        "Launch": lambda: launch(stream),
        "cuLaunchKernelEx, all converted": launch._fires[stream],
        "cuLaunchKernel": lambda: cu.cuLaunchKernel(*arguments),
    }


def pieces(
    operator: Any, x: torch.Tensor, weights: torch.Tensor, plan: Any, out: torch.Tensor
) -> dict[str, Call]:
    """What a call does beside allocating and launching."""
    bound = next(iter(operator._launches.values()))
    find = operator._launches.get
    return {
        "nothing": lambda: None,
        "current stream": lambda: torch._C._cuda_getCurrentRawStream(0),
        "device of a tensor": lambda: out.get_device(),
        "is compiling": lambda: torch.compiler.is_compiling(),
        "is dynamo compiling": lambda: torch.compiler.is_dynamo_compiling(),
        "one look-up": lambda: find((x.data_ptr(), weights.data_ptr(), out.data_ptr(), plan.address)),
        "same inputs": lambda: bound.x() is x and bound.weights() is weights,
        "checks of inputs": lambda: bound.takes(x, weights),
        "checks of out": lambda: bound.writes(out),
    }


def calls(operator: Any) -> dict[str, Call]:
    plan = operator.plan(torch.rand(64, 8, device="cuda").topk(2).indices)
    x = operator.input.normal_()
    weights = torch.randn(8, 256, 512, device="cuda").bfloat16()
    out = operator(x, weights, plan)
    library = torch.ops.tktune.grouped_gemm
    launch = next(iter(operator._launches.values())).launch
    asked: dict[str, Call | None] = {
        **pieces(operator, x, weights, plan, out),
        **{f"make: {name}": call for name, call in allocations(tuple(out.shape), out).items()},
        **{f"launch: {name}": call for name, call in launches(launch).items()},
        "operator, out given": lambda: operator(x, weights, plan, out),
        "operator, out made": lambda: operator(x, weights, plan),
        "operator, another x, out made": lambda: operator(x[:], weights, plan),
        "x[:]": lambda: x[:],
        "library form": lambda: library(x, weights, out, plan.workspace, plan.rows, operator.number),
        "a torch elementwise op": lambda: torch.add(out, 1, out=out),
        "Triton autotuned": triton_call(),
    }
    return {name: call for name, call in asked.items() if call is not None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, help="write JSON here")
    arguments = parser.parse_args()
    if not cuda_device_classes():
        print("No GPU answers here, so there is nothing to measure. Run this on a host with one.")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        operator: Any = tktune.load(
            "grouped_gemm", **SHAPE, weight_layout="enk", db=f"{folder}/none.db", cache=Path(folder) / "cache",
            build=True,
        )  # fmt: skip
    measured = {name: micros(call) for name, call in calls(operator).items()}
    operator.check()
    for name, us in measured.items():
        print(f"{name:36} {us:6.2f} µs")
    if arguments.out:
        facts = {
            "device": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "date": datetime.date.today().isoformat(),
            "command": shlex.join(["python", *sys.argv]),
            "policy": f"median of {BURSTS} bursts of {CALLS} calls",
        }
        arguments.out.write_text(json.dumps({**facts, "us": measured}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
