"""Every way a rank can misbehave, in every command: one status, one sentence, and a gang that works afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
from gang_cases import GENEROUS, gone

from tktune.core.config import Config
from tktune.core.errors import GangError
from tktune.core.status import checked
from tktune.gang.gang import Gang, Outcome
from tktune.gang.limits import Deadlines

TIGHT = Deadlines(load_s=0.6, gate_s=1.0, time_s=1.0, iteration_s=0.0, grace_s=0.2)
HEALTHY = Config(FAULT="none")
COMMANDS = ("load", "gate", "time")


def until(gang: Gang, config: Config, command: str) -> Outcome:
    """Load, then run `command`; the first outcome that is not ok, or the last."""
    outcome = gang.load("/nowhere", config.digest, config)
    if outcome.ok and command == "gate":
        return gang.gate(config, "uniform", 0)
    if outcome.ok and command == "time":
        return gang.time(config, "fused", 0, 4)
    return outcome


def assert_next_trial_works(gang: Gang) -> None:
    gang.deadlines = GENEROUS
    gated = until(gang, HEALTHY, "gate")
    assert gated.ok, gated.sentence
    outcome = gang.time(HEALTHY, "fused", 0, 4)
    assert outcome.ok, outcome.sentence
    assert len(outcome.worst_us) == 4
    assert gang.alive


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("fault", "said"),
    [("sigkill", "killed by SIGKILL"), ("exit", "exit code 3"), ("segv", "killed by SIGSEGV")],
)
def test_a_gang_survives_a_rank_that_dies(
    make_gang: Callable[..., Gang], command: str, fault: str, said: str
) -> None:
    gang = make_gang()
    gang.start()
    before = gang.pids
    outcome = until(gang, Config(FAULT=fault, AT=command, RANK=1), command)
    doing = {"load": "loading", "gate": "gating", "time": "timing"}[command]
    assert outcome.status == "crashed"
    assert f"Rank 1 of 2 died while {doing}: {said}" in outcome.sentence
    assert "quarantine" in outcome.sentence
    assert not outcome.gang_lives
    assert gang.loaded is None
    assert all(map(gone, before)), "the whole gang dies together"
    assert_next_trial_works(gang)
    assert gang.respawns == 1
    assert not set(before) & set(gang.pids)


def test_the_sentence_ends_with_what_the_dead_rank_wrote_in_this_command_only(
    make_gang: Callable[..., Gang],
) -> None:
    gang = make_gang()
    assert until(gang, Config(FAULT="raise", AT="gate", RANK=1), "gate").status == "fault:RuntimeError"
    outcome = until(gang, Config(FAULT="exit", AT="load", RANK=1), "load")
    assert "(its log ends: leaving now)" in outcome.sentence


def test_a_segmentation_fault_names_its_place(make_gang: Callable[..., Gang]) -> None:
    outcome = until(make_gang(), Config(FAULT="segv", AT="time", RANK=0), "time")
    assert "Fatal Python error: Segmentation fault" in outcome.sentence
    assert "faulty_family.py" in outcome.sentence


@pytest.mark.parametrize("fault", ["hang", "stuck", "sigstop"])
def test_a_rank_that_is_late_to_load_is_a_timeout(make_gang: Callable[..., Gang], fault: str) -> None:
    gang = make_gang(spin_limit_s=0.3, deadlines=replace(TIGHT, load_s=GENEROUS.load_s))
    gang.start()
    before = gang.pids
    gang.deadlines = replace(TIGHT, grace_s=20.0 if fault == "hang" else 0.2)
    outcome = until(gang, Config(FAULT=fault, AT="load", RANK=1), "load")
    assert outcome.status == "timeout:load"
    assert "ank 1" in outcome.sentence
    assert "still loading after 0.6 s" in outcome.sentence
    assert ("stopped by a signal" in outcome.sentence) == (fault == "sigstop")
    assert outcome.gang_lives == (fault == "hang"), "only a rank that honours the abort word lives on"
    if fault != "hang":
        assert all(map(gone, before))
    gang.spin_limit_s = 20.0
    assert_next_trial_works(gang)


@pytest.mark.parametrize("command", ["gate", "time"])
@pytest.mark.parametrize("fault", ["stuck", "sigstop"])
def test_a_rank_that_ignores_the_abort_word_is_a_timeout_and_is_killed(
    make_gang: Callable[..., Gang], command: str, fault: str
) -> None:
    gang = make_gang(spin_limit_s=0.6, deadlines=replace(GENEROUS, grace_s=0.2))
    gang.start()
    before = gang.pids
    outcome = until(gang, Config(FAULT=fault, AT=command, RANK=1), command)
    assert outcome.status == f"timeout:{command}"
    assert "Rank 1" in outcome.sentence
    assert ("stopped by a signal" in outcome.sentence) == (fault == "sigstop")
    assert "Rank 0's comp block 0 waited for barrier[1] to reach" in outcome.sentence
    assert all(map(gone, before))
    gang.spin_limit_s = 20.0
    assert_next_trial_works(gang)
    assert gang.respawns == 1


@pytest.mark.parametrize("command", ["gate", "time"])
def test_a_rank_that_hangs_runs_its_peer_into_the_spin_limit_and_the_gang_lives_on(
    make_gang: Callable[..., Gang], command: str
) -> None:
    gang = make_gang(spin_limit_s=1.0)
    gang.start()
    before = gang.pids
    outcome = until(gang, Config(FAULT="hang", AT=command, RANK=1), command)
    assert outcome.status == "fault:spin_limit"
    assert "Rank 0's comp block 0 waited for barrier[1] to reach" in outcome.sentence
    assert "Waits are bounded by 1 s." in outcome.sentence
    assert outcome.gang_lives
    assert gang.survived == 1
    assert_next_trial_works(gang)
    assert gang.pids == before


@pytest.mark.parametrize("command", ["gate", "time"])
def test_a_gang_that_hangs_as_a_whole_meets_the_deadline(
    make_gang: Callable[..., Gang], command: str
) -> None:
    gang = make_gang(spin_limit_s=0.3)
    config = Config(FAULT="hang", AT=command, RANK=-1)
    assert gang.load("/nowhere", config.digest, config).ok
    gang.deadlines = TIGHT
    gang.spin_limit_s = 20.0  # of this gang's driver only: ranks come back when told, however long it takes
    outcome = gang.gate(config, "uniform", 0) if command == "gate" else gang.time(config, "fused", 0, 4)
    assert outcome.status == f"timeout:{command}"
    assert (
        f"Rank 0 and rank 1 were still {'gating' if command == 'gate' else 'timing'} after 1 s"
        in outcome.sentence
    )
    assert outcome.gang_lives


@pytest.mark.parametrize("command", COMMANDS)
def test_a_rank_that_raises_is_a_fault_by_name_and_its_peer_is_called_back(
    make_gang: Callable[..., Gang], command: str
) -> None:
    gang = make_gang()  # with its spin limit of 20 s a peer that is not called back would show in the time
    gang.start()
    before = gang.pids
    outcome = until(gang, Config(FAULT="raise", AT=command, RANK=1), command)
    assert outcome.status == "fault:RuntimeError"
    assert "RuntimeError: the faulty family was asked to raise (faulty_family.py:" in outcome.sentence
    assert gang.pids == before
    assert_next_trial_works(gang)


@pytest.mark.parametrize("fault", ["raise", "hang"])
def test_on_a_gpu_only_aborted_launches_leave_the_gang_alive(
    make_gang: Callable[..., Gang], fault: str
) -> None:
    gang = make_gang(backend="cuda")
    config = Config(FAULT=fault, AT="time", RANK=-1)
    assert until(gang, config, "gate").ok
    gang.deadlines = replace(GENEROUS, time_s=0.3, iteration_s=0.0)
    outcome = gang.time(config, "fused", 0, 4)
    assert outcome.status == {"raise": "fault:RuntimeError", "hang": "timeout:time"}[fault]
    assert outcome.gang_lives == (fault == "hang")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_named_rule_that_a_rank_refuses_is_a_refusal(make_gang: Callable[..., Gang], command: str) -> None:
    outcome = until(make_gang(), Config(FAULT="refuse", AT=command, RANK=0), command)
    assert outcome.status == "refused:D1"
    assert "4 blocks wait and 4 can be resident." in outcome.sentence


@pytest.mark.parametrize(("fault", "how"), [("nan", "is not a number"), ("wrong_rows", "differs by")])
def test_a_wrong_output_on_one_rank_is_wrong(make_gang: Callable[..., Gang], fault: str, how: str) -> None:
    gang = make_gang()
    outcome = until(gang, Config(FAULT=fault, AT="gate", RANK=1), "gate")
    assert outcome.status == "wrong"
    assert f"Rank 1's output under the routing uniform {how}" in outcome.sentence
    assert "Row" in outcome.sentence
    assert [body["passed"] for body in outcome.bodies] == [True, False]
    assert_next_trial_works(gang)
    assert gang.respawns == 0


def test_times_that_are_no_times_are_a_fault(make_gang: Callable[..., Gang]) -> None:
    assert until(make_gang(), Config(FAULT="nan", AT="time", RANK=1), "time").status == "fault:samples"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_rank_that_speaks_out_of_turn_breaks_the_protocol_and_is_killed(
    make_gang: Callable[..., Gang], command: str
) -> None:
    gang = make_gang()
    gang.start()
    before = gang.pids
    outcome = until(gang, Config(FAULT="babble", AT=command, RANK=1), command)
    assert outcome.status == "fault:protocol"
    assert "Rank 1 broke the protocol" in outcome.sentence
    assert all(map(gone, before))
    assert_next_trial_works(gang)


@pytest.mark.parametrize("fault", ["raise", "exit", "absent", "sigkill"])
def test_a_gang_that_cannot_start_raises_and_leaves_nothing(
    make_gang: Callable[..., Gang], fault: str
) -> None:
    gang = make_gang(ranks_env={"FAULTY_PREPARE": fault, "FAULTY_PREPARE_RANK": "1"})
    with pytest.raises(GangError, match=r"A gang of 2 could not start\. Rank 1"):
        gang.start()
    assert not gang.alive
    assert gang.pids == []


def test_a_rank_that_dies_between_commands_is_replaced_before_the_next_load(
    make_gang: Callable[..., Gang],
) -> None:
    gang = make_gang()
    assert until(gang, HEALTHY, "time").ok
    before = gang.pids
    os.kill(before[0], 9)
    os.waitid(os.P_PID, before[0], os.WEXITED | os.WNOWAIT)
    assert until(gang, HEALTHY, "time").ok
    assert gang.respawns == 1
    assert all(map(gone, before))


def test_a_rank_that_died_before_it_is_timed_is_a_crash(make_gang: Callable[..., Gang]) -> None:
    gang = make_gang()
    assert until(gang, HEALTHY, "gate").ok
    os.kill(gang.pids[1], 9)
    assert gang.time(HEALTHY, "fused", 0, 4).status == "crashed"
    assert_next_trial_works(gang)


def test_every_status_is_of_the_closed_set(make_gang: Callable[..., Gang]) -> None:
    gang = make_gang()
    for fault in ("none", "raise", "refuse", "nan", "exit"):
        checked(until(gang, Config(FAULT=fault, AT="gate", RANK=0), "gate").status)
