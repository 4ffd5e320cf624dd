"""Throughput of the CPU backend's GEMM on 1024³, counting the CPU time of all threads, beside single-thread torch.mm.

Run by `make bench`; writes bench/results/cpu_gemm.json and prints the table. Nothing is tuned or stored here.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tktune
from tktune.build.cache import ArtifactCache
from tktune.core.config import Config
from tktune.core.device import device_class
from tktune.core.paths import cache_root
from tktune.core.problem import Problem
from tktune.families import abi
from tktune.families.base import family
from tktune.families.bf16 import from_float, to_float

SIZE = 1024
FLOP = 2 * SIZE**3
RESULT = Path(__file__).parent / "results" / "cpu_gemm.json"

NAMES = ("ROW_BLOCK", "COL_BLOCK", "RED_BLOCK", "STAGES", "CONSUMER_WARPS")
# Build parameters in that order, and seats: small tiles, those that fill the caches, and more seats than one.
CONFIGS = (
    ((32, 64, 64, 2, 1), 1),
    ((64, 128, 64, 2, 1), 1),
    ((128, 128, 64, 3, 1), 1),
    ((128, 128, 128, 2, 1), 1),
    ((128, 128, 128, 2, 2), 1),
    ((128, 128, 128, 4, 1), 1),
    ((128, 256, 128, 2, 1), 1),
    ((128, 256, 128, 2, 1), 2),
    ((128, 128, 128, 2, 2), 4),
)
BACKOFF = 16


class Case:
    """One expert with 1024 rows already in place, and a launch of one artifact on it."""

    def __init__(self, path: Path, seats: int) -> None:
        self.kernel = abi.CpuKernel(path)
        stream = np.random.default_rng(0)
        self.rows = from_float(stream.standard_normal((SIZE, SIZE), np.float32))
        self.weights = from_float(stream.standard_normal((SIZE, SIZE), np.float32))
        self.out = np.zeros((SIZE, SIZE), np.uint16)
        blocks = SIZE // 128
        self.tables = [np.zeros(blocks, np.int32), np.full(blocks, 128, np.int32), np.zeros(4, np.int32)]
        expert, rows, dispensers = (table.ctypes.data for table in self.tables)
        self.globals = abi.Globals(
            world=1,
            hidden=SIZE,
            cols=SIZE,
            tokens=SIZE,
            top_k=1,
            local_experts=1,
            pad=128,
            num_pad_blocks=blocks,
            weights=self.weights.ctypes.data,
            gathered=self.rows.ctypes.data,
            out=self.out.ctypes.data,
            block_expert=expert,
            block_rows=rows,
            dispensers=dispensers,
            num_comp_blocks=seats,
            backoff=BACKOFF,
            roles=abi.COMPUTE,
        )
        self.machine = abi.Machine(seats=seats, spin_limit_ns=10_000_000_000)

    def run(self) -> int:
        result = self.kernel.launch(self.globals, self.machine)
        abi.raise_unless_done(result.end, 0)
        return int(result.time_ns)

    def error(self) -> float:
        reference = to_float(self.rows) @ to_float(self.weights)
        return float(np.linalg.norm(to_float(self.out) - reference) / np.linalg.norm(reference))


def cpu_seconds(run: Any, launches: int) -> tuple[float, float]:
    """CPU time of all threads of this process, and wall time, per launch."""
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(launches):
        run()
    return (time.process_time() - cpu) / launches, (time.perf_counter() - wall) / launches


def build(parts: list[Config]) -> tuple[dict[Config, Path], str]:
    """The artifact of each build part, and the compiler's version."""
    problem = Problem("grouped_gemm", SIZE, SIZE, experts=1, top_k=1, tokens=SIZE)
    device = device_class("cpu")
    unique = list(dict.fromkeys(parts))
    specs = [family("grouped_gemm").build_spec(part, problem, device) for part in unique]
    cache = ArtifactCache(cache_root())
    paths = {}
    for part, outcome in zip(unique, cache.build(specs), strict=True):
        if outcome.artifact is None:
            sys.exit(f"{part} was not built: {outcome.error_sentence}")
        paths[part] = outcome.artifact.path
    return paths, cache.toolchain(specs[0]).version


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--launches", type=int, default=6, help="launches of each config a round")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    parts = [Config(zip(NAMES, values, strict=True)) for values, _ in CONFIGS]
    paths, compiler = build(parts)
    cases = [Case(paths[part], seats) for part, (_, seats) in zip(parts, CONFIGS, strict=True)]
    left, right = torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE)

    def mm() -> None:
        torch.mm(left, right)

    for case in cases:
        case.run()
    cpu_seconds(mm, 3)
    peer: list[float] = []
    ours: list[list[tuple[float, float]]] = [[] for _ in cases]
    for _ in range(arguments.rounds):
        peer.append(cpu_seconds(mm, arguments.launches)[0])
        for case, samples in zip(cases, ours, strict=True):
            samples.append(cpu_seconds(case.run, arguments.launches))

    peer_gflops = FLOP / statistics.median(peer) / 1e9
    rows: list[dict[str, Any]] = []
    for case, part, (_, seats), samples in zip(cases, parts, CONFIGS, ours, strict=True):
        gflops = FLOP / statistics.median(cpu for cpu, _ in samples) / 1e9
        rows.append(
            {
                "config": dict(part),
                "seats": seats,
                "smem_bytes": case.kernel.facts.smem_bytes,
                "gflops_per_cpu_second": round(gflops, 1),
                "gflops_wall": round(FLOP / statistics.median(wall for _, wall in samples) / 1e9, 1),
                "of_torch_mm": round(gflops / peer_gflops, 3),
                "relative_error": float(f"{case.error():.3g}"),
            }
        )
        case.kernel.close()
    best = max(rows, key=lambda row: row["of_torch_mm"])
    print(f"torch.mm fp32, one thread: {peer_gflops:.1f} GFLOP/s per CPU second")
    print(f"{'config':<72} {'seats':>5} {'GFLOP/s/CPU s':>14} {'wall':>7} {'of torch.mm':>12}")
    for row in rows:
        text = " ".join(f"{name}={row['config'][name]}" for name in NAMES)
        print(
            f"{text:<72} {row['seats']:>5} {row['gflops_per_cpu_second']:>14} {row['gflops_wall']:>7} "
            f"{row['of_torch_mm']:>12.1%}"
        )
    print(f"best: {best['of_torch_mm']:.1%} of torch.mm (at least 30 % is asked for)")
    report = {
        "what": "GEMM 1024³ of the CPU backend, bf16 in and out, fp32 accumulation, against torch.mm fp32 on one thread",
        "device": str(device_class("cpu")),
        "versions": {
            "tktune": tktune.__version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "g++": compiler,
        },
        "command": "python bench/cpu_gemm.py",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "rounds": arguments.rounds,
        "launches_per_round": arguments.launches,
        "torch_mm_gflops_per_cpu_second": round(peer_gflops, 1),
        "best_of_torch_mm": best["of_torch_mm"],
        "rows": rows,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    if best["of_torch_mm"] < 0.3:
        sys.exit("The best config is below 30 % of torch.mm.")


if __name__ == "__main__":
    main()
