"""Rows that are pushed against rows that are pulled, on two GPUs: communication alone and fused, by split.

    python bench/push_compare.py [--shapes D,B] [--forms indexed,gathered] [--tiles wide] [--splits 4,8,12,16,24]
                                 [--rounds 3] [--seconds 60] [--rehearse] [--out FILE.json]

Graph replay, L2 flushed and all ranks met on the device before each launch, slowest rank of each, medians; both ways
and all splits interleaved. Each config is gated on three routings before it is timed. Exit code 1 when one was wrong.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent / "dispatch_probe"))

from plan import REHEARSAL, TILES, problem_of

from tktune.build.cache import ArtifactCache
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.device_cuda import cuda_device_classes
from tktune.core.policy import serving_policy
from tktune.families.base import family
from tktune.gang.gang import Gang

WAYS = ("pull", "push")
REHEARSED: dict[str, Any] = {"WARP_M": 64, "DRAW": "dispenser"}
ROUTINGS = ("uniform", "empty:0", "hot:0.9@3")
LAUNCHES: dict[str, dict[str, Any]] = {"": {}, "wave 1 ": {"wave": 1}, "opening ": {"opening": 1, "wave": 1}}


def launches_of(config: Config) -> dict[str, dict[str, Any]]:
    """What a launch is told, by label; where rows are scattered after the push, also how many blocks push first."""
    if config["TRANSPORT"] == "pull" or config.get("ACTIVATIONS") == "indexed":
        return LAUNCHES
    split = config.number("num_comm_sms")
    return {**LAUNCHES, "half push ": {"push_sms": split // 2}, "all push ": {"push_sms": split}}


def build(problem: Any, device: DeviceClass, configs: dict[str, Config], folder: Path) -> dict[str, Any]:
    """Artifact and build part of each config."""
    bench = family("dispatch_gemm")
    space = bench.space(problem, device)
    parts = {name: space.build_part(config) for name, config in configs.items()}
    specs = [bench.build_spec(part, problem, device) for part in parts.values()]
    made = {}
    for name, outcome in zip(parts, ArtifactCache(folder).build(specs), strict=True):
        if outcome.artifact is None:
            sys.exit(f"{name} cannot be built: {outcome.error_sentence}")
        made[name] = (outcome.artifact, parts[name])
    return made


def compare(
    shape: str, device: DeviceClass, words: argparse.Namespace, folder: Path, end: float
) -> dict[str, Any]:
    problem = problem_of(shape, "enk")
    space = family("dispatch_gemm").space(problem, device)
    configs = {
        f"{way} {form} {tile}": space.default.replace(ACTIVATIONS=form, TRANSPORT=way, **TILES[tile])
        for form in words.forms.split(",")
        for tile in words.tiles.split(",")
        for way in WAYS
    }
    if words.rehearse:  # mma.sync, rows gathered by slot
        configs = {f"{way} mma.sync": space.default.replace(TRANSPORT=way, **REHEARSED) for way in WAYS}
    built = build(problem, device, configs, folder)
    splits = [int(split) for split in words.splits.split(",")]
    found: dict[str, Any] = {"wrong": [], "us": {}}
    policy = serving_policy("cuda", device.l2_bytes)
    with Gang(problem, device, policy) as gang:
        for round_number in range(words.rounds + 1):
            for split in splits:
                for name, config in configs.items():
                    if time.monotonic() > end:
                        return found
                    artifact, part = built[name]
                    gang.load(artifact.path, artifact.sha256, part)
                    config = config.replace(num_comm_sms=split)
                    if round_number == 0:
                        if split == splits[0]:
                            for seed, routing in enumerate(ROUTINGS):
                                outcome = gang.gate(config, routing, seed)
                                if not outcome.ok:
                                    found["wrong"].append(f"{name} {routing}: {outcome.sentence}")
                        continue
                    for label, launch in launches_of(config).items():
                        for mode in ("fused",) if label in LAUNCHES and label else ("comm", "fused"):
                            outcome = gang.time(config.replace(**launch), mode, 0, 7)
                            key = f"{mode} {name} {label}{split}"
                            if outcome.ok:
                                found["us"].setdefault(key, []).extend(outcome.worst_us)
                            else:
                                found["wrong"].append(f"{key}: {outcome.sentence}")
    return found


def table(shape: str, found: dict[str, Any]) -> str:
    curves: dict[str, list[str]] = {}
    for key, samples in found["us"].items():
        label, split = key.rsplit(" ", 1)
        curves.setdefault(label, []).append(f"{split}: {statistics.median(samples):.1f}")
    lines = [f"{shape}: {'; '.join(found['wrong']) or 'all right'}"]
    return "\n".join(
        [*lines, *(f"  {label:34} {'  '.join(points)}" for label, points in sorted(curves.items()))]
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="D,B")
    parser.add_argument("--forms", default="indexed")
    parser.add_argument("--tiles", default="wide")
    parser.add_argument("--rehearse", action="store_true", help="the sm_120a class on mma.sync")
    parser.add_argument("--splits", default="4,8,12,16,24")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    words = parser.parse_args()
    devices = cuda_device_classes()
    if len(devices) < 2:
        print(f"Two GPUs are needed, and {len(devices)} answer here. Run this on a host with two.")
        return 1
    begin = time.monotonic()
    shapes = words.shapes.split(",")
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, shape in enumerate(shapes, start=1):
            end = begin + words.seconds * number / len(shapes)
            device = REHEARSAL if words.rehearse else devices[0]
            results[shape] = compare(shape, device, words, Path(folder), end)
            print(table(shape, results[shape]), flush=True)
    if words.out:
        words.out.parent.mkdir(parents=True, exist_ok=True)
        words.out.write_text(
            json.dumps({"command": shlex.join(["python", *sys.argv]), "shapes": results}, indent=1) + "\n"
        )
    return 1 if any(one["wrong"] or not one["us"] for one in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
