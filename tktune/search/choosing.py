"""What is measured and built next. `Asked` takes a sampler's rows in their order; `gains.GainChooser` weighs them.

A chooser knows which builds there are and what became of rows; it measures, builds and files nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from tktune.core.config import Config
from tktune.search.sampler import ConfigSampler

Told = tuple[Config, float | None]
_ROWS_A_BUILD = 4


class Chooser(Protocol):
    """Chooses among rows that were neither begun, told nor dropped; a row is a whole config."""

    def begin(self, row: Config) -> None:
        """`row` is being measured, whoever chose it."""
        ...

    def tell(self, told: Iterable[Told]) -> None:
        """What rows came to in microseconds; None for those that failed."""
        ...

    def drop(self, rows: Iterable[Config]) -> None:
        """These are never to be chosen: quarantined, or of a build that is closed."""
        ...

    def made(self, build: Config) -> None:
        """The artifact of `build` is there."""
        ...

    def measure(self, loaded: Config | None, price_s: float, *, building: bool) -> Config | None:
        """The row to measure next, of a build whose artifact is there; `loaded` is the build that a lane holds ready.

        None when there is none, or when building (`building`: that stops all measuring) or waiting for a build that is
        under way is worth more. A trial costs `price_s` beyond its seconds.
        """
        ...

    def build(self, count: int, price_s: float) -> list[Config]:
        """Up to `count` rows of different builds that should be made next; the rows count as begun. A row of a build
        that is there already may be among them."""
        ...

    def gain(self, trials: float) -> float | None:
        """The fraction by which the best time is expected to fall in `trials` more; None when it cannot tell."""
        ...


class Asked:
    """Rows in the order in which a sampler asks them, a batch of builds at a time.

    So Optuna's TPE and a random order are driven, for comparison: they know nothing of what things cost.
    """

    def __init__(self, sampler: ConfigSampler, build_of: Mapping[Config, Config]) -> None:
        self._sampler = sampler
        self._build_of = build_of
        self._closed: set[Config] = set()  # rows the sampler need not offer
        self._made: set[Config] = set()

    def begin(self, row: Config) -> None:
        self._closed.add(row)

    def tell(self, told: Iterable[Told]) -> None:
        for row, time_us in told:
            self._closed.add(row)
            self._sampler.tell(row, time_us)

    def drop(self, rows: Iterable[Config]) -> None:
        self._closed |= set(rows)

    def made(self, build: Config) -> None:
        self._made.add(build)

    def measure(self, loaded: Config | None, price_s: float, *, building: bool) -> Config | None:
        return None  # rows whose artifact is there come out of `build`, too

    def build(self, count: int, price_s: float) -> list[Config]:
        """As many rows as it takes to keep `count` compilers busy, a few times as many as those at most."""
        found: list[Config] = []
        builds: set[Config] = set()
        while len(builds) < count and len(found) < _ROWS_A_BUILD * count:
            asked = self._sampler.ask(1)
            if not asked:
                break
            fresh = self._fresh(asked)
            found += fresh
            builds |= {self._build_of[row] for row in fresh} - self._made
        return found

    def gain(self, trials: float) -> float | None:
        return None

    def _fresh(self, rows: Collection[Config]) -> list[Config]:
        fresh = [row for row in rows if row not in self._closed]
        self._closed |= set(fresh)
        return fresh
