"""Where the wall time of a run went: marks of who did what when, and their sums. Measures and decides nothing.

A gang's second belongs to what its ranks do; while they do nothing, to why: between the commands of a trial, or what the
driver was at meanwhile.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

ACCOUNT = "account"  # the kind of event that keeps one
# What ranks do (commands of a gang) by the name under which it is counted.
_RANKS = {
    "start": "starting",
    "prepare": "starting",
    "leave": "starting",
    "load": "loading",
    "gate": "gating",
    "time": "timing",
    "report": "reporting",
}
BUSY = ("gating", "timing")
BETWEEN = "between commands"
# What the driver is at.
PREPARING, DECIDING, COMMITTING, WAITING = "preparing", "deciding", "committing", "waiting for builds"
FINALISTS = "between finalists"
OTHER = "other"
_DRIVER = "driver"
_SHOWN = 0.005  # the least share of the whole that a sentence names


@dataclass(frozen=True)
class Spent:
    """Seconds of `gangs` gangs in `wall_s` seconds, by what they went to; the values add up to gangs × wall_s."""

    wall_s: float
    gangs: int
    seconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def busy_s(self) -> float:
        """Seconds of gangs that gated or timed."""
        return sum(self.seconds.get(name, 0.0) for name in BUSY)

    @property
    def waiting_s(self) -> float:
        """Seconds of gangs that had nothing to do until a build ended."""
        return self.seconds.get(WAITING, 0.0)

    @property
    def whole_s(self) -> float:
        """Seconds of all gangs."""
        return sum(self.seconds.values())

    @property
    def built_share(self) -> float:
        """The share that was gated or timed of the time in which no build was waited for."""
        built_s = self.whole_s - self.waiting_s
        return self.busy_s / built_s if built_s > 0 else 0.0

    @property
    def sentence(self) -> str:
        """How much of the time ranks gated or timed, and where the rest went, largest first."""
        whole = self.whole_s
        if whole <= 0:
            return "No gang had any time."
        rest = sorted(
            (
                (spent, name)
                for name, spent in self.seconds.items()
                if name not in BUSY and spent >= _SHOWN * whole
            ),
            reverse=True,
        )
        gangs = "" if self.gangs == 1 else f" of {self.gangs} gangs"
        said = (
            f"Ranks gated or timed for {self.busy_s:.1f} of {whole:.1f} s{gangs} ({self.busy_s / whole:.0%}"
        )
        if self.waiting_s >= _SHOWN * whole:
            said += f", {self.built_share:.0%} of what did not wait for builds"
        return (
            f"{said}); {', '.join(f'{name} {spent:.1f} s' for spent, name in rest)}." if rest else f"{said})."
        )

    def __add__(self, other: Spent) -> Spent:
        """Both, one after the other."""
        names = {**self.seconds, **other.seconds}
        seconds = {name: self.seconds.get(name, 0.0) + other.seconds.get(name, 0.0) for name in names}
        return Spent(self.wall_s + other.wall_s, max(self.gangs, other.gangs), seconds)

    def facts(self) -> dict[str, Any]:
        """As plain JSON; `of_facts` reads it."""
        seconds = {name: round(spent, 4) for name, spent in sorted(self.seconds.items())}
        return {"wall_s": round(self.wall_s, 4), "gangs": self.gangs, "seconds": seconds}

    @classmethod
    def of_facts(cls, facts: Mapping[str, Any]) -> Spent:
        return cls(float(facts["wall_s"]), int(facts["gangs"]), dict(facts["seconds"]))


class Account:
    """Marks of one run. Threads may mark at the same time; `cut` is the driver's.

    >>> account = Account(clock)                                            # doctest: +SKIP
    >>> gang.watcher = account.ranks(0)                                     # doctest: +SKIP
    >>> with account.driver(DECIDING): chooser.measure(...)                 # doctest: +SKIP
    >>> account.cut(gangs=1).seconds["deciding"]                            # doctest: +SKIP
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._marks: deque[tuple[float, str, str]] = deque()
        self._doing: dict[str, str] = {}
        self._stack: list[str] = [OTHER]
        self._since = clock()

    def ranks(self, gang: int) -> Callable[[str], None]:
        """What gang number `gang` marks with: a command, or "" when it is done."""
        return self._marker(f"ranks {gang}")

    def lane(self, gang: int) -> Callable[[str], None]:
        """What marks that a job of gang number `gang` begins (any word) and ends ("")."""
        return self._marker(f"lane {gang}")

    @contextlib.contextmanager
    def driver(self, doing: str) -> Iterator[None]:
        """While inside, the driver's own thread is at `doing`."""
        self._stack.append(doing)
        self._mark(_DRIVER, doing)
        try:
            yield
        finally:
            self._stack.pop()
            self._mark(_DRIVER, self._stack[-1])

    def cut(self, gangs: int) -> Spent:
        """What went where since the last cut, or since this began."""
        end = self._clock()
        marks = [self._marks.popleft() for _ in range(len(self._marks))]  # others append meanwhile
        spent, self._doing = _sums(marks, self._doing, self._since, end, gangs)
        wall_s, self._since = end - self._since, end
        return Spent(wall_s, gangs, spent)

    def _marker(self, who: str) -> Callable[[str], None]:
        return lambda doing: self._mark(who, doing)

    def _mark(self, who: str, doing: str) -> None:
        self._marks.append((self._clock(), who, doing))


def _sums(
    marks: list[tuple[float, str, str]], doing: Mapping[str, str], begin: float, end: float, gangs: int
) -> tuple[dict[str, float], dict[str, str]]:
    """Seconds by name, and what everybody was at in the end."""
    now = dict(doing)
    spent: dict[str, float] = defaultdict(float)
    since = begin
    for at, who, what in [*sorted(marks, key=lambda mark: mark[0]), (end, "", "")]:
        until = min(max(at, since), end)
        if until > since:
            for gang in range(gangs):
                spent[_of_gang(gang, now)] += until - since
            since = until
        if who:
            now[who] = what
    return dict(spent), now


def _of_gang(gang: int, now: Mapping[str, str]) -> str:
    ranks = now.get(f"ranks {gang}", "")
    if ranks:
        return _RANKS.get(ranks, OTHER)
    if now.get(f"lane {gang}", ""):
        return BETWEEN
    return now.get(_DRIVER, OTHER)
