"""How much of the wall time of `tktune run` ranks gate or time, without a GPU: the real driver, sampler, store and gang over
the whole sm_90a space of dispatch_gemm, with ranks and compilers that sleep.

    python bench/driver_time.py [--problems D B] [--seconds 30] [--naps 5500,2500,20,1.25,0.5] [--out FILE]

Exits 1 when ranks gate or time for less than `--least` of the time in which no build was waited for. Shares hang on how busy
the cores are; CPU milliseconds of the driver a config do so less: of its own thread, and of the whole process.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import sleeping_family

from tktune.build.artifact import Artifact, BuildOutcome
from tktune.build.cache import ArtifactCache
from tktune.cli.run import one_thread_a_library
from tktune.core.build_spec import BuildSpec
from tktune.core.device import device_class
from tktune.report.usage import run_time, usage_text
from tktune.search.building import Builder
from tktune.search.driver import tune
from tktune.search.events import Event, Finished, Note, Tee, TrialDone
from tktune.search.results import Rooms
from tktune.search.study import load_study
from tktune.store.results import Store

STUDY = Path(__file__).parent.parent / "studies" / "h200" / "dispatch_gemm.toml"
NAMES = "ABCD"


class SleepingCache(ArtifactCache):
    """The real cache, whose compilers sleep: `jobs` of them at once, `build_s` each."""

    def __init__(self, root: Path, jobs: int, build_s: float) -> None:
        super().__init__(root)
        self._compilers = ThreadPoolExecutor(jobs)
        self._build_s = build_s
        self._made: dict[str, Artifact] = {}

    def digest(self, spec: BuildSpec) -> str:
        """As cheap as it is once sources were read, and the same when they are edited meanwhile."""
        return hashlib.sha256(repr((spec.name, sorted(spec.defines.items()))).encode()).hexdigest()

    def holds(self, digest: str) -> bool:
        return digest in self._made

    def build(  # type: ignore[override]
        self,
        specs: Sequence[BuildSpec],
        jobs: int | None = None,
        on_done: Callable[[BuildOutcome], None] | None = None,
        cancel: threading.Event | None = None,
    ) -> list[BuildOutcome]:
        def one(spec: BuildSpec) -> BuildOutcome:
            outcome = self._one(spec, cancel or threading.Event())
            if on_done is not None:
                on_done(outcome)
            return outcome

        return list(self._compilers.map(one, specs))

    def _one(self, spec: BuildSpec, cancel: threading.Event) -> BuildOutcome:
        name = self.digest(spec)
        made = self._made.get(name)
        if made is not None:
            return BuildOutcome(spec, name, made, cached=True)
        began = time.monotonic()
        if cancel.wait(self._build_s):
            return BuildOutcome(spec, name, None, cancelled=True)
        sha256 = hashlib.sha256(name.encode()).hexdigest()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())
        made = Artifact(name, self.root / name, sha256, 1, {}, "sleeping", stamp, time.monotonic() - began)
        self._made[name] = made
        return BuildOutcome(spec, name, made, made.seconds)


def main() -> int:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--problems", nargs="+", default=["D", "B"], choices=list(NAMES))
    words.add_argument("--seconds", type=float, default=30.0, help="of each problem")
    words.add_argument(
        "--naps", default=sleeping_family.DEFAULT_NAPS, help="milliseconds: process,seat,load,gate,launch"
    )
    words.add_argument("--jobs", type=int, default=16)
    words.add_argument("--build-s", type=float, default=3.0)
    words.add_argument("--least", type=float, default=0.6)
    words.add_argument("--out", type=Path)
    words.add_argument(
        "--folder", type=Path, help="where database and cache go [default: a temporary folder]"
    )
    asked = words.parse_args()
    one_thread_a_library()
    os.environ["NAPS"] = asked.naps
    study = load_study(str(STUDY))
    chosen = [
        study.problems[NAMES.index(name)].replace(family="sleeping_family:FAMILY") for name in asked.problems
    ]
    study = dataclasses.replace(
        study,
        name="driver-time",
        family="sleeping_family:FAMILY",
        problems=tuple(chosen),
        seconds=asked.seconds,
        stop_early=False,
    )
    device = device_class("sm_90a")
    began = time.monotonic()
    said: list[str] = []

    def heard(event: Event) -> None:
        at = time.monotonic() - began
        if isinstance(event, Finished | Note):
            said.append(f"{at:7.2f} {event.reason if isinstance(event, Finished) else event.sentence}")
        elif isinstance(event, TrialDone) and event.number == 1:
            said.append(f"{at:7.2f} the first trial ended")

    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        url = f"sqlite:///{folder / 'tktune.db'}"
        cache = SleepingCache(folder / "cache", asked.jobs, asked.build_s)
        rooms = Rooms(make_builder=_builder(asked.jobs), seats=lambda problem, device: [(0, 1)])
        cpu_s, thread_s = time.process_time(), time.thread_time()
        results = tune(study, url, cache, listener=Tee(heard), rooms=rooms, device=device)
        wall_s = time.monotonic() - began
        cpu_s, thread_s = time.process_time() - cpu_s, time.thread_time() - thread_s
        with Store.open(url, mode="ro") as store:
            runs = []
            keys = store.keys()
            for key in keys:
                trials = store.trials(key)
                found = run_time(store, key, store.key_facts(key).problem, trials)
                if found is not None:
                    runs.append(found)
    print("\n".join(said))
    for result in results:
        print(f"{result.problem}: {result.measured} configs, {result.builds} builds, winner {result.time_us}")
    print(usage_text(runs))
    busy = sum(run.busy_s / run.gangs for run in runs)
    waited = sum(run.waiting_s / run.gangs for run in runs)
    share = busy / (wall_s - waited)
    print(
        f"wall {wall_s:.1f} s, busy {busy:.1f} s, waiting for builds {waited:.1f} s: {share:.1%} of the rest"
    )
    measured = sum(result.measured for result in results)
    each = {"thread": 1e3 * thread_s / max(1, measured), "process": 1e3 * cpu_s / max(1, measured)}
    print(
        f"CPU of the driver a config: {each['thread']:.1f} ms its thread, {each['process']:.1f} ms the process"
    )
    facts: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "date": time.strftime("%Y-%m-%d"),
        "wall_s": wall_s,
        "busy_s": busy,
        "waiting_s": waited,
        "share": share,
        "driver_cpu_ms_a_config": each,
        "measured": [result.measured for result in results],
        "runs": [dataclasses.asdict(run) for run in runs],
    }
    if asked.out is not None:
        asked.out.write_text(json.dumps(facts, indent=1) + "\n")
    return 0 if share >= asked.least else 1


def _builder(jobs: int) -> Callable[..., Builder]:
    def make(*args: Any, **options: Any) -> Builder:
        builder = Builder(*args, **options)
        builder.jobs = jobs
        return builder

    return make


if __name__ == "__main__":
    sys.exit(main())
