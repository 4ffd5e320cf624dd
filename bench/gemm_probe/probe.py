"""Builds a set of grouped GEMM variants, checks every one against an fp32 reference, and times the right ones
against torch._grouped_mm and a dense cuBLAS product of equal FLOPs in one run.

    python bench/gemm_probe/probe.py --set bench/gemm_probe/sets/first.txt --out bench/results/gemm_probe.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from build import SOURCE, Built, build_all
from kernel import Kernel
from shapes import Shape, checked_shapes, timed_shapes
from variants import Variant, read_set

FLUSH_BYTES = 256 << 20
SPARE_ROWS = 128  # beyond the last expert; must stay untouched
TOLERANCE = 4e-3  # ‖out − ref‖ ÷ ‖ref‖: one rounding to bf16 of an fp32 sum


class Inputs:
    """Fresh random operands of a shape; padding rows of the activations are NaN, so that nothing may use them."""

    def __init__(self, shape: Shape, seed: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        self.shape = shape
        rows, experts = shape.rows + SPARE_ROWS, len(shape.counts)
        self.activations = torch.randn(rows, shape.reduction, device="cuda", generator=generator).bfloat16()
        real = torch.zeros(rows, dtype=torch.bool)
        starts, at = [], 0
        for count, padded in zip(shape.counts, shape.padded, strict=True):
            starts.append(at)
            real[at : at + count] = True
            at += padded
        self.real = real.cuda()
        self.activations[~self.real] = float("nan")
        self.enk = torch.empty(experts, shape.cols, shape.reduction, device="cuda", dtype=torch.bfloat16)
        for e in range(experts):
            self.enk[e] = torch.randn(shape.cols, shape.reduction, device="cuda", generator=generator)
        self.enk *= shape.reduction**-0.5
        self.starts = starts
        self.outputs = torch.empty(rows, shape.cols, device="cuda", dtype=torch.bfloat16)
        self.offsets = torch.tensor(shape.padded, device="cuda").cumsum(0).int()
        self._ekn: torch.Tensor | None = None

    @property
    def ekn(self) -> torch.Tensor:
        if self._ekn is None:
            self._ekn = self.enk.transpose(1, 2).contiguous()
        return self._ekn

    def walk(self, order: int, row_block: int) -> torch.Tensor:
        """0 as the experts are numbered, 1 longest first, 2 shortest first, 3 all tall tiles before all low ones."""
        counts = self.shape.counts
        key = {0: lambda e: e, 1: lambda e: -counts[e], 2: lambda e: counts[e], 3: lambda e: -counts[e]}[
            order
        ]
        entries = [[e, self.starts[e], counts[e], 0] for e in sorted(range(len(counts)), key=key)]
        if order == 3:
            entries = tallest_first(entries, row_block)
        return torch.tensor(entries, dtype=torch.int32, device="cuda")

    def reference(self) -> torch.Tensor:
        out = torch.zeros(self.outputs.shape, device="cuda")
        for e, (start, count) in enumerate(zip(self.starts, self.shape.counts, strict=True)):
            if count:
                out[start : start + count] = (
                    self.activations[start : start + count].float() @ self.enk[e].float().T
                )
        return out

    def bind(self, kernel: Kernel) -> None:
        variant = kernel.variant
        weights = self.enk if variant.enk else self.ekn
        walk = self.walk(variant.launch.get("walk", 1), variant.row_block)
        kernel.bind(self.activations, weights, self.outputs, walk, self.shape.pad)


def tallest_first(entries: list[list[int]], row_block: int) -> list[list[int]]:
    """Each expert cut into its tall and its low tiles, as the kernel deals pieces of 64 over them, and all sorted by
    the height of their tiles."""
    piece = min(64, row_block)
    parts = []
    for expert, first, rows, _ in entries:
        pieces = -(-rows // piece)
        tiles = -(-pieces * piece // row_block)
        low = pieces // tiles if tiles else 0
        tall_rows = min((pieces - tiles * low) * (low + 1) * piece, rows)
        for height, start, count in ((low + 1, 0, tall_rows), (low, tall_rows, rows - tall_rows)):
            if count or not rows:
                parts.append((height, [expert, first + start, count, 0]))
    return [entry for _, entry in sorted(parts, key=lambda part: -part[0])]


def verdict(inputs: Inputs, reference: torch.Tensor, run: Callable[[], None]) -> str:
    """Empty when right. Two runs on one input must be equal bit for bit."""
    outputs = inputs.outputs
    first = None
    for _ in range(2):
        outputs.fill_(float("nan"))
        run()
        torch.cuda.synchronize()
        if not bool(torch.isnan(outputs[inputs.shape.rows :]).all()):
            return "wrote past the last expert"
        real = outputs[inputs.real]
        if not bool(torch.isfinite(real).all()):
            rows = (~torch.isfinite(outputs).all(1) & inputs.real).nonzero().flatten()
            return f"NaN in {len(rows)} real rows, first {rows[:4].tolist()}"
        if first is None:
            first = real.clone()
        elif not torch.equal(first, real):
            return "two runs differ"
    wanted = reference[inputs.real]
    if wanted.numel() == 0:
        return ""
    error = (first.float() - wanted).norm() / wanted.norm()
    rows_error = (first.float() - wanted).norm(dim=1) / wanted.norm(dim=1)
    if not float(error) < TOLERANCE or not float(rows_error.max()) < 4 * TOLERANCE:
        worst = inputs.real.nonzero().flatten()[rows_error.argmax()]
        bad = int((rows_error > 4 * TOLERANCE).sum())
        return f"error {float(error):.2e}, {bad} bad rows, worst row {int(worst)}"
    return ""


def check(kernels: list[Kernel], names: str = "") -> dict[str, str]:
    """What is wrong with each variant, if anything, on the small shapes whose names contain one of `names`."""
    verdicts = {kernel.variant.name: "" for kernel in kernels}
    for row_block in sorted({kernel.variant.row_block for kernel in kernels}):
        for shape in checked_shapes(row_block):
            if not any(name in shape.name for name in names.split(",")):
                continue
            if row_block > shape.pad:
                shape = Shape(shape.name, shape.reduction, shape.cols, shape.counts, row_block)
            inputs = Inputs(shape, seed=os.getpid())
            reference = inputs.reference()
            for kernel in kernels:
                variant = kernel.variant
                if variant.row_block != row_block or verdicts[variant.name]:
                    continue
                if shape.reduction % variant.get("RED_BLOCK", 64):
                    continue
                inputs.bind(kernel)
                # A full grid gives a block at most one tile of these; a small one gives it many.
                for grid in (kernel.grid, 4 * kernel.cluster):
                    kernel.grid = grid
                    try:
                        wrong = verdict(inputs, reference, kernel.launch)
                    except RuntimeError:
                        print(f"FAULT {variant.name} on {shape.name} {kernel.who_waited()}", flush=True)
                        raise
                    if wrong and not verdicts[variant.name]:
                        verdicts[variant.name] = f"{shape.name}, {grid} blocks: {wrong}"
    return verdicts


def time_all(
    runs: dict[str, Callable[[], None]], iterations: int, flush: torch.Tensor
) -> dict[str, list[float]]:
    """Microseconds of each run, L2 flushed before each, all runs interleaved so that they share the clocks."""
    for run in runs.values():
        run()
    torch.cuda.synchronize()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
    for _ in range(iterations):
        for name, run in runs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.fill_(1.0)
            start.record()
            run()
            end.record()
            events[name].append((start, end))
        torch.cuda.synchronize()
    return {name: [1000 * a.elapsed_time(b) for a, b in pairs] for name, pairs in events.items()}


def baselines(inputs: Inputs) -> dict[str, Callable[[], None]]:
    shape = inputs.shape
    rows = torch.nan_to_num(inputs.activations[: shape.rows])
    nk, kn = inputs.enk[0], inputs.ekn[0]
    out = inputs.outputs[: shape.rows]
    columns_first = inputs.enk.transpose(1, 2)
    return {
        "dense": lambda: torch.mm(rows, nk.T, out=out),
        "dense kn": lambda: torch.mm(rows, kn, out=out),
        "grouped_mm enk": lambda: torch._grouped_mm(rows, columns_first, offs=inputs.offsets),
        "grouped_mm ekn": lambda: torch._grouped_mm(rows, inputs.ekn, offs=inputs.offsets),
    }


def time_shape(shape: Shape, kernels: list[Kernel], iterations: int, flush: torch.Tensor) -> dict:
    inputs = Inputs(shape, seed=1)
    reference = inputs.reference()
    runs = baselines(inputs)
    wrong = {}
    for kernel in kernels:
        if shape.reduction % kernel.variant.get("RED_BLOCK", 64):
            continue
        inputs.bind(kernel)
        try:
            wrong[kernel.variant.name] = verdict(inputs, reference, kernel.launch)
        except RuntimeError:
            print(f"FAULT {kernel.variant.name} {kernel.who_waited()}", flush=True)
            raise
        if not wrong[kernel.variant.name]:
            runs[kernel.variant.name] = kernel.launch
    del reference
    samples = time_all(runs, iterations, flush)
    medians = {name: statistics.median(times) for name, times in samples.items()}
    return {
        "shape": shape.name,
        "rows": shape.rows,
        "real_rows": sum(shape.counts),
        "half_tile_share": round(shape.work, 4),
        "flops": shape.flops,
        "bytes": shape.bytes,
        "wrong": {name: text for name, text in wrong.items() if text},
        "median_us": {name: round(time, 2) for name, time in medians.items()},
        "min_us": {name: round(min(times), 2) for name, times in samples.items()},
        "spread_us": {name: round(statistics.pstdev(times), 2) for name, times in samples.items()},
    }


def facts(command: str) -> dict:
    device = torch.cuda.get_device_properties(0)
    nvcc = subprocess.run(["nvcc", "--version"], capture_output=True, text=True).stdout
    return {
        "device": device.name,
        "sm_count": device.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nvcc": nvcc.strip().splitlines()[-1],
        "date": datetime.date.today().isoformat(),
        "command": command,
        "policy": f"medians, {FLUSH_BYTES >> 20} MiB written before each launch, all runs interleaved",
    }


def table(results: list[dict], order: list[str]) -> str:
    """One line a run; for each shape median µs, then the ratios to the faster torch._grouped_mm and dense product."""
    lines = [
        "shape rows/work: " + " | ".join(f"{r['shape']}: {r['rows']} {r['half_tile_share']}" for r in results)
    ]
    for name in ["dense", "dense kn", "grouped_mm enk", "grouped_mm ekn", *order]:
        cells = []
        for result in results:
            times = result["median_us"]
            if name not in times:
                cells.append(f"{'-':>15}")
                continue
            best = min(times["grouped_mm enk"], times["grouped_mm ekn"])
            dense = min(times["dense"], times["dense kn"])
            cells.append(f"{times[name]:7.1f} {best / times[name]:.3f} {dense / times[name]:.2f}")
        lines.append(" | ".join(cells) + f" | {name}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", required=True, help="file of variants, one a line")
    parser.add_argument("--out", required=True)
    parser.add_argument("--shapes", default="0,1,2,3")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2)
    parser.add_argument("--source", type=Path, default=SOURCE, help="another kernel file with the same entry")
    parser.add_argument("--spin-limit-s", type=float, default=2.0, help="longer under a sanitizer")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--checked", default="", help="parts of names: check on these small shapes only")
    parser.add_argument("--no-check", action="store_true")
    arguments = parser.parse_args()

    variants: list[Variant] = read_set(arguments.set)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.zeros(1, device="cuda")
    folder = Path(tempfile.mkdtemp())
    built: list[Built] = build_all([v.defines for v in variants], folder, arguments.jobs, arguments.source)
    kernels = []
    for variant, artifact in zip(variants, built, strict=True):
        if artifact.cubin is None:
            print(f"BUILD FAILED {variant.name}\n{artifact.log[-1500:]}")
            continue
        try:
            kernels.append(Kernel(variant, artifact.cubin, spin_limit_s=arguments.spin_limit_s))
        except RuntimeError as reason:
            print(f"NOT LOADED {variant.name}: {reason}")
            continue
        if artifact.spill_bytes:
            print(f"SPILLS {artifact.spill_bytes} {variant.name}")
    for kernel in kernels:
        if kernel.cluster > 1:
            print(f"resident blocks {kernel.resident} {kernel.variant.name}")
    print(
        f"built {len(kernels)} of {len(variants)}, slowest {max(b.seconds for b in built):.1f} s", flush=True
    )

    verdicts = {} if arguments.no_check else check(kernels, arguments.checked)
    for name, wrong in verdicts.items():
        if wrong:
            print(f"WRONG {name}: {wrong}", flush=True)
    kernels = [kernel for kernel in kernels if not verdicts.get(kernel.variant.name)]
    print(f"right: {len(kernels)}", flush=True)

    results: list[dict] = []
    if not arguments.check_only and kernels:
        flush = torch.empty(FLUSH_BYTES // 4, device="cuda")
        shapes = timed_shapes()
        for index in (int(i) for i in arguments.shapes.split(",")):
            results.append(time_shape(shapes[index], kernels, arguments.iterations, flush))
            torch.cuda.empty_cache()
            print(results[-1]["shape"], results[-1]["wrong"] or "right", flush=True)

    command = f"python bench/gemm_probe/probe.py --set {arguments.set} --out <json>"
    command += f" --shapes {arguments.shapes} --iterations {arguments.iterations}"
    report = facts(command) | {
        "variants": {
            variant.name: {
                "registers": artifact.registers,
                "spill_bytes": artifact.spill_bytes,
                "build_s": round(artifact.seconds, 2),
                "verdict": verdicts.get(variant.name, "not checked") or "right",
            }
            for variant, artifact in zip(variants, built, strict=True)
        },
        "shapes": results,
    }
    Path(arguments.out).write_text(json.dumps(report, indent=1))
    if results:
        print(table(results, [kernel.variant.name for kernel in kernels]))


if __name__ == "__main__":
    main()
