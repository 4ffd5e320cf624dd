"""One command to all ranks and what became of each: deadlines, the abort word, deaths. It kills and judges nothing."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Sequence
from typing import Protocol

from tktune.gang.protocol import ProtocolBroken, Reply, decode_reply
from tktune.gang.rank_process import RankProcess
from tktune.gang.verdict import RankEnd

LOOK_EVERY_S = 0.1  # how often a silent rank is checked for its death
DYING_S = 2.0  # how long a process may take to be reaped once its socket has ended


class AbortWord(Protocol):
    def abort(self) -> None: ...


class Exchange:
    """One numbered command under way.

    The abort word is set as soon as one rank is late, dead or failed, so that its peers do not wait out their
    limits; from then on the others have `return_s` (spin limit and grace) to come back.
    """

    def __init__(
        self,
        ranks: Sequence[RankProcess],
        abort_word: AbortWord,
        number: int,
        deadline_s: float,
        return_s: float,
    ) -> None:
        self._ranks = ranks
        self._abort_word = abort_word
        self._number = number
        self._return_s = return_s
        self._deadline = time.monotonic() + deadline_s
        self._aborted = False
        self._pending = {rank.rank: rank for rank in ranks}
        self._replies: dict[int, Reply] = {}
        self._deaths: dict[int, str] = {}
        self._broken: dict[int, str] = {}
        self._late: dict[int, bool] = {}  # rank -> whether it was stopped

    def run(self, lines: Sequence[bytes]) -> list[RankEnd]:
        """Send line r to rank r and wait until every rank has replied, died, or used up its time."""
        for rank, line in zip(self._ranks, lines, strict=True):
            rank.mark_log()
            with contextlib.suppress(OSError):  # a dead rank is found below
                rank.channel.send(line)
        while self._pending:
            left = self._deadline - time.monotonic()
            self._gather(min(LOOK_EVERY_S, max(0.0, left)))
            if left > 0 or not self._pending:
                continue  # what has arrived counts, even when this process was kept from looking in time
            if self._aborted:
                break
            self._late = {number: rank.stopped for number, rank in self._pending.items()}
            self._abort()
        return [self._end(rank) for rank in self._ranks]

    def _abort(self) -> None:
        if not self._aborted:
            self._aborted = True
            self._abort_word.abort()
            self._deadline = time.monotonic() + self._return_s

    def _gather(self, seconds: float) -> None:
        """Take what arrives within `seconds`; with nothing to read, look for deaths."""
        poll = select.poll()
        by_fd = {rank.channel.fileno(): rank for rank in self._pending.values()}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(seconds * 1000):
            self._receive(by_fd[fd])
        for rank in list(self._pending.values()):
            if not rank.alive and not self._unread(rank):
                self._die(rank)

    def _receive(self, rank: RankProcess) -> None:
        lines = rank.channel.receive()
        if rank.channel.ended:
            rank.wait(DYING_S)
            self._die(rank)
        for line in lines[:1]:
            try:
                if len(lines) > 1:
                    raise ProtocolBroken(f"{len(lines)} replies to one command")
                reply = decode_reply(line, self._number, rank.rank)
            except ProtocolBroken as error:
                self._broken[rank.rank] = str(error)
                self._abort()
            else:
                self._replies[rank.rank] = reply
                if reply.failure is not None:
                    self._abort()
            del self._pending[rank.rank]

    @staticmethod
    def _unread(rank: RankProcess) -> bool:
        poll = select.poll()
        poll.register(rank.channel.fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def _die(self, rank: RankProcess) -> None:
        self._deaths[rank.rank] = rank.end() or "it closed its control socket"
        self._pending.pop(rank.rank, None)
        self._abort()

    def _end(self, rank: RankProcess) -> RankEnd:
        number = rank.rank
        death = self._deaths.get(number, "")
        late = number in self._late
        stopped = self._late.get(number, False) or (number in self._pending and rank.stopped)
        tail = rank.log_tail() if death or late or number in self._pending else ""
        return RankEnd(
            number, self._replies.get(number), late, death, self._broken.get(number, ""), stopped, tail
        )
