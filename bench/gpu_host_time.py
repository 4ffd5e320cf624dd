"""What a call costs the host: the raw launch, the operator, its library form, and a Triton autotuned kernel beside them.

    python bench/gpu_host_time.py [--out bench/results/NAME.json]

Median over bursts of calls that stay below the depth of the launch queue, so that the device never holds the host up.
"""

from __future__ import annotations

import argparse
import datetime
import json
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


def micros(call: Callable[[], Any]) -> float:
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


def triton_call() -> Callable[[], Any] | None:
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
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
    plan = operator.plan(torch.rand(64, 8, device="cuda").topk(2).indices)
    x = operator.input.normal_()
    weights = torch.randn(8, 256, 512, device="cuda").bfloat16()
    out = operator(x, weights, plan)
    launch = next(iter(operator._launches.values()))[0]
    stream = current_stream(0)
    library = torch.ops.tktune.grouped_gemm
    calls: dict[str, Callable[[], Any] | None] = {
        "raw launch": lambda: launch(stream),
        "operator, out given": lambda: operator(x, weights, plan, out),
        "operator, out made": lambda: operator(x, weights, plan),
        "library form": lambda: library(x, weights, out, plan.workspace, plan.rows, operator.number),
        "a torch elementwise op": lambda: torch.add(out, 1, out=out),
        "Triton autotuned": triton_call(),
    }
    measured = {name: micros(call) for name, call in calls.items() if call is not None}
    operator.check()
    for name, us in measured.items():
        print(f"{name:24} {us:6.2f} µs")
    if arguments.out:
        facts = {
            "device": torch.cuda.get_device_name(0),
            "torch": torch.__version__,
            "python": sys.version.split()[0],
            "date": datetime.date.today().isoformat(),
            "command": " ".join(["python", *sys.argv]),
            "policy": f"median of {BURSTS} bursts of {CALLS} calls",
        }
        arguments.out.write_text(json.dumps({**facts, "us": measured}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
