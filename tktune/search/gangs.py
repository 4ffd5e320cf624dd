"""The gangs of one run, kept from problem to problem: their ranks start while the driver prepares, and a problem that follows
finds them there. Nothing here knows trials.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

from tktune.core.errors import GangError
from tktune.core.problem import Problem
from tktune.gang.gang import Gang
from tktune.search.account import Account


class GangThread:
    """The thread in which a gang's ranks are started and work, as long as a run lasts: they die with it.

    Other threads may use the gang while this one is idle.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Do this after all that was submitted before."""
        return self._thread.submit(work)

    def settle(self) -> None:
        """Wait until everything that was submitted is done."""
        self._thread.submit(lambda: None).result()

    def close(self) -> None:
        """Let the thread end once everything that was submitted is done."""
        self._thread.shutdown()


@dataclass(frozen=True)
class SeatedGang:
    """A gang on the devices of its seat, and the thread it works in; without one it works in the driver's."""

    gang: Gang
    seat: tuple[int, ...]
    thread: GangThread | None


class Gangs:
    """Gangs side by side, one on each of the seats that a problem gets.

    With `threads`, ranks are started and turned to the next problem in threads of their own while the caller goes on, and
    several gangs always have them; a start that fails is said by whoever uses the gang next.
    """

    def __init__(
        self,
        make: Callable[[Problem, tuple[int, ...]], Gang],
        seats: Callable[[Problem], Sequence[tuple[int, ...]]],
        account: Account,
        *,
        threads: bool,
    ) -> None:
        self._make = make
        self._seats = seats
        self._account = account
        self._threads = threads
        self._problem: Problem | None = None
        self._seated: list[SeatedGang] = []

    def __enter__(self) -> Gangs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(hurry=kind is not None)

    def turn_to(self, problem: Problem) -> list[SeatedGang]:
        """The gangs that measure `problem` now: those there are, where they fit it, else new ones."""
        seats = list(self._seats(problem))
        if self._fit(problem, seats):
            for one in self._seated:
                self._turn(one, problem)
        else:
            self.close()
            threads = self._threads or len(seats) > 1
            for number, seat in enumerate(seats):
                gang = self._make(problem, seat)
                gang.watcher = self._account.ranks(number)
                thread = GangThread(f"tktune-gang-{number}") if threads else None
                self._seated.append(SeatedGang(gang, seat, thread))
        self._problem = problem
        for one in self._seated:
            if one.thread is not None:
                one.thread.submit(_quietly(one.gang.start))
        return list(self._seated)

    def close(self, *, hurry: bool = False) -> None:
        """End all ranks; with `hurry` those that still work are killed."""
        seated, self._seated, self._problem = self._seated, [], None
        for one in seated:
            if hurry:
                one.gang.interrupt()
            if one.thread is None:
                one.gang.close()
            else:
                one.thread.submit(_quietly(one.gang.close))
        for one in seated:
            if one.thread is not None:
                one.thread.close()

    def _fit(self, problem: Problem, seats: list[tuple[int, ...]]) -> bool:
        before = self._problem
        return (
            before is not None
            and (before.family, before.world) == (problem.family, problem.world)
            and seats == [one.seat for one in self._seated]
        )

    def _turn(self, one: SeatedGang, problem: Problem) -> None:
        turn = _quietly(lambda: one.gang.turn_to(problem))
        if one.thread is None:
            turn()
        else:
            one.thread.submit(turn)


def _quietly(work: Callable[[], object]) -> Callable[[], None]:
    """Without its `GangError`: whoever uses the gang next is told it again."""

    def done() -> None:
        with contextlib.suppress(GangError):
            work()

    return done
