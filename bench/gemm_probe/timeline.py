"""When each block began and finished each of its tiles: where a schedule loses time on one shape.

    python bench/gemm_probe/timeline.py --set bench/gemm_probe/sets/dispenser.txt --shape 3

A tile that overlaps two pad blocks counts twice; the shapes and forms here have none that do. `place` in a variant's
launch arguments renumbers the blocks: block · place modulo the grid.
"""

from __future__ import annotations

import argparse
import json
import os
import struct
import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from build import build_all
from kernel import Kernel
from probe import FLUSH_BYTES, Inputs
from shapes import timed_shapes
from variants import read_set

SOURCE = Path(__file__).parent / "timeline.cu"
MOST = 256  # kMost of timeline.cu


def measure(kernel: Kernel, inputs: Inputs, flush: torch.Tensor, repeats: int) -> dict:
    """The launch of median length of `repeats`, in microseconds since the first block's first gate."""
    events = torch.zeros(2, kernel.grid, MOST, dtype=torch.int64, device="cuda")
    counts = torch.zeros(2, kernel.grid, dtype=torch.int32, device="cuda")
    place = kernel.variant.launch.get("place", 1)
    hooks = struct.pack("<2Q2i", events.data_ptr(), counts.data_ptr(), place, 0)
    walk = inputs.walk(kernel.variant.launch.get("walk", 1), kernel.variant.row_block)
    weights = inputs.enk if kernel.variant.enk else inputs.ekn
    kernel.bind(inputs.activations, weights, inputs.outputs, walk, inputs.shape.pad, hooks)
    launches = []
    for _ in range(repeats):
        flush.fill_(1.0)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        kernel.launch()
        end.record()
        torch.cuda.synchronize()
        launches.append((1000 * start.elapsed_time(end), events.cpu(), counts.cpu()))
    launches.sort(key=lambda launch: launch[0])
    time_us, times, numbers = launches[repeats // 2]
    gates = [times[0, b, : numbers[0, b]].tolist() for b in range(kernel.grid)]
    ends = [times[1, b, : numbers[1, b]].tolist() for b in range(kernel.grid)]
    zero = min(block[0] for block in gates)
    return {
        "time_us": round(time_us, 1),
        "gates": [[(t - zero) / 1000 for t in block] for block in gates],
        "ends": [[(t - zero) / 1000 for t in block] for block in ends],
    }


def told(name: str, launch: dict) -> str:
    ends, gates = launch["ends"], launch["gates"]
    last = [block[-1] for block in ends]
    length = max(last)
    idle = sum(length - end for end in last) / len(last)
    first = sum(block[0] for block in ends) / len(ends)
    lines = [
        f"{launch['time_us']:7.1f} us, first gate to last tile {length:6.1f}, first gates until"
        f" {max(block[0] for block in gates):4.1f}, idle at the end {idle:5.1f} on average | {name}"
    ]
    tiles = sorted({len(block) for block in ends})
    shares = ", ".join(f"{sum(len(block) == n for block in ends)} blocks with {n} tiles" for n in tiles)
    most = max(tiles)
    laps = [first]
    for n in range(1, most):
        spent = [block[n] - block[n - 1] for block in ends if len(block) > n]
        laps.append(sum(spent) / len(spent))
    lines.append(f"        {shares}; mean of tile " + " ".join(f"{lap:.1f}" for lap in laps))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", required=True, help="file of variants, one a line")
    parser.add_argument("--shape", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--out", type=Path, help="JSON of all events")
    arguments = parser.parse_args()
    torch.zeros(1, device="cuda")
    variants = read_set(arguments.set)
    built = build_all([v.defines for v in variants], Path(tempfile.mkdtemp()), os.cpu_count() or 2, SOURCE)
    inputs = Inputs(timed_shapes()[arguments.shape], seed=1)
    flush = torch.empty(FLUSH_BYTES // 4, device="cuda")
    launches = {}
    for variant, artifact in zip(variants, built, strict=True):
        assert artifact.cubin is not None, artifact.log
        kernel = Kernel(variant, artifact.cubin, "tktune_timeline")
        kernel.grid = kernel.resident
        launches[variant.name] = measure(kernel, inputs, flush, arguments.repeats)
        print(told(variant.name, launches[variant.name]), flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(launches))


if __name__ == "__main__":
    main()
