"""The grouped GEMM on one GPU against libraries, all in one run and one harness.

    python bench/gpu_grouped_gemm.py [--db URL] [--layouts enk,ekn] [--rounds N] [--against RECORDING]
                                     [--out bench/results/NAME.json]

For each shape of studies/h200: the winner of a database, the default, torch._grouped_mm with both weight layouts,
DeepGEMM where it can be imported, and one dense product of equal FLOPs. Everything is captured in CUDA graphs and timed in interleaved rounds
with L2 flushed before each launch; ours are checked against an fp32 reference first. The floor is what the device
could do at best: the larger of real FLOPs at the dense rate and of bytes at the memory rate, both of this run.
With --against, the fastest configs of a recording of the same problem are measured again beside the winner.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import math
import shlex
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tktune
from tktune.build.cache import ArtifactCache
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.device_cuda import cuda_device_classes
from tktune.core.errors import TktuneError
from tktune.core.paths import cache_root
from tktune.core.policy import serving_policy
from tktune.core.problem import Problem
from tktune.families.base import family
from tktune.families.control_page import ControlPage
from tktune.families.cuda.control import Control
from tktune.families.cuda.driver import attach, current_stream, synchronize
from tktune.families.cuda.gemm_inputs import GUARD_ROWS, Case, check_output, draw_weights, make_case
from tktune.families.cuda.launch import Graph, Work
from tktune.families.cuda.module import Module, verified
from tktune.families.cuda.stopwatch import Stopwatch
from tktune.families.cuda.tensor_map import TensorMaps
from tktune.families.grouped_gemm.launch_cuda import gemm_launch, library_work
from tktune.search.recording import Recording
from tktune.search.recording_form import read_recording
from tktune.search.study import load_study

ROOT = Path(__file__).resolve().parents[1]
STUDIES = sorted((ROOT / "studies" / "h200").glob("*.toml"))
ITERATIONS, WARMUP = 5, 1  # of one round
GROUPED = "torch._grouped_mm"
RECORDED_AGAIN = 3  # the fastest of a recording: its first may only have been lucky


@dataclass
class Ground:
    """What all shapes share: the device, its clockwork, and the two rates that floors are made of."""

    device: DeviceClass
    cache: ArtifactCache
    stopwatch: Stopwatch
    control: Control
    maps: TensorMaps
    memory_bytes_per_us: float


def ground(cache_folder: Path) -> Ground:
    attach(0)
    device = cuda_device_classes()[0]
    policy = serving_policy(device.backend, device.l2_bytes)
    control = Control(ControlPage.create(1), 0, 2.0)
    stopwatch = Stopwatch(0, policy.flush_bytes)
    return Ground(
        device, ArtifactCache(cache_folder), stopwatch, control, TensorMaps(), memory_rate(stopwatch)
    )


def memory_rate(stopwatch: Stopwatch) -> float:
    """Bytes per microsecond between SMs and device memory: the better of reading, and of reading and writing."""
    source = torch.ones(1 << 30, device="cuda")
    target = torch.empty_like(source)
    moved = {
        source.nbytes: lambda: torch.amax(source),
        2 * source.nbytes: lambda: torch.mul(source, 2.0, out=target),
    }
    return max(
        nbytes / statistics.median(stopwatch.time(library_work(call, "graph"), 5, 1))
        for nbytes, call in moved.items()
    )


def ours(ground: Ground, problem: Problem, config: Config, case: Case, weights: torch.Tensor) -> Work:
    """`config` built, checked against the reference, and captured. Raises `TktuneError` when it is wrong."""
    bench = family(problem.family)
    part = bench.space(problem, ground.device).build_part(config)
    (outcome,) = ground.cache.build([bench.build_spec(part, problem, ground.device)])
    if outcome.artifact is None:
        raise TktuneError(f"{config} cannot be built: {outcome.error_sentence}")
    module = Module(
        verified(outcome.artifact.path, outcome.artifact.sha256), problem.family, ground.device.sm_count
    )
    out = torch.full(
        (case.rows + GUARD_ROWS, problem.cols), math.nan, dtype=torch.bfloat16, device=weights.device
    )
    launch = gemm_launch(
        module,
        config,
        problem.weight_layout,
        problem.pad,
        ground.maps,
        ground.control.guard,
        ground.device.sm_count,
        case.activations,
        weights,
        out,
        case.walks[str(config["walk"])],
        torch.zeros(2, dtype=torch.int32, device=weights.device),
    )
    with ground.control.launching():
        launch(current_stream(0))
        synchronize(current_stream(0))
    verdict = check_output(case, out)
    if not verdict.passed:
        raise TktuneError(f"{config} is wrong: {verdict.sentence or verdict.worst_error}")
    return Graph(launch)


def peers(problem: Problem, case: Case, weights: torch.Tensor) -> dict[str, Work]:
    """Library kernels on the same rows: padding rows are zero, since a library may read them."""
    rows = torch.nan_to_num(case.activations[: case.rows])
    given = weights if problem.weight_layout == "ekn" else weights.transpose(1, 2)  # (E, K, N) views
    if problem.weight_layout == "ekn":
        stored = {"ekn": given, "enk": given.transpose(1, 2).contiguous().transpose(1, 2)}
    else:
        stored = {"enk": given, "ekn": given.contiguous()}
    found: dict[str, Work] = {}
    for layout, matrices in stored.items():
        found[f"{GROUPED} {layout}"] = library_work(
            lambda matrices=matrices: torch._grouped_mm(rows, matrices, offs=case.offsets), "graph"
        )
        found[f"dense {layout}"] = library_work(lambda one=matrices[0]: torch.mm(rows, one), "graph")
    deep = deep_gemm()
    if deep is not None and problem.weight_layout == "enk":
        ends = torch.arange(case.rows, device=rows.device)
        group = torch.searchsorted(case.offsets.long(), ends, right=True).int()
        out = torch.empty(case.rows, problem.cols, dtype=torch.bfloat16, device=rows.device)
        call = deep.m_grouped_bf16_gemm_nt_contiguous
        found["DeepGEMM"] = library_work(lambda: call(rows, weights, out, group), "graph")
    return found


def deep_gemm() -> Any:
    try:
        return importlib.import_module("deep_gemm")
    except ImportError:
        return None


def interleaved(ground: Ground, runs: dict[str, Work], rounds: int) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        order = list(runs) if number % 2 == 0 else list(reversed(runs))
        for name in order:
            samples[name] += ground.stopwatch.time(runs[name], ITERATIONS, WARMUP)
    return samples


def recorded_best(recording: Recording) -> list[Config]:
    """The configs that were fastest when they were recorded."""
    timed = [
        trial for trial in recording.trials.values() if trial.status == "ok" and trial.time_us is not None
    ]
    return [trial.config for trial in sorted(timed, key=lambda trial: trial.time_us or 0.0)[:RECORDED_AGAIN]]


def measure(
    ground: Ground, problem: Problem, db: str | None, rounds: int, recording: Recording | None = None
) -> dict[str, Any]:
    shape = {name: getattr(problem, name) for name in ("hidden", "cols", "experts", "top_k", "tokens")}
    choice = tktune.lookup(
        "grouped_gemm", **shape, weight_layout=problem.weight_layout, pad=problem.pad, ep_world=problem.ep_world,
        ep_rank=problem.ep_rank, db=db, device=ground.device,
    )  # fmt: skip
    weights = draw_weights(problem, problem.ep_rank or 0, torch.device("cuda", 0))
    case = make_case(problem, weights, problem.ep_rank or 0, problem.routing, 0)
    default = family(problem.family).space(problem, ground.device).default_config()
    runs: dict[str, Work] = {}
    if choice.provenance != "default":
        runs["winner"] = ours(ground, problem, choice.config, case, weights)
    runs["default"] = ours(ground, problem, default, case, weights)
    if recording is not None and recording.problem == problem:
        for place, config in enumerate(recorded_best(recording), 1):
            runs[f"recorded {place} of {len(recording.trials)}"] = ours(
                ground, problem, config, case, weights
            )
    runs |= peers(problem, case, weights)
    samples = interleaved(ground, runs, rounds)
    medians = {name: statistics.median(us) for name, us in samples.items()}

    flop = 2 * problem.hidden * problem.cols
    counts = case.walks["index"][:, 2]
    used = int((counts > 0).sum())
    nbytes = 2 * (used * problem.hidden * problem.cols + case.real_rows * (problem.hidden + problem.cols))
    dense_flop_per_us = flop * case.rows / min(us for name, us in medians.items() if name.startswith("dense"))
    floor = max(flop * case.real_rows / dense_flop_per_us, nbytes / ground.memory_bytes_per_us)
    library = min(us for name, us in medians.items() if name.startswith((GROUPED, "DeepGEMM")))
    return {
        "problem": problem.key,
        "real_rows": case.real_rows,
        "padded_rows": case.rows,
        "floor_us": round(floor, 1),
        "winner": {"provenance": choice.provenance, "config": dict(choice.config)},
        "default": dict(default),
        "runs": {
            name: {
                "median_us": round(us, 2),
                "min_us": round(min(samples[name]), 2),
                "tflops_real": round(flop * case.real_rows / us / 1e6, 1),
                "tflops_padded": round(flop * case.rows / us / 1e6, 1),
                "library_over_this": round(library / us, 3),
            }
            for name, us in medians.items()
        },
    }


def table(row: dict[str, Any]) -> str:
    shape = row["problem"]
    lines = [
        f"{shape['hidden']} × {shape['cols']}, {shape['experts']} experts, {shape['tokens']} tokens, "
        f"{shape['weight_layout']}: {row['real_rows']} real of {row['padded_rows']} padded rows, "
        f"floor {row['floor_us']:.0f} µs"
    ]
    for name, run in row["runs"].items():
        lines.append(
            f"  {name:18} {run['median_us']:8.1f} µs  {run['tflops_real']:6.0f} TFLOP/s real "
            f"{run['tflops_padded']:6.0f} padded  library ÷ this {run['library_over_this']:.3f}"
        )
    if "winner" in row["runs"]:
        lines.append("  " + " ".join(f"{k}={v}" for k, v in row["winner"]["config"].items()))
    return "\n".join(lines)


def facts(ground: Ground) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(0),
        "device_class": ground.device.key,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "deep_gemm": deep_gemm() is not None,
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "policy": "serving: CUDA graphs, L2 flushed before each launch, interleaved rounds, medians",
        "memory_gb_s": round(ground.memory_bytes_per_us / 1e3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--db", help="database with winners [default: TKTUNE_DB or the user's own]")
    parser.add_argument("--cache", type=Path, default=cache_root())
    parser.add_argument("--layouts", default="enk,ekn")
    parser.add_argument("--shapes", default="", help="only studies whose name has one of these words")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--against", type=Path, help="a recording (.json.xz) whose fastest are measured too")
    parser.add_argument("--out", type=Path, help="write JSON here")
    arguments = parser.parse_args()
    if not cuda_device_classes():
        print("No GPU answers here, so there is nothing to measure. Run this on a host with one.")
        return 1
    found = ground(arguments.cache)
    recording = read_recording(arguments.against) if arguments.against else None
    words = [word for word in arguments.shapes.split(",") if word]
    rows = []
    for path in STUDIES:
        if words and not any(word in path.stem for word in words):
            continue
        study = load_study(path)
        for problem in study.problems if study.family == "grouped_gemm" else ():
            for layout in arguments.layouts.split(","):
                one = problem.replace(weight_layout=layout)
                try:
                    rows.append(measure(found, one, arguments.db, arguments.rounds, recording))
                except TktuneError as error:
                    print(f"{one}: {error}", flush=True)
                    continue
                print(table(rows[-1]), flush=True)
                torch.cuda.empty_cache()
    if arguments.out:
        arguments.out.write_text(json.dumps({**facts(found), "shapes": rows}, indent=1) + "\n")
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
