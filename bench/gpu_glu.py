"""SwiGLU made of the GEMM's accumulators against a second launch over its outputs, and against a GEMM without it: the same
block shapes, on one GPU, whose rank holds all experts and fetches its own rows.

    python bench/gpu_glu.py [--out bench/results/NAME.json] [--rounds 8] [--shapes NAME,...]

Forms are gated against fp32, then timed in interleaved rounds, the first of which only warms the GPU; medians in
microseconds, ratios as medians over rounds. `library` is torch's grouped GEMM, with torch's two kernels for
silu(gate) · up where that is asked for.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tktune.build.artifact import Artifact
from tktune.build.cache import ArtifactCache
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.device_cuda import cuda_device_classes
from tktune.core.policy import serving_policy
from tktune.core.problem import Problem
from tktune.families.base import family
from tktune.gang.gang import Gang

ITERATIONS = 10
SHAPES = {
    "DeepSeek-V3, 64 experts": {"hidden": 7168, "cols": 4096, "experts": 64},
    "Qwen3-30B-A3B": {"hidden": 2048, "cols": 1536, "experts": 128},
}
BLOCKS: dict[str, dict[str, Any]] = {
    "128 × 256": {"DRAW": "dispenser"},
    "128 × 192, in turns": {
        "MAIN_LOOP": "wgmma_pingpong", "COL_BLOCK": 192, "STAGES": 5, "OUT_SLOTS": 3, "DRAW": "dispenser",
    },
    "256 × 128": {"ROW_BLOCK": 256, "COL_BLOCK": 128, "DRAW": "dispenser"},
    "128 × 256, by index": {"ACTIVATIONS": "indexed", "DRAW": "dispenser"},
}  # fmt: skip
FORMS = ("none", "fused", "separate")
PLACES = {"fused": "", "comp": ", in place"}  # the whole launch, and the GEMM with its rows in place
Built = dict[tuple[str, str], tuple[Config, Config, Artifact]]


def problem_of(shape: dict[str, int], form: str) -> Problem:
    finish = "none" if form == "none" else "swiglu"
    return Problem(
        "dispatch_gemm", **shape, top_k=8, tokens=2048, world=1, weight_layout="enk", finish=finish
    )


def build(cache: ArtifactCache, device: DeviceClass) -> Built:
    """Config, build part and artifact of each (blocks, form); they serve every shape."""
    bench, configs = family("dispatch_gemm"), {}
    shape = next(iter(SHAPES.values()))
    for blocks, changes in BLOCKS.items():
        for form in FORMS:
            space = bench.space(problem_of(shape, form), device)
            words = changes if form == "none" else {**changes, "GLU": form}
            config = space.default.replace(**words)
            assert space.broken(config) == [], space.broken(config)
            configs[blocks, form] = (config, space.build_part(config))
    specs = [
        bench.build_spec(part, problem_of(shape, form), device) for (_, form), (_, part) in configs.items()
    ]
    made = {}
    for (key, (config, part)), outcome in zip(configs.items(), cache.build(specs), strict=True):
        assert outcome.artifact is not None, outcome.error_sentence
        made[key] = (config, part, outcome.artifact)
    return made


def timed(gang: Gang, one: tuple[Config, Config, Artifact], mode: str) -> list[float]:
    config, part, artifact = one
    for outcome in (gang.load(artifact.path, artifact.sha256, part), gang.time(config, mode, 0, ITERATIONS)):
        if not outcome.ok:
            raise SystemExit(f"{dict(config)} {mode}: {outcome.sentence}")
    return outcome.worst_us


def measure(gangs: dict[str, Gang], built: Built, rounds: int) -> dict[str, dict[str, float]]:
    """For each blocks the medians of each form and place, and how separate compares with fused; the library's medians."""
    found: dict[str, dict[str, float]] = {}
    for blocks in BLOCKS:
        for form in FORMS:
            config, part, artifact = built[blocks, form]
            gang = gangs[form]
            loaded = gang.load(artifact.path, artifact.sha256, part)
            outcome = gang.gate(config, "uniform", 1) if loaded.ok else loaded
            if not outcome.ok:
                raise SystemExit(f"{blocks} {form}: {outcome.sentence}")
        runs: dict[tuple[str, str], list[float]] = {}  # a median each round
        for number in range(rounds + 1):
            for form in FORMS if number % 2 else reversed(FORMS):
                for mode in ("fused", "comp"):
                    us = timed(gangs[form], built[blocks, form], mode)
                    if number:
                        runs.setdefault((form, mode), []).append(statistics.median(us))
        found[blocks] = {f"{form}{PLACES[mode]}": statistics.median(us) for (form, mode), us in runs.items()}
        for mode, place in PLACES.items():
            pairs = zip(runs["separate", mode], runs["fused", mode], strict=True)
            found[blocks][f"separate ÷ fused{place}"] = statistics.median(a / b for a, b in pairs)
    last = {form: built[blocks, form] for form in FORMS}
    found["library"] = {
        form: statistics.median(timed(gangs[form], last[form], "peer")) for form in ("none", "fused")
    }
    return found


def table(name: str, found: dict[str, dict[str, float]]) -> str:
    lines = [f"{name}: µs of the whole launch (of the GEMM with rows in place)"]
    for blocks, us in found.items():
        if blocks == "library":
            lines.append(f"  library: GEMM {us['none']:.1f}, with SwiGLU {us['fused']:.1f}")
            continue
        words = [f"{form} {us[form]:.1f} ({us[f'{form}, in place']:.1f})" for form in FORMS]
        ratios = us["separate ÷ fused"], us["separate ÷ fused, in place"]
        lines.append(f"  {blocks:20} {', '.join(words)}; separate ÷ fused {ratios[0]:.3f} ({ratios[1]:.3f})")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--out", type=Path, help="write JSON here")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="names, or beginnings of names")
    arguments = parser.parse_args()
    devices = cuda_device_classes()
    if not devices or devices[0].arch != "sm_90a":
        print("No GPU with wgmma answers here, so there is nothing to measure. Run this on a Hopper host.")
        return 1
    device = devices[0]
    policy = serving_policy("cuda", device.l2_bytes)
    asked = tuple(arguments.shapes.split(","))
    shapes = {name: shape for name, shape in SHAPES.items() if name.startswith(asked)}
    if not shapes:
        parser.error(f"there is no shape {arguments.shapes}; use {', '.join(SHAPES)}")
    first = next(iter(shapes.values()))
    gangs = {finish: Gang(problem_of(first, finish), device, policy) for finish in ("none", "fused")}
    results = {}
    try:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(3) as pool:
            starts = [pool.submit(gang.start) for gang in gangs.values()]
            built = pool.submit(build, ArtifactCache(Path(folder) / "cache"), device).result()
            for start in starts:
                start.result()
            seats = {"none": gangs["none"], "fused": gangs["fused"], "separate": gangs["fused"]}
            for name, shape in shapes.items():
                for form, gang in gangs.items():
                    if gang.problem != problem_of(shape, form):
                        gang.turn_to(problem_of(shape, form))
                results[name] = measure(seats, built, arguments.rounds)
                print(table(name, results[name]), flush=True)
    finally:
        for gang in gangs.values():
            gang.close()
    if arguments.out:
        facts = {
            "device": str(device),
            "date": datetime.date.today().isoformat(),
            "command": shlex.join(["python", *sys.argv]),
            "policy": f"{policy.launch_mode} launch, {policy.cache_state} L2, {ITERATIONS} launches a round",
        }
        arguments.out.write_text(json.dumps({**facts, "us": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
