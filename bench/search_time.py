"""How long the driver needs to find a good config, by replay of our own recordings; no GPU and no compiler is needed.

    python bench/search_time.py [--seeds 10] [--first-seed 0] [--seconds 60] [--jobs 2] [--only RECORDING ...] [--output FILE] [--json]

Every recording of bench/recordings is tuned by the unchanged driver on a virtual clock that charges what was recorded:
compiles (as many at once as when it was recorded; ahead of measuring on a GPU), loads, gates and launches. Compared are
our sampler (`model`: gain a second), Optuna's TPE and a random order over the same configs (`--sampler` of `tktune run`).
What deciding costs itself is not charged; it stands beside, in milliseconds of CPU time a trial.

Per recording and sampler, medians over the seeds: charged seconds until the best config so far is truly within 10, 5, 2
and 1 % of the recording's best (inf: not within --seconds), and the trials and builds until then. Then, with 2 % noise
on each launch: how far the winners of independent tunes lie apart in true time, and by how much a winner is worse than the
default at most. A run with ten seeds or more from 0 on writes bench/results/search_time.json. Exit code 1 when a promise is
not kept. A tune ends after --seconds at most, and after 20 on the H200 recording, where TPE is there after 6 to 9: what is
later than that changes no median, and TPE takes minutes of real time for it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import os
import platform
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

for _threads in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tktune.search.budget import StopSignal  # noqa: E402
from tktune.search.effort import PROFILES  # noqa: E402
from tktune.search.events import Event, Tee, TrialDone  # noqa: E402
from tktune.search.recording_form import read_recording  # noqa: E402
from tktune.search.replay import replay, study_of  # noqa: E402
from tktune.search.replay_rooms import Disturbance, VirtualClock  # noqa: E402

BENCH = Path(__file__).resolve().parent
LEVELS = (0.10, 0.05, 0.02, 0.01)
SAMPLERS = ("model", "tpe", "random")
NOISE = 0.02
SHORTER_S = {"h200_grouped_gemm": 20.0}  # charged seconds after which no median is still open
MOST_OF_TPE, MOST_APART = 1 / 3, 0.01  # promised
SEEDS = 10  # of a run that is worth keeping
TUNES = 5  # independent ones whose winners must agree


@dataclasses.dataclass(frozen=True)
class Job:
    path: Path
    sampler: str
    seed: int
    seconds: float
    noise: float


def run(job: Job) -> dict[str, Any]:
    """One tune: when each level was reached, and what its winner is truly worth."""
    recording, clock, stop = read_recording(job.path), VirtualClock(), StopSignal()
    best_us = recording.optimum.time_us or 0.0
    reached = dict.fromkeys(LEVELS, math.inf)
    trials = 0

    def heard(event: Event) -> None:
        nonlocal trials
        if not isinstance(event, TrialDone):
            return
        trials += 1
        if event.best is None:
            return
        off = (recording.trials[event.best].time_us or math.inf) / best_us - 1
        for level in LEVELS:
            if off <= level:
                reached[level] = min(reached[level], clock.now)
        if not job.noise and max(reached.values()) < math.inf:
            stop.request()  # what comes later says no more

    study = dataclasses.replace(
        study_of(recording, PROFILES["full"], job.seed),
        trials=10**6,
        seconds=job.seconds,
        stop_early=job.noise > 0,
        sampler=job.sampler,
    )
    began = time.process_time()
    how = Disturbance(noise=job.noise, seed=job.seed)
    ended = replay(recording, study, disturbance=how, listener=Tee(heard), clock=clock, stop=stop)
    spent_s = time.process_time() - began
    return {
        "reached": reached,
        "gap": math.inf if ended.gap is None else ended.gap,
        "winner_us": ended.winner_us,
        "default_us": ended.default_us,
        "charged_s": ended.charged_s,
        "trials": trials,
        "builds": ended.result.builds,
        "ms_per_trial": 1e3 * spent_s / max(trials, 1),
    }


def _name(path: Path) -> str:
    return path.name.partition(".")[0]


def row_of(path: Path, sampler: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"recording": _name(path), "sampler": sampler, "seeds": len(runs)}
    for level in LEVELS:
        row[f"s_to_{level:.0%}"] = round(median(one["reached"][level] for one in runs), 2)
    for name in ("trials", "builds", "ms_per_trial"):
        row[name] = round(median(one[name] for one in runs), 4)
    return row


def noisy_of(path: Path, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """How winners of tunes with noise agree: the worst of all groups of TUNES, and against the default."""
    winners = [one["winner_us"] or math.inf for one in runs]
    groups = [winners[at : at + TUNES] for at in range(0, len(winners) - TUNES + 1, TUNES)]
    return {
        "recording": _name(path),
        "noise": NOISE,
        "tunes": len(runs),
        "spread": round(max(max(group) / min(group) - 1 for group in groups), 4),
        "worst_gap": round(max(one["gap"] for one in runs), 4),
        "worst_against_default": round(
            max((one["winner_us"] or math.inf) / (one["default_us"] or math.inf) - 1 for one in runs), 4
        ),
        "charged_s": round(median(one["charged_s"] for one in runs), 1),
        "trials": median(one["trials"] for one in runs),
    }


def ratio(rows: list[dict[str, Any]], name: str, level: str, seconds: float) -> float:
    """Seconds of `model` over those of tpe; where tpe did not come so far, over `seconds`, which is too large a ratio."""
    found = {row["sampler"]: row[level] for row in rows if row["recording"] == name}
    return float(found["model"] / min(found["tpe"], seconds))


def promises(times: list[dict[str, Any]], noisy: list[dict[str, Any]]) -> list[tuple[bool, str]]:
    """Each promise, and whether it is kept."""
    found = []
    for one in times:
        found.append(
            (
                one["1%"] <= MOST_OF_TPE,
                f"{one['recording']}: {one['1%']:.3f} of TPE's time to 1 %, asked {MOST_OF_TPE:.2f}",
            )
        )
    for one in noisy:
        what = f"{one['recording']}: winners of {TUNES} tunes with noise lie {one['spread']:.2%} apart"
        found.append((one["spread"] <= MOST_APART, f"{what}, asked {MOST_APART:.0%}"))
        what = f"{one['recording']}: against the default a winner is {one['worst_against_default']:+.1%} at worst"
        found.append((one["worst_against_default"] <= MOST_APART, f"{what}, asked {MOST_APART:.0%}"))
    return found


def keep(result: dict[str, Any], names: list[str], path: Path) -> None:
    """Write the results, beside those of recordings that were not run now."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    for table in ("rows", "time_of_model_over_tpe", "noisy"):
        others = [row for row in kept.get(table, []) if row["recording"] not in names]
        result[table] = sorted(others + result[table], key=lambda row: str(row["recording"]))
    path.write_text(json.dumps(result, indent=1).replace("Infinity", "null") + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--output", type=Path, help="write there [default of a whole run: bench/results/search_time.json]"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="charged seconds of one tune")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=None, help="names of recordings")
    parser.add_argument("--json", action="store_true")
    words = parser.parse_args()
    paths = sorted((BENCH / "recordings").glob("*.json.xz"))
    if words.only:
        paths = [path for path in paths if _name(path) in words.only]
    if not paths or words.seeds < TUNES:
        parser.error(f"there is no such recording, or fewer than {TUNES} seeds")
    seeds = range(words.first_seed, words.first_seed + words.seeds)
    limit = {path: min(words.seconds, SHORTER_S.get(_name(path), math.inf)) for path in paths}
    slow_first = sorted(SAMPLERS, key=lambda sampler: sampler != "tpe")  # so that no core idles at the end
    work = [
        Job(path, sampler, seed, limit[path], 0.0)
        for sampler in slow_first
        for path in paths
        for seed in seeds
    ]
    work += [Job(path, "model", seed, limit[path], NOISE) for path in paths for seed in seeds]
    done = []
    with multiprocessing.get_context("spawn").Pool(words.jobs) as pool:
        for one in pool.imap(run, work, chunksize=1):
            done.append(one)
            if sys.stderr.isatty():
                print(f"\r{len(done)} of {len(work)} tunes", end="", file=sys.stderr, flush=True)
    found = dict(zip(work, done, strict=True))
    rows = [
        row_of(
            path,
            sampler,
            [r for job, r in found.items() if (job.path, job.sampler, job.noise) == (path, sampler, 0.0)],
        )
        for path in paths
        for sampler in SAMPLERS
    ]
    noisy = [
        noisy_of(path, [r for job, r in found.items() if job.path == path and job.noise]) for path in paths
    ]
    names = [_name(path) for path in paths]
    times = [
        {
            "recording": name,
            **{
                f"{level:.0%}": round(ratio(rows, name, f"s_to_{level:.0%}", limit[path]), 3)
                for level in LEVELS
            },
        }
        for path, name in zip(paths, names, strict=True)
    ]
    result = {
        "command": "python bench/search_time.py " + " ".join(sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "rows": rows,
        "time_of_model_over_tpe": times,
        "noisy": noisy,
    }
    if words.json:
        print(json.dumps(result))
    else:
        for table in (rows, times, noisy):
            print("  ".join(f"{key:>12}" for key in table[0]))
            for row in table:
                print("  ".join(f"{value!s:>12}" for value in row.values()))
            print()
    told = promises(times, noisy)
    for kept, what in told:
        print(f"{'kept' if kept else 'NOT KEPT':8}  {what}", file=sys.stderr if words.json else sys.stdout)
    whole = words.seeds >= SEEDS and not words.first_seed
    output = words.output or (BENCH / "results" / "search_time.json" if whole else None)
    if output is None:
        print("Not a whole run, so nothing is written; --output FILE keeps it.", file=sys.stderr)
    else:
        keep(result, names, output)
    return 0 if all(kept for kept, _ in told) else 1


if __name__ == "__main__":
    sys.exit(main())
