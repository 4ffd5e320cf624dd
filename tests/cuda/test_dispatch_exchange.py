"""How ranks of a gang share handles: through their memfds, in bounded time, by name when someone is missing."""

from __future__ import annotations

import os
import threading
import time

import pytest

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed (the extra `cuda`)")

from tktune.core.errors import GangError
from tktune.families.cuda.symmetric import MemfdExchange


@pytest.fixture
def fds():
    made = [os.memfd_create(f"rank-{rank}") for rank in range(3)]
    yield made
    for fd in made:
        os.close(fd)


def test_every_rank_gets_every_payload_call_by_call(fds):
    got: dict[int, list[list[bytes]]] = {}

    def rank_work(rank: int) -> None:
        exchange = MemfdExchange(fds, rank, 10.0)
        got[rank] = [exchange(bytes([rank]) * (call + 60 * rank)) for call in range(4)]

    threads = [threading.Thread(target=rank_work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wanted = [[bytes([rank]) * (call + 60 * rank) for rank in range(3)] for call in range(4)]
    assert got == dict.fromkeys(range(3), wanted)


def test_a_missing_rank_is_named_when_patience_ends(fds):
    MemfdExchange(fds, 2, 0.0, lambda: False)
    with pytest.raises(GangError, match=r"waited 0\.01 s for rank 1, 2"):
        MemfdExchange(fds, 0, 0.01)(b"mine")


def test_an_abort_ends_the_wait_before_its_deadline(fds):
    begin = time.monotonic()
    with pytest.raises(GangError):
        MemfdExchange(fds, 0, 60.0, lambda: True)(b"mine")
    assert time.monotonic() - begin < 30.0


def test_a_payload_larger_than_a_slot_is_refused(fds):
    with pytest.raises(ValueError, match="more than a slot"):
        MemfdExchange(fds, 0, 1.0)(bytes(MemfdExchange.SLOT_BYTES))
