"""A database as a finished run leaves it, filled through the store alone: nothing is built or launched."""

from __future__ import annotations

from tktune.core.config import Config
from tktune.core.device import device_class
from tktune.core.problem import Problem
from tktune.search.study import load_study
from tktune.store.results import Store
from tktune.store.rows import AttributionRow, TrialKey, VerificationRow

DIGEST = "ab" * 32


def quickstart_problem() -> Problem:
    return load_study("quickstart").problems[0]


def fill(url: str, problem: Problem | None = None) -> Problem:
    """Trials of every kind, one verification and one attribution of one problem (quickstart's by default)."""
    study = load_study("quickstart")
    device = device_class("cpu")
    problem = problem or study.problems[0]
    space = study.space(problem, device)
    default = space.default_config()
    near = [c for c in space.feasible if c.only(space.build_names) == default.only(space.build_names)]
    others = [c for c in near if c != default][:8]
    with Store.open(url) as store:
        toolchain = store.toolchain_id("g++", "g++ 12.2.0", "cd" * 32, {"flags": ["-march=x86-64-v3"]})
        key = store.key(problem, device, study.policy(device), toolchain)
        store.artifact_id(
            DIGEST,
            "shared",
            problem.family,
            space.build_part(default),
            {"smem_bytes": 4096},
            9000,
            1.5,
            toolchain,
            DIGEST,
        )
        _trial(store, key, default, "ok", 200.0)
        for index, config in enumerate(others[:5]):
            _trial(store, key, config, "ok", 100.0 + 10 * index)
        _trial(store, key, others[5], "censored", 400.0)
        _trial(store, key, others[6], "timeout:time", None)
        store.record_trial(
            key, others[7], DIGEST, "refused:D1", run_id="run-1", detail={"sentence": "No seat is left."}
        )
        _verify(store, key, default, others[0])
    return problem


def _trial(store: Store, key: TrialKey, config: Config, status: str, time_us: float | None) -> None:
    trial = store.start_trial(key, config, DIGEST, "run-1")
    samples = None if time_us is None else [(0, i, 0, time_us + i) for i in range(5)]
    store.finish_trial(trial, status, time_us=time_us, samples=samples, gate_error=1e-3, build_us=1e6)


def _verify(store: Store, key: TrialKey, default: Config, winner: Config) -> None:
    store.add_verification(
        key,
        "session-1",
        [
            VerificationRow(
                winner, DIGEST, "finalist", 100.0, (99.0, 100.0, 101.0), True, "faster in 3 of 3 rounds"
            ),
            VerificationRow(default, DIGEST, "default", 200.0, (199.0, 200.0, 201.0), False, "+100.0%"),
        ],
    )
    store.event(
        "verified",
        "faster",
        {
            "session_id": "session-1",
            "problem": store.key_facts(key).problem.digest,
            "band": 0.02,
            "noise": 0.02,
        },
    )
    split = winner.number("num_comm_sms")
    times = {"fused": 100.0, "comp": 80.0, "serial": 140.0, "peer": 70.0}
    rows = [AttributionRow(winner, DIGEST, mode, split, us, (us,)) for mode, us in times.items()]
    rows += [AttributionRow(winner, DIGEST, "comm", split + i, 60.0 - 10 * i, (60.0,)) for i in range(2)]
    store.add_attribution(key, "session-1", rows)
