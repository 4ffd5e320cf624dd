"""What the store's tests share: a problem, a device, configs, and ways to run code in a process that can die."""

from __future__ import annotations

import json
import os
import sqlite3
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.store.results import Store
from tktune.store.rows import TrialKey, VerificationRow

PROBLEM = Problem("dispatch_gemm", 256, 256, 8, 2, 128, world=2)
DEVICE = DeviceClass("cpu", "x86-64-v3.2c", 4, 262144, 33554432, "shm", display_name="a test machine")
POLICY = Policy(flush_bytes=1024)
ART = "a" * 64


def config(number: int) -> Config:
    return Config(ROW_BLOCK=16 * (1 + number % 4), STAGES=2 + number // 4, order="slot")


def toolchain(store: Store, name: str = "one") -> int:
    return store.toolchain_id("g++", f"g++ {name}", name.ljust(64, "0"), {"flags": ["-O3"]})


def open_key(
    store: Store,
    problem: Problem = PROBLEM,
    *,
    device: DeviceClass = DEVICE,
    policy: Policy = POLICY,
    built_by: str = "one",
) -> TrialKey:
    return store.key(problem, device, policy, toolchain(store, built_by))


def prove(store: Store, key: TrialKey, tried: Config, time_us: float = 100.0, artifact: str = ART) -> int:
    """One trial that ends ok, with three samples."""
    trial_id = store.start_trial(key, tried, artifact, "run")
    store.finish_trial(trial_id, "ok", time_us=time_us, samples=[time_us - 1, time_us, time_us + 1])
    return trial_id


def verify(
    store: Store,
    key: TrialKey,
    session: str,
    chosen: Config,
    time_us: float = 100.0,
    artifact: str = ART,
    others: tuple[Config, ...] = (),
) -> None:
    rows = [VerificationRow(chosen, artifact, "finalist", time_us, (time_us, time_us), True, "fastest")]
    rows += [
        VerificationRow(c, artifact, "default", time_us * 2, (time_us * 2,), False, "slower") for c in others
    ]
    store.add_verification(key, session, rows)


def win(
    store: Store,
    problem: Problem,
    chosen: Config,
    time_us: float = 100.0,
    *,
    session: str = "s1",
    device: DeviceClass = DEVICE,
    policy: Policy = POLICY,
    built_by: str = "one",
    artifact: str = ART,
) -> TrialKey:
    """A verified winner of `problem`."""
    key = open_key(store, problem, device=device, policy=policy, built_by=built_by)
    prove(store, key, chosen, time_us, artifact)
    verify(store, key, session, chosen, time_us, artifact)
    return key


def child(work: Callable[[Callable[[str], None]], None]) -> tuple[int, int]:
    """Fork a process that does `work(say)`; (pid, file descriptor from which what it says can be read)."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writable)
        return pid, readable
    code = 1
    try:
        os.close(readable)
        work(lambda line: os.write(writable, f"{line}\n".encode()) and None)
        code = 0
    finally:
        if code:
            traceback.print_exc()
        os._exit(code)


def heard(descriptor: int) -> list[str]:
    """Everything a child said until it ended."""
    with os.fdopen(descriptor) as stream:
        return stream.read().splitlines()


def ended_well(pid: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def as_nobody(question: Callable[[], Any]) -> Any:
    """The answer of `question`, asked by a user who may write nothing here."""

    def ask(say: Callable[[str], None]) -> None:
        if os.geteuid() == 0:
            os.setgid(65534)
            os.setuid(65534)
        say(json.dumps(question()))

    pid, descriptor = child(ask)
    lines = heard(descriptor)
    assert ended_well(pid)
    return json.loads(lines[-1])


def edit(path: Path, *statements: str) -> None:
    """Change a database behind the store's back, and leave no log beside it."""
    connection = sqlite3.connect(path, isolation_level=None)
    for statement in statements:
        connection.execute(statement)
    connection.close()
