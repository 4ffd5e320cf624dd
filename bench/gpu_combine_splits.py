"""gemm_combine against its GEMM alone, by hand: every walk, run of columns and split of a few GEMM forms, on the second
GEMMs of public models. Not a search; it shows what each parameter is worth. One rank alone has the rows and experts that one
of two has.

    python bench/gpu_combine_splits.py --out results.json [--shapes A,B] [--gemms wide,tall] [--iterations 20] [--world 2]
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tktune.build.cache import ArtifactCache
from tktune.core.config import Config
from tktune.core.device_cuda import cuda_device_classes
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.families.base import family
from tktune.gang.gang import Gang

# Intermediate size in, model size out; 2048 tokens a rank, top 8.
SHAPES: dict[str, dict[str, int]] = {
    "qwen3-235b": {"hidden": 1536, "cols": 4096, "experts": 128},
    "seed": {"hidden": 3072, "cols": 4096, "experts": 64},
    "deepseek-v3": {"hidden": 2048, "cols": 7168, "experts": 64},
    "qwen3-30b": {"hidden": 768, "cols": 2048, "experts": 128},
}
GEMMS: dict[str, dict[str, Any]] = {
    "wide": {"STAGES": 3, "MMA_DEPTH": 0, "OUT_SLOTS": 3},
    "drawn": {"STAGES": 3, "MMA_DEPTH": 0, "OUT_SLOTS": 3, "DRAW": "dispenser"},
    "tall": {"ROW_BLOCK": 256, "COL_BLOCK": 128, "STAGES": 4, "OUT_SLOTS": 1, "DRAW": "dispenser"},
}
WALKS = (("experts", 1), ("columns", 2), ("columns", 4))
SPLITS = (2, 4, 8, 12)
ROUNDS = 5  # of the finalists, with the GEMM alone between them
POLICY = (
    f"slowest rank of each launch, medians; finalists in {ROUNDS} rounds with the GEMM alone between them"
)


def timed(gang: Gang, config: Config, mode: str, iterations: int) -> float:
    outcome = gang.time(config, mode, 0, iterations)
    if not outcome.ok:
        raise SystemExit(f"{dict(config)} {mode}: {outcome.sentence}")
    return statistics.median(outcome.worst_us)


def split_of(base: Config, walk: str, groups: int, split: int) -> Config:
    return base.replace(walk=walk, signal_groups=groups, num_comm_sms=split, num_reduce_sms=96)


def measured(
    name: str, world: int, cache: ArtifactCache, iterations: int, gemms: dict[str, Any]
) -> dict[str, Any]:
    """All points of one shape, then its three best again, interleaved with their GEMM alone."""
    fields: dict[str, Any] = {"top_k": 8, "tokens": 2048, "weight_layout": "enk", **SHAPES[name]}
    if world == 1:
        fields["experts"] = SHAPES[name]["experts"] // 2
    problem = Problem("gemm_combine", **fields, world=world)
    bench, device = family("gemm_combine"), cuda_device_classes()[0]
    space = bench.space(problem, device)
    parts = {gemm: space.default.replace(num_comm_sms=16, **changes) for gemm, changes in gemms.items()}
    outcomes = cache.build([bench.build_spec(space.build_part(c), problem, device) for c in parts.values()])
    points: list[dict[str, Any]] = []
    alone: dict[str, float] = {}
    with Gang(problem, device, Policy()) as gang:

        def load(gemm: str) -> Config:
            artifact = outcomes[list(parts).index(gemm)].artifact
            assert artifact is not None, outcomes[list(parts).index(gemm)].error_sentence
            part = space.build_part(parts[gemm])
            loaded = gang.load(artifact.path, artifact.sha256, part)
            assert loaded.ok, loaded.sentence
            return parts[gemm]

        for gemm in parts:
            base = load(gemm)
            checked = gang.gate(base.replace(signal_groups=2, walk="columns"), "uniform", 1)
            assert checked.ok, checked.sentence
            alone[gemm] = timed(gang, base, "comp", iterations)
            for (walk, groups), split in itertools.product(WALKS, SPLITS):
                config = split_of(base, walk, groups, split)
                if groups > 1 and walk == "columns" and split == SPLITS[0]:
                    walked = timed(gang, config, "comp", iterations)
                    points.append({"gemm": gemm, "walk": walk, "groups": groups, "comp_us": walked})
                    print(f"  {gemm} alone, {walk} {groups}: {walked:.1f}", flush=True)
                us = timed(gang, config, "fused", iterations)
                points.append({"gemm": gemm, "walk": walk, "groups": groups, "split": split, "fused_us": us})
                print(f"  {gemm} {walk} {groups} c={split}: {us:.1f} of {alone[gemm]:.1f}", flush=True)
        fused = sorted((p for p in points if "fused_us" in p), key=lambda p: p["fused_us"])
        finalists = fused[:3] + [p for p in fused if p["groups"] == 1][:1]
        for point in finalists:
            base = load(point["gemm"])
            config = split_of(base, point["walk"], point["groups"], point["split"])
            rounds = [
                (timed(gang, config, "fused", iterations), timed(gang, base, "comp", iterations))
                for _ in range(ROUNDS)
            ]
            point["again_us"] = statistics.median(f for f, _ in rounds)
            point["alone_us"] = statistics.median(c for _, c in rounds)
            point["over_alone"] = round(point["again_us"] / point["alone_us"], 4)
            for mode in ("comm", "serial", "peer"):
                point[f"{mode}_us"] = timed(gang, config, mode, iterations)
            for changes in ({"order": "remote"}, {"num_reduce_sms": 128}, {"rows_in_flight": 8}):
                other = config.replace(**changes)
                if not space.broken(other):
                    key = "-".join(f"{k}={v}" for k, v in changes.items())
                    point[key] = timed(gang, other, "fused", iterations)
    return {"problem": str(problem), "comp_us": alone, "points": points, "finalists": finalists}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--gemms", default=",".join(GEMMS))
    parser.add_argument("--seconds", type=float, default=600.0, help="no shape begins after this")
    parser.add_argument("--world", type=int, default=2)
    words = parser.parse_args()
    names, gemm_names = words.shapes.split(","), words.gemms.split(",")
    for asked, known in ((names, SHAPES), (gemm_names, GEMMS)):
        for name in asked:
            if name not in known:
                parser.error(f"there is no {name!r}; use some of {', '.join(known)}")
    if words.iterations < 1 or words.world < 1:
        parser.error("--iterations and --world are at least 1")
    devices = cuda_device_classes()
    if len(devices) < words.world:
        print(f"{words.world} GPUs are needed, and {len(devices)} answer here. Run this on a host with them.")
        return 1
    facts = {
        "device": f"{words.world} × {devices[0]}",
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "policy": POLICY,
    }
    words.out.parent.mkdir(parents=True, exist_ok=True)
    cache = ArtifactCache(Path(tempfile.mkdtemp(prefix="combine_splits")))
    gemms = {name: GEMMS[name] for name in gemm_names}
    found: dict[str, Any] = {}
    start = time.monotonic()
    for name in names:
        begin = time.monotonic()
        if begin - start > words.seconds:
            break
        found[name] = measured(name, words.world, cache, words.iterations, gemms)
        words.out.write_text(json.dumps({**facts, "shapes": found}, indent=1) + "\n")
        print(f"{name}: alone {found[name]['comp_us']}, {time.monotonic() - begin:.0f} s", flush=True)
        for p in found[name]["points"]:
            if "comp_us" in p:
                print(f"   {p['gemm']:6} walk {p['walk']} of {p['groups']}: GEMM alone {p['comp_us']:.1f} us")
        for p in found[name]["finalists"]:
            print(
                f"   {p['gemm']:6} {p['walk']:8}{p['groups']} c={p['split']:<3} {p['again_us']:7.1f} us = "
                f"{p['over_alone']:.3f} of {p['alone_us']:.1f}; comm {p['comm_us']:.1f} serial {p['serial_us']:.1f} "
                f"peer {p['peer_us']:.1f} {[f'{k} {v:.1f}' for k, v in p.items() if '=' in k]}",
                flush=True,
            )

    return 0


if __name__ == "__main__":
    sys.exit(main())
