"""Runs a toy study as a process of its own, so that it can be killed: `python toy_driver.py DATABASE CACHE WITNESS
[BACKEND]`. With the backend cuda the driver decides while its ranks measure.

Each trial that ended is appended to the witness file after its row was committed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from tktune.build.cache import ArtifactCache
from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.search.driver import tune
from tktune.search.events import Event, FinalistRound, Resumed, Tee, TrialDone
from tktune.search.study import Study

TRIALS = 60
PROBLEM = Problem("toy_family:FAMILY", hidden=64, cols=64, experts=4, top_k=2, tokens=16, world=2)
DEVICE = DeviceClass("cpu", "toy", 4, 1 << 20, 1 << 20, "shm")


def on(backend: str) -> DeviceClass:
    return dataclasses.replace(DEVICE, backend=backend)


def main(url: str, cache: str, witness: str, backend: str = "cpu") -> None:
    def on_event(event: Event) -> None:
        print(type(event).__name__, flush=True)
        if isinstance(event, TrialDone | FinalistRound | Resumed):
            with Path(witness).open("a") as file:
                said = {"event": type(event).__name__}
                if isinstance(event, TrialDone):
                    said |= {"config": event.config.json, "status": event.status}
                file.write(json.dumps(said) + "\n")

    study = Study("toy", PROBLEM.family, "cpu", (PROBLEM,), TRIALS, 600.0, 0, 2)
    (result,) = tune(study, url, ArtifactCache(Path(cache)), listener=Tee(on_event), device=on(backend))
    print(json.dumps({"winner": result.winner and result.winner.json, "measured": result.measured}))


if __name__ == "__main__":
    main(*sys.argv[1:])
