"""Our sampler against Optuna's TPE, random search and Kernel Tuner on recorded spaces; no GPU is needed.

    python bench/search.py [--spaces FOLDER] [--seeds 20] [--budget 200] [--only NAME ...] [--jobs 2] [--json]

FOLDER holds recordings as .npz files (`head`: JSON with sid, names, values and restrictions; `X`: value indices of every
feasible config; `t`: its time, NaN where it failed). Our own recordings in bench/recordings are always judged.
Of several recordings KERNEL@DEVICE of one kernel the first by name is judged and the next is its prior; the prior of our
own recordings is the cost model. Kernel Tuner takes part where it is installed:
    python -m venv bench/.venv && bench/.venv/bin/pip install kernel-tuner optuna pydantic sqlalchemy

An evaluation is the first visit to a feasible config; a failure costs one as well. fraction(k) = best time / best found
after k; score(B) = mean over k <= B of (mean fraction(k) - random(k)) / (1 - random(k)), random(k) being the exact
expectation without replacement: 0 is random search, 1 the optimum at once. `wasted` is the share of proposals that were
no new feasible config, `ms_per_evaluation` CPU time. A whole run writes bench/results/search.json. Exit code 1 when a
promise of promises.py is not kept.

`propose(space, replay, seed)` is our sampler for harnesses that replay a recording by `replay.evaluate(row)`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")
sys.path[:0] = [str(Path(__file__).resolve().parents[at]) for at in (1, 0)]

import numpy as np  # noqa: E402
from promises import promises  # noqa: E402
from search_bench.strategies import NEED_PRIOR, SLOWEST_FIRST, STRATEGIES, Recorded, load, propose  # noqa: E402

from tktune.core.errors import TktuneError  # noqa: E402

__all__ = ["propose"]

BENCH = Path(__file__).resolve().parent
MARKS = (25, 50, 100, 200)
SEEDS, BUDGET = 20, 200  # of a whole run, which alone replaces the committed results


@dataclass(frozen=True)
class Run:
    """One strategy on one space from one seed: rows in the order of their first visit, and what they took."""

    strategy: str
    space: str
    rows: list[int]
    proposals: int
    cpu_ms: float
    wall_ms: float


def run_one(job: tuple[str, Path, Path | None, int, int]) -> Run:
    strategy, path, elsewhere, seed, budget = job
    space = load(path, elsewhere)
    cpu, wall = time.process_time(), time.perf_counter()
    visits = list(STRATEGIES[strategy](space, seed, budget))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    rows = list(dict.fromkeys(visits))[:budget]
    each = 1e3 / max(len(rows), 1)
    return Run(strategy, space.name, rows, len(visits), cpu * each, wall * each)


def random_curve(fractions: np.ndarray, budget: int) -> np.ndarray:
    """E[largest of k draws without replacement] for k = 1..budget, from the order statistics."""
    rising, n = np.sort(fractions), len(fractions)
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n + 1)))])
    below = np.arange(n)
    found = np.empty(budget)
    for k in range(1, budget + 1):
        i = below[k - 1 :]  # the largest has rank i, the other k - 1 come from below it
        ways = log_factorial[i] - log_factorial[k - 1] - log_factorial[i - k + 1]
        total = log_factorial[n] - log_factorial[k] - log_factorial[n - k]
        found[k - 1] = np.exp(ways - total) @ rising[i]
    return found


def judged(space: Recorded, runs: Sequence[Run], budget: int) -> dict[str, Any]:
    budget = min(budget, len(space.rows))
    fractions = space.fractions()
    curves = np.zeros((len(runs), budget))
    for curve, run in zip(curves, runs, strict=True):
        best = np.maximum.accumulate(fractions[run.rows[:budget]])
        curve[: len(best)] = best
        curve[len(best) :] = best[-1] if len(best) else 0.0
    chance = random_curve(fractions, budget)
    gain = (curves.mean(axis=0) - chance) / np.maximum(1 - chance, 1e-9)
    row: dict[str, Any] = {}
    for mark in (m for m in MARKS if m <= budget):
        row[f"score@{mark}"] = round(float(gain[:mark].mean()), 4)
        row[f"fraction@{mark}"] = round(float(curves[:, mark - 1].mean()), 4)
    within = curves >= 0.99
    reached = np.where(within.any(axis=1), within.argmax(axis=1) + 1, np.inf)
    median = float(np.median(reached))
    row["within_1pct"] = round(float(within.any(axis=1).mean()), 3)
    row["median_evaluations_1pct"] = median if math.isfinite(median) else None
    row["failed_evaluations"] = _mean(np.isnan(space.times[run.rows]).sum() for run in runs)
    row["wasted"] = _mean(1 - len(run.rows) / max(run.proposals, 1) for run in runs)
    row["ms_per_evaluation"] = _mean(run.cpu_ms for run in runs)
    row["wall_ms_per_evaluation"] = _mean(run.wall_ms for run in runs)
    return row


def _mean(values: Iterable[float]) -> float:
    return round(float(np.mean(list(values))), 4)


def judge(
    spaces: Sequence[tuple[Path, Path | None]], strategies: Sequence[str], seeds: int, budget: int, jobs: int
) -> list[dict[str, Any]]:
    """A row for each strategy and space, and for each strategy the mean over the spaces of others, if there are any."""
    able = {
        s: [pair for pair in spaces if s not in NEED_PRIOR or load(*pair).prior is not None]
        for s in strategies
    }
    in_turn = sorted(strategies, key=lambda s: SLOWEST_FIRST.index(s) if s in SLOWEST_FIRST else 9)
    work = [(s, *pair, seed, budget) for s in in_turn for pair in able[s] for seed in range(seeds)]
    done = []
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for run in pool.imap(run_one, work, chunksize=max(1, seeds // 4)):
            done.append(run)
            if sys.stderr.isatty():
                print(f"\r{len(done)} of {len(work)} searches", end="", file=sys.stderr, flush=True)
    rows = []
    for strategy in strategies:
        here: dict[str, dict[str, Any]] = {}
        for pair in able[strategy]:
            space = load(*pair)
            mine = [run for run in done if (run.strategy, run.space) == (strategy, space.name)]
            here[space.name] = judged(space, mine, budget)
            rows.append({"strategy": strategy, "space": space.name, **here[space.name]})
        named = [row for name, row in here.items() if "@" in name] or list(here.values())
        if named:
            shared = [key for key in named[0] if all(isinstance(row.get(key), int | float) for row in named)]
            mean = {key: _mean(row[key] for row in named) for key in shared}
            rows.append({"strategy": strategy, "space": f"mean of {len(named)}", **mean})
    return rows


def pairs(paths: Sequence[Path]) -> list[tuple[Path, Path | None]]:
    """Each recording that is judged, with the one that is its prior."""
    kernels: dict[str, list[Path]] = {}
    for path in sorted(paths, key=lambda path: load(path).name):
        name = load(path).name
        kernels.setdefault(name.partition("@")[0] if "@" in name else name, []).append(path)
    return [(first, next(iter(others), None)) for first, *others in kernels.values()]


def table(rows: Sequence[dict[str, Any]]) -> str:
    keys = [f"score@{m}" for m in MARKS] + [f"fraction@{m}" for m in (50, 100, 200)]
    keys += ["within_1pct", "wasted", "failed_evaluations", "ms_per_evaluation"]
    lines = ["| strategy | space | " + " | ".join(keys) + " |", "|---" * (len(keys) + 2) + "|"]
    for row in rows:
        cells = [f"{row[key]:.3f}" if key in row else "" for key in keys]
        lines.append(f"| {row['strategy']} | {row['space']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--spaces", type=Path, help="a folder of recordings (.npz)")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--budget", type=int, default=BUDGET)
    parser.add_argument("--only", nargs="*", help="names of spaces")
    parser.add_argument("--strategies", nargs="*", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument(
        "--output", type=Path, help="write JSON here [default of a whole run: bench/results/search.json]"
    )
    given = parser.parse_args()
    if min(given.seeds, given.budget, given.jobs) < 1:
        parser.error("--seeds, --budget and --jobs are at least 1")
    if given.spaces and not given.spaces.is_dir():
        parser.error(f"there is no folder {given.spaces}; name one with recordings as .npz files")
    whole = given.spaces and not given.only and len(given.strategies) == len(STRATEGIES)
    whole = whole and (given.seeds, given.budget) == (SEEDS, BUDGET)
    output = given.output or (BENCH / "results" / "search.json" if whole else None)
    strategies = list(given.strategies)
    if importlib.util.find_spec("kernel_tuner") is None:
        strategies = [name for name in strategies if not name.startswith("kt_")]
        print(
            "Kernel Tuner is not installed, so its strategies are left out; see the top of this file.",
            file=sys.stderr,
        )
    paths = sorted((BENCH / "recordings").glob("*.json.xz"))
    paths += sorted(given.spaces.glob("*.npz")) if given.spaces else []
    try:
        spaces = [pair for pair in pairs(paths) if not given.only or load(*pair).name in given.only]
    except TktuneError as error:
        print(error, file=sys.stderr)
        return 1
    if not spaces or not strategies:
        print(
            "There is nothing to judge: say --spaces FOLDER with recordings as .npz files.", file=sys.stderr
        )
        return 1
    start = time.monotonic()
    rows = judge(spaces, strategies, given.seeds, given.budget, given.jobs)
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    for package in ("optuna", "kernel_tuner"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    judged_by = [] if given.only else promises(rows)  # promises are of all spaces
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "command": "python bench/search.py "
        + " ".join(a if "/" not in a else "FOLDER" for a in sys.argv[1:]),
        "seeds": given.seeds,
        "budget": given.budget,
        "seconds": round(time.monotonic() - start),
        "versions": versions,
        "rows": rows,
        "promises": [
            {"what": p.what, "asked": p.asked, "found": round(p.found, 4), "kept": p.kept} for p in judged_by
        ],
    }
    if output:
        output.write_text(json.dumps(facts, indent=1) + "\n")
    else:
        print("Not a whole run, so nothing is written; --output FILE keeps it.", file=sys.stderr)
    print(json.dumps(rows, indent=1) if given.json else table(rows))
    print(f"\n{facts['seconds']} s", *judged_by, sep="\n", file=sys.stderr if given.json else sys.stdout)
    return 0 if all(promise.kept for promise in judged_by) else 1


if __name__ == "__main__":
    sys.exit(main())
