"""Seconds and peak memory to build one CPU variant and one cubin on this machine, each time from an empty cache.

    python bench/build_time.py [--repeat N] [--json]

The variants are the families' defaults. What cannot be built here (no nvcc, no source yet) says why.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tktune.build.cache import ArtifactCache
from tktune.core.build_spec import BuildSpec
from tktune.core.device import device_class
from tktune.core.errors import TktuneError
from tktune.core.problem import Problem
from tktune.families.base import family

CASES = (
    ("dispatch_gemm", "cpu", 2),
    ("grouped_gemm", "cpu", 1),
    ("grouped_gemm", "sm_90a", 1),
    ("grouped_gemm", "sm_120a", 1),
)


def default_spec(family_name: str, device_name: str, world: int) -> BuildSpec:
    problem = Problem(family_name, hidden=1024, cols=1024, experts=8, top_k=2, tokens=256, world=world)
    device = device_class(device_name)
    found = family(family_name)
    space = found.space(problem, device)
    return found.build_spec(space.build_part(space.default), problem, device)


def measure(spec: BuildSpec, repeat: int) -> dict[str, Any]:
    """Median seconds of the compile, and of a second request that compiles nothing."""
    compiles, whole, cached, peak = [], [], [], 0
    for _ in range(repeat):
        with tempfile.TemporaryDirectory() as folder:
            cache = ArtifactCache(Path(folder) / "cache")
            start = time.perf_counter()
            (outcome,) = cache.build([spec])
            whole.append(time.perf_counter() - start)
            if not outcome.ok:
                return {"variant": spec.name, "problem": outcome.error_sentence}
            start = time.perf_counter()
            cache.build([spec])
            cached.append(time.perf_counter() - start)
            compiles.append(outcome.seconds)
            peak = max(peak, outcome.peak_bytes)
    return {
        "variant": spec.name,
        "compiler": cache.toolchain(spec).version,
        "compile_s": round(statistics.median(compiles), 3),
        "with_publishing_s": round(statistics.median(whole), 3),
        "cached_s": round(statistics.median(cached), 5),
        "peak_mib": peak >> 20,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for family_name, device_name, world in CASES:
        try:
            row = measure(default_spec(family_name, device_name, world), arguments.repeat)
        except TktuneError as error:
            row = {"variant": f"{family_name} for {device_name}", "problem": str(error)}
        rows.append(row)
        if not arguments.json:
            words = row.get("problem") or (
                f"{row['compile_s']:.2f} s compile, {row['with_publishing_s']:.2f} s with publishing, "
                f"{row['cached_s'] * 1e3:.1f} ms when cached, {row['peak_mib']} MiB peak"
            )
            print(f"{row['variant']}: {words}", flush=True)
    if arguments.json:
        print(json.dumps(rows, indent=1))
    return 0 if any("compile_s" in row for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
