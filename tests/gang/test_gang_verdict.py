"""From what became of each rank to one status: which cause outweighs which, and what the sentence says."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from tktune.core.status import checked
from tktune.families.control_page import SpinReport
from tktune.gang.protocol import Failure, Reply
from tktune.gang.verdict import RankEnd, Verdict, judge, judge_gate, judge_samples, worst_error


def replied(rank: int, failure: Failure | None = None, late: bool = False) -> RankEnd:
    return RankEnd(rank, Reply(1, rank, {}, failure), late=late)


ABORTED = Failure("launch", "aborted", "The launch was aborted.")
SPUN = Failure("launch", "spin_limit", "A wait was out of its spin limit.")
RAISED = Failure("exception", "ValueError", "ValueError: no")
REFUSED = Failure("refused", "D1", "Too many blocks wait.")
REPORT = SpinReport(0, 2, "comp", "arrivals", 3, 128, 96)


def verdict(*ends: RankEnd, reports: Sequence[SpinReport] = ()) -> Verdict:
    return judge("gate", ends, reports, deadline_s=5, spin_limit_s=2, return_s=3)


@pytest.mark.parametrize(
    ("ends", "status"),
    [
        ((replied(0), replied(1)), "ok"),
        ((replied(0, ABORTED), RankEnd(1, death="killed by SIGKILL")), "crashed"),
        ((RankEnd(0, late=True), RankEnd(1, death="exit code 3")), "crashed"),
        ((replied(0, ABORTED), replied(1, late=True)), "timeout:gate"),
        ((RankEnd(0, late=True), replied(1)), "timeout:gate"),
        ((replied(0, SPUN), RankEnd(1)), "timeout:gate"),
        ((replied(0, RAISED), RankEnd(1)), "fault:ValueError"),
        ((replied(0, SPUN), replied(1, RAISED)), "fault:ValueError"),
        ((replied(0, ABORTED), replied(1, SPUN)), "fault:spin_limit"),
        ((replied(0, ABORTED), replied(1)), "fault:aborted"),
        ((replied(0, ABORTED), replied(1, REFUSED)), "refused:D1"),
        ((replied(0), RankEnd(1, broken="two replies")), "fault:protocol"),
        ((replied(0, Failure("launch", "CUDA error: 700", "Gone.")), replied(1)), "fault:CUDA_error_700"),
    ],
)
def test_the_likelier_cause_gives_the_status(ends: tuple[RankEnd, ...], status: str) -> None:
    assert checked(verdict(*ends).status) == status


def test_the_sentence_says_who_waited_for_what() -> None:
    said = verdict(replied(0, SPUN), replied(1, ABORTED), reports=[REPORT]).sentence
    assert said == (
        "Rank 0's launch ended without a result while gating. Rank 0's comp block 2 waited for arrivals[3] to "
        "reach 128 and saw 96. Waits are bounded by 2 s. It may be tried once more; a second such end "
        "quarantines the config."
    )


def test_a_launch_that_names_no_code_is_known_by_its_spin_report() -> None:
    silent = Failure("launch", "", "The launch failed.")
    assert verdict(replied(0, silent), replied(1, silent), reports=[REPORT]).status == "fault:spin_limit"
    assert verdict(replied(0, silent), replied(1, silent)).status == "fault:aborted"


def test_several_late_ranks_are_listed() -> None:
    ends = (RankEnd(0, late=True), RankEnd(1, late=True, stopped=True), RankEnd(2, late=True))
    assert (
        verdict(*ends).said == "Rank 0, rank 1 (stopped by a signal) and rank 2 were still gating after 5 s."
    )


def gate(error: float) -> dict[str, object]:
    return {"passed": error <= 0.01, "worst_error": error, "tolerance": 0.01, "sentence": ""}


def test_one_wrong_rank_makes_the_config_wrong_and_the_worst_is_named() -> None:
    said = judge_gate([gate(0.001), gate(0.5), gate(math.nan)], "hot:0.9@3")
    assert said.status == "wrong"
    assert said.said == "Rank 2's output under the routing hot:0.9@3 is not a number."
    assert judge_gate([gate(0.001), gate(0.002)], "uniform").status == "ok"


def test_an_error_that_is_not_a_number_has_no_worst() -> None:
    assert worst_error([gate(0.001), gate(0.5)]) == 0.5
    assert worst_error([gate(0.001), gate(math.nan)]) is None


@pytest.mark.parametrize("us", [[], [1.0], [1.0, 0.0], [1.0, math.inf], [1.0, 2.0, 3.0], [1.0, math.nan]])
def test_a_rank_gives_one_time_for_each_iteration(us: list[float]) -> None:
    assert judge_samples([{"us": [1.0, 2.0]}, {"us": us}], 2).status == "fault:samples"
