"""Dispatches that go wrong on purpose: the gang dies, the status says who waited for what, the next trial works, and no
GPU stays busy, so nothing else may run on it meanwhile. Once with a kernel made for it, and once by SIGKILL to a gang that runs the real one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import bad_dispatch_family
import pytest
from bad_dispatch_family import misbehaving
from dispatch_pair import build_all, configured, dispatch_problem
from gpu_idle import loads, wait_idle
from gpu_places import kept_cache, needs_two

from tktune.build.artifact import Artifact
from tktune.core.config import Config
from tktune.core.device_cuda import cuda_device_classes
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.gang.gang import Gang

pytestmark = [pytest.mark.gpu, needs_two, pytest.mark.timeout(100)]

BAD = Problem("bad_dispatch_family:FAMILY", hidden=4096, cols=64, experts=2, top_k=1, tokens=256, world=2)
# Rows enough that a rank reads its peer's memory most of the time.
LONG = dispatch_problem(hidden=4096, cols=256, tokens=2048)
GOOD = misbehaving("good", 0)
LONG_READ = 60_000  # launches
SPIN_LIMIT_S = 1.0


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return kept_cache(tmp_path_factory.mktemp("bad"))


@pytest.fixture(scope="module")
def bad(cache) -> Artifact:
    spec = bad_dispatch_family.FAMILY.build_spec(Config(), BAD, cuda_device_classes()[0])
    (outcome,) = cache.build([spec])
    assert outcome.artifact is not None, outcome.error_sentence
    return outcome.artifact


@pytest.fixture(scope="module")
def real(cache):
    device = cuda_device_classes()[0]
    config = configured(LONG, device, DRAW="dispenser")
    ((artifact, part),) = build_all(cache, [(LONG, device, config)])
    return artifact, part, config


@pytest.fixture(scope="module")
def living(bad) -> Iterator[Gang]:
    """One gang for all tests of the made kernel: what one of them leaves behind is what the next one works with."""
    with Gang(BAD, cuda_device_classes()[0], Policy(), spin_limit_s=SPIN_LIMIT_S) as gang:
        yield gang


@pytest.fixture
def gang(bad, living) -> Iterator[Gang]:
    """A gang that just did a good trial. Afterwards a fresh one does, and no GPU is busier or fuller than before."""
    good_trial(living, bad)
    before, respawns = loads(), living.respawns
    yield living
    good_trial(living, bad)
    assert living.respawns == respawns + 1
    assert wait_idle(before) == ""


@pytest.fixture
def idle_after() -> Iterator[None]:
    before = loads()
    yield
    assert wait_idle(before) == ""


def good_trial(gang: Gang, artifact: Artifact) -> None:
    loaded = gang.load(artifact.path, artifact.sha256, Config())
    assert loaded.ok, loaded
    for seed in range(3):
        outcome = gang.gate(GOOD, "uniform", seed)
        assert outcome.ok, outcome


def gone(pids: list[int]) -> bool:
    """No such process, or nothing of it but its exit code."""

    def state(pid: int) -> str:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "X"

    return all(state(pid) in "XZ" for pid in pids)


# What ends a trial of the made kernel: its status, and what the sentence must say. Rank 1 is the bad one.
ENDS = {
    "silent": (
        "fault:spin_limit",
        r"Rank 0's communicate block 0 waited for signal\[10\] to reach \d+ and saw \d+\.",
    ),
    "stale": (
        "fault:spin_limit",
        r"Rank 0's communicate block 0 waited for signal\[10\] to reach (\d+) and saw (\d+)\.",
    ),
    "traps": ("fault:launch_failed", r"Rank 1's launch ended without a result while"),
    "wild": ("fault:", r"Rank 1's launch ended without a result while"),
    "exits_before": ("crashed", r"Rank 1 of 2 died while \w+.*: exit code 7"),
    "exits_meanwhile": ("crashed", r"Rank 1 of 2 died while \w+.*: exit code 7"),
    "raises": ("fault:ValueError", r"Rank 1 failed while .*this rank has no rows today"),
}


@pytest.mark.parametrize("what", ENDS)
def test_a_bad_rank_ends_the_gang_with_a_status_that_says_why(gang, what):
    ended, says = ENDS[what]
    pids, begin = gang.pids, time.monotonic()
    outcome = gang.gate(misbehaving(what, 1), "uniform", 2)
    took_s = time.monotonic() - begin
    print(f"\n{what}: {outcome.status} after {took_s:.1f} s: {outcome.sentence}", end="")
    assert outcome.status.startswith(ended), outcome
    found = re.search(says, outcome.sentence)
    assert found, outcome.sentence
    if what == "stale":
        assert int(found[1]) == int(found[2]) + 1
    assert took_s < 6.0  # the spin limit, a grace, and the kill; far from the deadline of the gate
    assert not outcome.gang_lives and gone(pids)


def test_each_rank_may_be_the_bad_one(gang):
    outcome = gang.gate(misbehaving("silent", 0), "uniform", 2)
    assert outcome.status == "fault:spin_limit"
    assert "Rank 1's communicate block 0 waited for signal[0]" in outcome.sentence, outcome.sentence


@pytest.mark.parametrize("killed", [[1], [0], [0, 1]], ids=["reader", "read", "both"])
def test_sigkill_while_a_rank_reads_its_peers_memory(gang, killed):
    """Rank 1 reads rank 0's memory all the time, and nothing else."""
    pids = gang.pids
    timer = kill_after(0.5, [pids[rank] for rank in killed])
    begin = time.monotonic()
    outcome = gang.gate(misbehaving("keeps_reading", 1), "uniform", 2)
    timer.join()
    assert time.monotonic() - begin < 6.0
    dead_as_told(outcome, killed)
    assert gone(pids)


@pytest.mark.parametrize("killed", [[1], [0, 1]], ids=["one", "both"])
def test_sigkill_of_a_gang_that_runs_the_fused_kernel(real, idle_after, killed):
    artifact, part, config = real
    with Gang(LONG, cuda_device_classes()[0], Policy(warmup=0)) as gang:
        assert gang.load(artifact.path, artifact.sha256, part).ok
        assert gang.gate(config, "uniform", 1).ok
        pids = gang.pids
        timer = kill_after(2.5, [pids[rank] for rank in killed])
        outcome = gang.time(config, "comm", 0, LONG_READ)
        timer.join()
        dead_as_told(outcome, killed)
        assert gone(pids)
        assert gang.load(artifact.path, artifact.sha256, part).ok
        assert gang.gate(config, "uniform", 2).ok


def kill_after(seconds: float, pids: list[int]) -> threading.Timer:
    def kill() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    timer = threading.Timer(seconds, kill)
    timer.start()
    return timer


def dead_as_told(outcome, killed):
    print(f"\n{outcome.status}: {outcome.sentence}", end="")
    assert outcome.status == "crashed", outcome
    for rank in killed:
        assert re.search(rf"Rank {rank} of 2 died while .*killed by SIGKILL", outcome.sentence), (
            outcome.sentence
        )
    assert not outcome.gang_lives


DRIVER = """
import json, sys
from pathlib import Path
from tktune.core.config import Config
from tktune.core.device_cuda import cuda_device_classes
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.gang.gang import Gang

words = json.loads(sys.argv[1])
with Gang(Problem(**words["problem"]), cuda_device_classes()[0], Policy(), spin_limit_s=20.0) as gang:
    assert gang.load(words["artifact"], words["sha256"], Config()).ok
    print(json.dumps(gang.pids), flush=True)
    gang.gate(Config(words["config"]), "uniform", 2)
"""


def test_ranks_and_their_kernels_end_when_the_driver_is_killed(bad, idle_after):
    words = {
        "problem": BAD.key,
        "artifact": str(bad.path),
        "sha256": bad.sha256,
        "config": dict(misbehaving("keeps_reading", 1)),
    }
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, json.dumps(words)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert driver.stdout is not None
    pids = json.loads(driver.stdout.readline())
    time.sleep(1.5)  # the ranks read now
    driver.kill()
    driver.wait(10)
    end = time.monotonic() + 10.0
    while not gone(pids):
        assert time.monotonic() < end, f"the ranks {pids} live on"
        time.sleep(0.05)
