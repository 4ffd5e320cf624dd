"""A gang's life: it starts light, keeps to itself, is renewed, leaves no process behind, and is stopped cleanly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from gang_cases import GENEROUS, eventually, gone

from tktune.core.config import Config
from tktune.core.errors import GangError, WordsError
from tktune.core.policy import Policy
from tktune.gang.gang import Gang
from tktune.gang.limits import RENEW_AFTER_LOADS, Deadlines, renewal

HEALTHY = Config(FAULT="none")

DRIVER = """
import sys
from gang_cases import faulty_problem, toy_device
from tktune.core.config import Config
from tktune.core.policy import Policy
from tktune.gang.gang import Gang

fault = sys.argv[1]
gang = Gang(faulty_problem(), toy_device(), Policy())
gang.start()
print(*gang.pids, flush=True)
if fault == "idle":
    sys.stdin.read()
gang.load("/nowhere", "sha", Config(FAULT=fault, AT="load", RANK=1))
"""


@pytest.mark.parametrize("doing", ["idle", "hang", "stuck", "sigstop"])
def test_no_rank_outlives_a_driver_that_is_killed(doing: str) -> None:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), *(entry for entry in sys.path if entry)])
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, doing],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert driver.stdout is not None
    pids = [int(pid) for pid in driver.stdout.readline().split()]
    assert len(pids) == 2
    if doing == "sigstop":
        stat = Path(f"/proc/{pids[1]}/stat")
        assert eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    driver.kill()
    driver.communicate()
    assert eventually(lambda: all(map(gone, pids))), f"ranks {pids} outlived their driver"


def test_a_rank_whose_parent_is_already_gone_leaves_at_once() -> None:
    rank = subprocess.run(
        [sys.executable, "-m", "tktune.gang.rank", "1", "0"], stdin=subprocess.DEVNULL, timeout=60
    )
    assert rank.returncode == 1


def test_ranks_leave_by_themselves_at_end_of_file(make_gang: Callable[..., Gang]) -> None:
    gang = make_gang()
    gang.start()
    processes = list(gang._ranks)
    gang.close()
    assert [process.end() for process in processes] == ["exit code 0", "exit code 0"]
    assert gang.pids == []
    assert not gang.alive


def test_closing_a_gang_kills_a_rank_that_does_not_leave(make_gang: Callable[..., Gang]) -> None:
    gang = make_gang(deadlines=Deadlines(grace_s=0.1))
    gang.start()
    pids = gang.pids
    os.kill(pids[0], signal.SIGSTOP)
    gang.close()
    assert all(map(gone, pids))


def test_ranks_import_neither_torch_nor_the_store(make_gang: Callable[..., Gang]) -> None:
    gang = make_gang()
    gang.start()
    imported = [body["imported"] for body in gang.report().bodies]
    assert imported == [["numpy"], ["numpy"]]


def test_the_driver_needs_neither_numpy_nor_torch() -> None:
    code = (
        "import sys, tktune.gang.gang, tktune.gang.trial, tktune.gang.noise;"
        "sys.exit(any(m in sys.modules for m in ('numpy', 'torch', 'sqlalchemy', 'optuna')))"
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    assert (
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}).returncode == 0
    )


def test_ranks_ignore_an_interrupt_and_share_no_group(make_gang: Callable[..., Gang]) -> None:
    gang = make_gang()
    gang.load("/nowhere", "sha", HEALTHY)
    for pid in gang.pids:
        assert os.getpgid(pid) == pid
        os.kill(pid, signal.SIGINT)
    assert gang.time(HEALTHY, "fused", 0, 3).ok


def test_an_interrupted_driver_kills_its_gang_and_can_go_on(make_gang: Callable[..., Gang]) -> None:
    gang = make_gang()
    gang.start()
    before = gang.pids
    with pytest.raises(KeyboardInterrupt):
        gang.load("/nowhere", "sha", Config(FAULT="interrupt", AT="load", RANK=0))
    assert all(map(gone, before))
    assert gang.load("/nowhere", "sha", HEALTHY).ok


def test_score_is_the_slowest_rank_of_each_iteration(make_gang: Callable[..., Gang]) -> None:
    gang = make_gang(world=3)
    config = Config(US=1000)
    gang.load("/nowhere", "sha", config)
    outcome = gang.time(config, "fused", 0, 4)
    assert [body["us"][0] for body in outcome.bodies] == [1000.0, 1010.0, 1020.0]
    assert outcome.worst_us == [1020.0, 1021.0, 1020.0, 1021.0]


def test_a_loaded_artifact_is_not_loaded_again_and_several_stay_ready(
    make_gang: Callable[..., Gang],
) -> None:
    gang = make_gang()
    one, other = Config(SMEM=64), Config(SMEM=64, STAGES=2)
    assert gang.load("/one", "sha1", one).bodies[0]["facts"] == {"smem_bytes": 64, "loads": 1, "path": "/one"}
    assert gang.load("/one", "sha1", one).bodies[0]["facts"]["loads"] == 1, "no command was sent"
    assert gang.load("/other", "sha2", other).bodies[0]["facts"]["loads"] == 2
    assert gang.load("/one", "sha1", one).bodies[0]["facts"]["loads"] == 3, "the workbench switches"
    assert gang.loads == 2, "and a switch is no load"


def test_a_gang_is_renewed_after_its_loads(make_gang: Callable[..., Gang]) -> None:
    gang = make_gang(renew_after=2)
    pids = []
    for number in range(4):
        assert gang.load(f"/{number}", f"sha{number}", HEALTHY).ok
        pids.append(gang.pids)
    assert pids[0] == pids[1] != pids[2] == pids[3]
    assert (gang.renewals, gang.respawns, gang.loads) == (1, 0, 2)
    assert gang.time(HEALTHY, "fused", 0, 2).ok


def test_an_artifact_that_belies_its_formula_says_so_and_is_loaded(make_gang: Callable[..., Gang]) -> None:
    outcome = make_gang().load("/nowhere", "sha", Config(SMEM=96))
    assert outcome.ok
    assert outcome.sentence.startswith("The artifact's smem_bytes is 96 and the formula says 64: correct")


def test_a_gang_with_nothing_loaded_refuses_to_launch(make_gang: Callable[..., Gang]) -> None:
    gang = make_gang()
    with pytest.raises(GangError, match="No artifact is loaded"):
        gang.gate(HEALTHY, "uniform", 0)
    assert gang.load("/nowhere", "sha", Config(FAULT="exit", AT="load", RANK=0)).status == "crashed"
    with pytest.raises(GangError, match="No artifact is loaded"):
        gang.time(HEALTHY, "fused", 0, 1)


def test_sequence_numbers_of_commands_never_overlap(make_gang: Callable[..., Gang]) -> None:
    gang = make_gang()
    gang.load("/nowhere", "sha", HEALTHY)
    for _ in range(3):
        assert gang.time(HEALTHY, "fused", 0, 50).ok
        assert gang.gate(HEALTHY, "uniform", 0).ok


def test_two_gangs_side_by_side_do_not_disturb_each_other(make_gang: Callable[..., Gang]) -> None:
    steady, failing = make_gang(), make_gang()
    steady.load("/nowhere", "sha", HEALTHY)
    pids = steady.pids
    ends: list[str] = []

    def fail() -> None:
        for fault in ("raise", "exit", "sigkill"):
            ends.append(failing.load("/nowhere", fault, Config(FAULT=fault, AT="load", RANK=1)).status)
        failing.close()

    thread = threading.Thread(target=fail)
    thread.start()
    rounds = 0
    while thread.is_alive() or rounds < 3:
        assert steady.time(HEALTHY, "fused", 0, 3).ok
        rounds += 1
    thread.join()
    assert ends == ["fault:RuntimeError", "crashed", "crashed"]
    assert steady.pids == pids
    assert (steady.respawns, failing.respawns) == (0, 1)


def test_words_that_cannot_be_meant_are_refused() -> None:
    from gang_cases import faulty_problem, toy_device

    with pytest.raises(GangError, match="spin limit"):
        Gang(faulty_problem(), toy_device(), Policy(), spin_limit_s=5.0, deadlines=Deadlines(gate_s=4.0))
    with pytest.raises(WordsError, match="There is no family"):
        Gang(faulty_problem().replace(family="nothing"), toy_device(), Policy(), deadlines=GENEROUS)


def test_a_gang_turns_to_another_problem_with_the_same_ranks(make_gang: Callable[..., Gang]) -> None:
    gang, doing = make_gang(), []
    gang.load("/nowhere", "sha", Config())
    assert gang.gate(Config(), "uniform", 0).ok
    pids, problem = gang.pids, gang.problem.replace(tokens=16)
    gang.watcher = doing.append
    gang.turn_to(problem)
    assert doing == ["leave", "", "prepare", ""]
    assert gang.pids == pids and gang.problem == problem and gang.loaded is None
    loaded = gang.load("/nowhere", "sha", Config())
    assert loaded.ok and {body["facts"]["loads"] for body in loaded.bodies} == {1}  # a workbench of its own
    assert gang.gate(Config(), "uniform", 0).ok and gang.time(Config(US=5), "fused", 0, 3).worst_us
    assert gang.respawns == gang.renewals == 0


def test_ranks_that_cannot_leave_their_seats_are_replaced(make_gang: Callable[..., Gang]) -> None:
    gang = make_gang(ranks_env={"FAULTY_CLOSE_RANK": "1"})
    gang.start()
    pids = gang.pids
    gang.turn_to(gang.problem.replace(tokens=16))
    assert gang.alive and not set(pids) & set(gang.pids)
    assert gang.load("/nowhere", "sha", Config()).ok


def test_a_gang_without_ranks_turns_without_starting_any_and_not_to_a_stranger(
    make_gang: Callable[..., Gang],
) -> None:
    gang = make_gang()
    problem = gang.problem.replace(tokens=16)
    gang.turn_to(problem)
    assert not gang.pids and gang.problem == problem
    with pytest.raises(ValueError, match="cannot turn"):
        gang.turn_to(problem.replace(world=4))


def test_ranks_with_a_gpu_are_renewed_later(make_gang: Callable[..., Gang]) -> None:
    cpu, gpu = make_gang(), make_gang(backend="cuda")
    assert renewal(gpu.device) > renewal(cpu.device) == RENEW_AFTER_LOADS
