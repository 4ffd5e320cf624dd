"""The protocol: commands and replies survive the wire, and a rank sends exactly one reply to each command."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from gang_cases import faulty_problem, toy_device
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tktune.core.policy import Policy
from tktune.families.base import RankSeat
from tktune.families.control_page import ControlPage
from tktune.gang.protocol import (
    Command,
    Failure,
    ProtocolBroken,
    Reply,
    decode_command,
    decode_reply,
    encode_command,
    encode_reply,
    seat_from_json,
    seat_to_json,
)
from tktune.gang.rank_process import RankProcess


def test_a_command_survives_the_wire() -> None:
    command = Command(7, "time", {"config": {"STAGES": 3, "order": "slot"}, "iterations": 5})
    assert decode_command(encode_command(command)) == command


def test_a_reply_survives_the_wire_with_numpy_and_paths_made_plain() -> None:
    body = {"us": np.array([1.5, 2.0]), "count": np.int64(3), "path": Path("/one"), "worst": math.inf}
    reply = decode_reply(encode_reply(Reply(1, 0, body)), 1, 0)
    assert reply.body == {"us": [1.5, 2.0], "count": 3, "path": "/one", "worst": math.inf}
    failed = Reply(2, 1, {}, Failure("launch", "aborted", "The launch was aborted."))
    assert decode_reply(encode_reply(failed), 2, 1) == failed


def test_a_seat_survives_the_wire() -> None:
    seat = RankSeat(faulty_problem(), toy_device(), Policy(routing_seeds=(3, 4)), 1, 2, (5, 6), 7, 0.5)
    assert seat_from_json(seat_to_json(seat)) == dataclasses.replace(seat)


@pytest.mark.parametrize("line", [b"", b"{}", b"[1]", b"not json", b'{"number": 1, "rank": 0}'])
def test_anything_else_breaks_the_protocol(line: bytes) -> None:
    with pytest.raises(ProtocolBroken):
        decode_reply(line, 1, 0)
    with pytest.raises(ProtocolBroken):
        decode_command(line)


def test_a_reply_to_another_command_or_of_another_rank_breaks_the_protocol() -> None:
    line = encode_reply(Reply(1, 0))
    for number, rank in ((2, 0), (1, 1)):
        with pytest.raises(ProtocolBroken):
            decode_reply(line, number, rank)
    with pytest.raises(ProtocolBroken):
        decode_command(encode_command(Command(1, "dance")))


@pytest.fixture(scope="module")
def seated() -> Iterator[RankProcess]:
    """One rank of a world of one, in its seat, with the abort word set, so that what hangs is aborted."""
    page = ControlPage.create(1)
    page.abort()
    memory = os.memfd_create("symmetric")
    rank = RankProcess(0, [page.fd, memory])
    seat = RankSeat(faulty_problem(1), toy_device(), Policy(), 0, 1, (memory,), page.fd, 10.0)
    rank.channel.send(encode_command(Command(0, "prepare", seat_to_json(seat))))
    assert decode_reply(next_line(rank), 0, 0).failure is None
    yield rank
    rank.kill()
    rank.wait(30)
    rank.close()
    page.close()
    os.close(memory)


def next_line(rank: RankProcess) -> bytes:
    lines: list[bytes] = []
    while not lines:
        lines = rank.channel.receive()
        assert not rank.channel.ended
    assert len(lines) == 1, "exactly one reply"
    return lines[0]


FAULT = st.sampled_from(["none", "hang", "raise", "nan", "wrong_rows", "refuse", "absent"])
ANYTHING = st.fixed_dictionaries(
    {
        "config": st.builds(lambda fault: {"FAULT": fault, "AT": "gate", "RANK": 0}, FAULT),
        "mode": st.sampled_from(["fused", "comm", "sing"]),
        "iterations": st.integers(0, 3),
        "sequence": st.just(1),
        "routing": st.just("uniform"),
        "seed": st.integers(0, 9),
    }
)
LOAD = st.fixed_dictionaries(
    {"build_part": st.just({"SMEM": 64}), "artifact": st.just("/x"), "sha256": st.just("s")}
)
COMMAND = st.one_of(
    st.tuples(st.sampled_from(["gate", "time", "report", "prepare", "load"]), ANYTHING),
    st.tuples(st.just("load"), LOAD),
    st.tuples(st.sampled_from(["gate", "load", "time"]), st.just({})),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(commands=st.lists(COMMAND, min_size=1, max_size=6))
def test_a_rank_sends_exactly_one_reply_to_each_command(
    seated: RankProcess, commands: list[tuple[str, dict[str, object]]]
) -> None:
    for number, (name, args) in enumerate(commands, start=1):
        seated.channel.send(encode_command(Command(number, name, args)))
        decode_reply(next_line(seated), number, 0)
    seated.channel.send(encode_command(Command(99, "report")))
    assert decode_reply(next_line(seated), 99, 0).failure is None, "and nothing more before the next one"
    assert seated.alive
