"""The CPU workbench in real rank processes: two ranks gate and time one artifact, and find what is wrong with it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cpu_world import Builder, Rank, builder, ids_of_counts, spec, tile

from tktune.core.config import Config
from tktune.core.problem import Problem
from tktune.families.bf16 import gemm_tolerance
from tktune.families.control_page import ControlPage
from tktune.families.cpu_inputs import check_output
from tktune.families.parallel_tensor import ParallelTensor

__all__ = ["builder"]

PART = tile(32, 64, 64, 2, 1)
DISPATCH = Problem(
    "dispatch_gemm", hidden=128, cols=128, experts=8, top_k=2, tokens=60, world=2, pad=32, weight_layout="enk"
)
GROUPED = Problem(
    "grouped_gemm", hidden=128, cols=128, experts=8, top_k=2, tokens=60, ep_world=2, ep_rank=1, pad=64
)
LAUNCH = {"num_comm_sms": 1, "order": "token", "backoff": 16}


class Ranks:
    """Rank processes with shared memory and a control page, and calls that all of them answer."""

    def __init__(self, problem: Problem, seats: int = 3, spin_limit_s: float = 20.0) -> None:
        self.control = ControlPage.create(problem.world)
        self.fds = ParallelTensor.create_fds(problem.world)
        words = {
            "problem": {k: v for k, v in dataclasses.asdict(problem).items() if v is not None},
            "seats": seats,
            "world": problem.world,
            "symmetric_fds": self.fds,
            "control_fd": self.control.fd,
            "spin_limit_s": spin_limit_s,
        }
        self.processes = []
        for rank in range(problem.world):
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("workbench_rank.py"))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(*self.fds, self.control.fd),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
                text=True,
            )
            self.processes.append(process)
            self._send(process, {**words, "rank": rank})

    @staticmethod
    def _send(process: Any, line: Any) -> None:
        process.stdin.write(json.dumps(line) + "\n")
        process.stdin.flush()

    def call(self, *words: Any, only: int | None = None) -> list[Any]:
        words = tuple(dict(word) if isinstance(word, Config) else word for word in words)
        asked = self.processes if only is None else [self.processes[only]]
        for process in asked:
            self._send(process, words)
        return [json.loads(process.stdout.readline()) for process in asked]

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()
            process.wait(20)
            process.stdout.close()
        self.control.close()
        for fd in self.fds:
            os.close(fd)


@contextlib.contextmanager
def seated(problem: Problem, artifact: Any, part: Config, **words: Any) -> Iterator[Ranks]:
    ranks = Ranks(problem, **words)
    try:
        for facts in ranks.call("load", str(artifact.path), artifact.sha256, part):
            assert facts["row_block"] == part["ROW_BLOCK"], facts
        yield ranks
    finally:
        ranks.close()


def test_two_ranks_gate_and_time_every_mode(builder: Builder) -> None:
    artifact = builder.build([spec("dispatch_gemm", PART, world=2, layout="enk")])[0]
    sequence = 1 << 20
    with seated(DISPATCH, artifact, PART) as ranks:
        for routing, seed in (("uniform", 0), ("empty:0", 0), ("hot:0.9@7", 0), ("uniform", 9)):
            for order in ("token", "slot"):
                config = Config({**PART, **LAUNCH, "order": order})
                for passed, error, tolerance, sentence in ranks.call("gate", config, routing, seed, sequence):
                    assert passed, sentence
                    assert 0 < error <= tolerance == gemm_tolerance(DISPATCH.hidden)
                sequence += 1 << 20
        for mode in ("fused", "comp", "comm", "serial", "peer"):
            for us in ranks.call("time", Config({**PART, **LAUNCH}), mode, 0, 3, sequence):
                assert len(us) == 3
                assert all(math.isfinite(one) and one > 0 for one in us)
            sequence += 1 << 20
        assert ranks.call("gate", Config({**PART, **LAUNCH}), "uniform", 0, sequence)[0][0]
        assert ranks.call("close") == [[], []]  # neither torch nor a database was imported


def test_one_rank_of_a_grouped_gemm_has_the_rows_it_owns(builder: Builder) -> None:
    artifact = builder.build([spec("grouped_gemm", PART)])[0]
    with seated(GROUPED, artifact, PART) as ranks:
        for order in ("rows", "cols"):
            config = Config({**PART, "order": order, "backoff": 16})
            assert ranks.call("gate", config, "zipf:1.0", 3, 1 << 20)[0][0]
            for mode in ("fused", "comp", "peer"):
                assert len(ranks.call("time", config, mode, 3, 2, 2 << 20)[0]) == 2
        refused = ranks.call("time", config, "comm", 3, 2, 3 << 20)[0]
        assert refused["error"] == "ConstraintRefused"
        assert "communicates nothing" in refused["said"]


def test_a_rank_whose_peer_does_not_come_reports_it_and_serves_on(builder: Builder) -> None:
    """Only one rank is told to time; its peer's barrier word never grows, until the abort word ends the wait."""
    artifact = builder.build([spec("dispatch_gemm", PART, world=2, layout="enk")])[0]
    config = Config({**PART, **LAUNCH})
    with seated(DISPATCH, artifact, PART, spin_limit_s=0.2) as ranks:
        assert all(reply[0] for reply in ranks.call("gate", config, "uniform", 0, 1 << 20))
        ranks.control.abort()
        alone = ranks.call("gate", config, "uniform", 0, 2 << 20, only=0)[0]
        assert (alone["error"], alone["code"]) == ("LaunchFailed", "aborted")
        ranks.control.clear()
        assert all(reply[0] for reply in ranks.call("gate", config, "uniform", 0, 3 << 20))


def test_a_split_that_deadlocks_is_caught_and_named(builder: Builder) -> None:
    artifact = builder.build([spec("dispatch_gemm", PART, world=2, layout="enk")])[0]
    config = Config({**PART, **LAUNCH, "num_comm_sms": 0})
    with seated(DISPATCH, artifact, PART, spin_limit_s=0.2) as ranks:
        for reply in ranks.call("gate", config, "uniform", 0, 1 << 20):
            assert reply["code"] == "spin_limit"
        report = ranks.control.report(0)
        assert report is not None
        assert (report.role, report.word, report.expected) == ("gemm", "arrivals", DISPATCH.pad)
        ranks.control.clear()
        good = Config({**PART, **LAUNCH})
        assert all(reply[0] for reply in ranks.call("gate", good, "uniform", 0, 2 << 20))


def test_an_artifact_that_is_not_what_was_recorded_is_refused(builder: Builder, tmp_path: Path) -> None:
    artifact = builder.build([spec("grouped_gemm", PART)])[0]
    truncated = tmp_path / "truncated.so"
    truncated.write_bytes(artifact.path.read_bytes()[:-100])
    own_digest = hashlib.sha256(truncated.read_bytes()).hexdigest()
    with contextlib.closing(Ranks(GROUPED)) as ranks:
        words = [
            (str(truncated), artifact.sha256, PART, "SHA-256"),
            (str(tmp_path / "absent.so"), artifact.sha256, PART, "cannot be read"),
            (str(artifact.path), artifact.sha256, PART.replace(STAGES=3), "was asked for"),
        ]
        for path, sha256, part, said in words:
            reply = ranks.call("load", path, sha256, part)[0]
            assert reply["error"] == "ArtifactError"
            assert said in reply["said"]
        text = tmp_path / "text.so"
        text.write_text("not a library")
        own_digest = hashlib.sha256(text.read_bytes()).hexdigest()
        assert "cannot be loaded" in ranks.call("load", str(text), own_digest, PART)[0]["said"]
        early = ranks.call("gate", PART, "uniform", 0, 1)[0]
        assert "No artifact is loaded" in early["said"]


@pytest.fixture
def right() -> Rank:
    """A rank whose output is the rounded reference, as a perfect kernel leaves it."""
    from tktune.families.bf16 import from_float

    counts = [5, 0, 40]
    problem = Problem("grouped_gemm", hidden=64, cols=64, experts=3, top_k=1, tokens=45, pad=32)
    rank = Rank(problem, ids_of_counts(counts))
    rank.place()
    rank.out[rank.case.real] = from_float(rank.case.reference)
    return rank


def test_the_gate_passes_a_right_output(right: Rank) -> None:
    verdict = check_output(right.problem, right.case, right.out, right.gathered)
    assert verdict.passed
    assert verdict.worst_error < verdict.tolerance / 2
    assert verdict.sentence == ""


def test_the_gate_sees_one_wrong_row_and_names_it(right: Rank) -> None:
    slot = int(right.case.real[7])
    right.out[slot] = np.roll(right.out[slot], 1)
    verdict = check_output(right.problem, right.case, right.out, right.gathered)
    assert not verdict.passed
    assert verdict.sentence.startswith(f"1 of 45 rows differ: row {slot} (token ")


def test_the_gate_sees_exchanged_strips(right: Rank) -> None:
    right.out[[32, 33, 34, 35, 36, 37, 38, 39]] = right.out[[40, 41, 42, 43, 44, 45, 46, 47]]
    verdict = check_output(right.problem, right.case, right.out, right.gathered)
    assert not verdict.passed
    assert "and 5 more" in verdict.sentence


def test_the_gate_fails_on_a_nan(right: Rank) -> None:
    right.out[int(right.case.real[0]), 3] = 0x7FC0
    verdict = check_output(right.problem, right.case, right.out, right.gathered)
    assert not verdict.passed
    assert math.isnan(verdict.worst_error)


@pytest.mark.parametrize("row", [5, -1])
def test_the_gate_sees_writes_to_padding_and_past_the_end(right: Rank, row: int) -> None:
    right.out[row, 0] = 0
    verdict = check_output(right.problem, right.case, right.out, right.gathered)
    assert not verdict.passed
    assert "is padding, and it was written" in verdict.sentence
