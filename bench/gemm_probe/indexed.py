"""Rows by index against rows gathered in place, GEMM alone on one GPU: builds both forms of each tile shape, checks the
indexed ones on small and large shapes against an fp32 reference, and times all of a shape interleaved.

    python bench/gemm_probe/indexed.py --out OUT.json [--shapes 0,1,2,3]

The table is that of a real dispatch: slots of expert e name the tokens that picked it, so a token's row is read by
about four experts, and the rows stand in token order.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from build import SOURCE, build_all
from kernel import Kernel
from probe import FLUSH_BYTES, Inputs, facts, time_all, verdict
from shapes import Shape, checked_shapes, timed_shapes
from variants import make

INDEXED = Path(__file__).resolve().with_name("indexed.cu")
REGISTERS = "PRODUCER_REGISTERS=56 CONSUMER_REGISTERS=224"
TILES = {
    "wide": "DRAW=1",
    "tall": "ROW_BLOCK=256 COL_BLOCK=192 STAGES=3 MMA_DEPTH=0 DRAW=1",
    "pingpong": "MAIN_LOOP=2 COL_BLOCK=192 STAGES=5 OUT_SLOTS=3 DRAW=1",
}
# Further forms that are only checked: the other weights, the static walk, few rows, three warpgroups.
CHECKED = [
    f"WEIGHT_LAYOUT=0 {REGISTERS}",
    f"WEIGHT_LAYOUT=0 {TILES['pingpong']} {REGISTERS}",
    f"WEIGHT_LAYOUT=0 {TILES['tall']} {REGISTERS}",
    "ROW_BLOCK=64 CONSUMER_WARPS=4 PRODUCER_REGISTERS=56 CONSUMER_REGISTERS=232",
    "ROW_BLOCK=192 COL_BLOCK=192 STAGES=4 OUT_SLOTS=1 CONSUMER_WARPS=12 MMA_DEPTH=0",
]


class Indexed(Inputs):
    """Inputs whose rows also stand elsewhere: `rows` (R, K), and `table` with each slot's row, -1 on padding."""

    def __init__(self, shape: Shape, seed: int, tokens: int) -> None:
        super().__init__(shape, seed)
        generator = torch.Generator(device="cuda").manual_seed(seed + 1)
        self.rows = torch.randn(tokens, shape.reduction, device="cuda", generator=generator).bfloat16()
        self.table = torch.full((len(self.activations),), -1, dtype=torch.int32, device="cuda")
        for start, count in zip(self.starts, shape.counts, strict=True):
            picked = torch.randperm(tokens, device="cuda", generator=generator)[:count].sort().values
            self.table[start : start + count] = picked.int()
        self.activations[self.real] = self.rows[self.table[self.real].long()]

    def bind(self, kernel: Kernel) -> None:
        if isinstance(kernel, IndexedKernel):
            kernel.rows, kernel.table = self.rows, self.table
        super().bind(kernel)


class IndexedKernel(Kernel):
    """Takes `rows` and `table` in place of the gathered rows it is bound to."""

    rows: torch.Tensor
    table: torch.Tensor

    def bind(self, activations: torch.Tensor, *others: Any) -> None:  # type: ignore[override]
        super().bind(self.rows, *others, struct.pack("<Q", self.table.data_ptr()))
        self.kept.append(self.table)


def forms() -> dict[str, str]:
    named = {}
    for tile, words in TILES.items():
        named[f"{tile} gathered"] = f"{words} {REGISTERS}"
        named[f"{tile} indexed"] = f"{words} {REGISTERS} ACTIVATIONS=1"
    return named


def check(name: str, kernel: Kernel) -> str:
    """Empty when right on all small shapes, with a full grid and with four blocks that have many tiles each."""
    row_block = kernel.variant.row_block
    for shape in checked_shapes(row_block):
        if row_block > shape.pad:
            shape = Shape(shape.name, shape.reduction, shape.cols, shape.counts, row_block)
        inputs = Indexed(shape, os.getpid(), max(1, *shape.counts) + 5)
        reference = inputs.reference()
        inputs.bind(kernel)
        for grid in (kernel.sms, 4):
            kernel.grid = grid
            try:
                wrong = verdict(inputs, reference, kernel.launch)
            except RuntimeError:
                print(f"FAULT {name} on {shape.name}, {grid} blocks: {kernel.who_waited()}", flush=True)
                raise
            if wrong:
                return f"{shape.name}, {grid} blocks: {wrong}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--shapes", default="0,1,2,3")
    parser.add_argument("--iterations", type=int, default=15)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--check-only", action="store_true")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.zeros(1, device="cuda")
    named = forms()
    checked = {f"checked {i}": f"{words} ACTIVATIONS=1" for i, words in enumerate(CHECKED)}
    variants = {name: make(words) for name, words in (named | checked).items()}
    folder = Path(tempfile.mkdtemp())
    kernels: dict[str, Kernel] = {}
    for source in (SOURCE, INDEXED):
        mine = {n: v for n, v in variants.items() if (v.get("ACTIVATIONS", 0) == 1) == (source == INDEXED)}
        for (name, variant), made in zip(
            mine.items(),
            build_all([v.defines for v in mine.values()], folder, arguments.jobs, source),
            strict=True,
        ):
            if made.cubin is None:
                sys.exit(f"BUILD FAILED {name}\n{made.log[-1500:]}")
            if made.spill_bytes:
                print(f"SPILLS {made.spill_bytes} {name}")
            made_of = IndexedKernel if source == INDEXED else Kernel
            kernels[name] = made_of(variant, made.cubin)
    print(f"built {len(kernels)}", flush=True)
    wrong: dict[str, str] = {}
    for name in variants:
        if wrong_here := check(name, kernels[name]):
            wrong[name] = wrong_here
            print(f"WRONG {name}: {wrong_here}", flush=True)
    print(f"right: {len(kernels) - len(wrong)} of {len(kernels)}", flush=True)

    results = []
    flush = torch.empty(FLUSH_BYTES // 4, device="cuda")
    shapes = [] if arguments.check_only else [timed_shapes()[int(i)] for i in arguments.shapes.split(",")]
    for shape in shapes:
        # All tokens of both ranks: an expert is picked by top_k / experts of them.
        tokens = 1024 if "t512" in shape.name else 4096
        inputs = Indexed(shape, 1, tokens)
        reference = inputs.reference()
        runs: dict[str, Callable[[], None]] = {}
        for name in named:
            if name in wrong:
                continue
            inputs.bind(kernels[name])
            kernels[name].grid = kernels[name].sms
            if wrong_here := verdict(inputs, reference, kernels[name].launch):
                wrong[f"{name}, {shape.name}"] = wrong_here
                print(f"WRONG {name} {shape.name}: {wrong_here}", flush=True)
                continue
            runs[name] = kernels[name].launch
        samples = time_all(runs, arguments.iterations, flush)
        medians = {name: round(statistics.median(times), 2) for name, times in samples.items()}
        results.append({"shape": shape.name, "median_us": medians})
        cells = []
        for tile in TILES:
            gathered, indexed = (
                medians.get(f"{tile} {form}", float("nan")) for form in ("gathered", "indexed")
            )
            cells.append(f"{tile} {gathered:.1f}, indexed {indexed:.1f} ({gathered / indexed:.3f})")
        best = {
            form: min(t for n, t in medians.items() if n.endswith(form)) for form in ("gathered", "indexed")
        }
        cells.append(f"best / best {best['gathered'] / best['indexed']:.3f}")
        print(f"{shape.name}: " + " | ".join(cells), flush=True)
        del inputs, reference, runs
        torch.cuda.empty_cache()
    report = facts("python bench/gemm_probe/indexed.py --out <json>") | {
        "wrong": wrong,
        "shapes": results,
    }
    arguments.out.write_text(json.dumps(report, indent=1))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
