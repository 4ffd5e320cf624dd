"""The chooser that weighs expected gain against seconds: one model over whole configs says what each may gain, and
what a build, a load and a trial cost says what it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tktune.core.config import Config
from tktune.search.choosing import Told
from tktune.search.costs import Costs
from tktune.search.pace import Pace

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_UNMADE, _ORDERED, _MADE = 0, 1, 2
_OPENING = 6  # builds of the model's own choice before the prior is taken at its word
_LOCAL_TURN, _TURNS = 2, 4  # one choice in four is among what is one step from the best
_NAMED_BUILDS = (
    8  # of a set so large that a model looks at a pool: made builds that are always looked at, best first
)


@runtime_checkable
class GainModel(Protocol):
    """What this chooser asks of a sampler with a model (`feasible_sampler.ModelSampler`)."""

    def ask(self, count: int) -> list[Config]: ...
    def take(self, row: Config) -> None: ...
    def tell(self, row: Config, cost_us: float | None) -> None: ...
    def gains(self, rows: Ints | None = None, unlooked: int = 0) -> Floats: ...
    def near_number(self, number: int) -> Ints: ...
    @property
    def ready(self) -> bool: ...


class GainChooser:
    """Chooses the row of the most expected gain (of log time) a second.

    `rows` are those the model was made of, in their order. `held` are builds whose artifacts were made before this run:
    they cost nothing. With a `prior` (rows,), the log microseconds that the model was given too (NaN: unknown), launches are learnt
    first, and of the builds that idle compilers may make before anything is known every other one is the prior's next best;
    without, builds are far apart. Builds that are proposed together differ: each counts as measured at what is expected
    of it before the next is chosen. Where looking at the model would hold up measuring (`pace`), one look serves a few
    choices, which are then more than one parameter apart.
    """

    def __init__(
        self,
        rows: Sequence[Config],
        build_of: Mapping[Config, Config],
        model: GainModel,
        costs: Costs,
        held: Iterable[Config] = (),
        *,
        prior: Floats | None = None,
        pace: Pace | None = None,
    ) -> None:
        self._rows = rows
        self._model = model
        self._costs = costs
        self._pace = pace or Pace()
        self._prior = prior
        self._asked_for = 0
        self._row_of = {row: number for number, row in enumerate(rows)}
        self._builds = list(dict.fromkeys(build_of[row] for row in rows))
        self._number_of = {build: number for number, build in enumerate(self._builds)}
        self._build: Ints = np.array([self._number_of[build_of[row]] for row in rows])
        self._open = np.ones(len(rows), bool)
        self._unseen = np.ones(len(rows), bool)  # the model may still be asked for it
        self._state = np.full(len(self._builds), _UNMADE)
        self._by_build = np.argsort(self._build, kind="stable")
        self._first = np.searchsorted(self._build[self._by_build], np.arange(len(self._builds) + 1))
        self._is_made = np.zeros(len(rows), bool)
        self._is_unmade = np.ones(len(rows), bool)
        self._held = {self._number_of[build] for build in held}
        self._codes = costs.builds.coded(self._builds)
        self._share: Floats = np.zeros(0)
        self._shared_at = -1
        self._promised: dict[int, float] = {}  # what was expected of a build that is under way
        self._best: tuple[float, int] | None = None
        self._best_of: dict[int, float] = {}  # least time of each build
        self._turn = 0
        self._seen: Floats | None = None  # gains by the last look
        self._since: list[int] = []  # rows begun since
        self._unlooked = 0  # rows that were chosen by a look that had served another choice

    # What became of rows and builds.

    def begin(self, row: Config) -> None:
        number = self._row_of[row]
        self._open[number] = False
        if self._unseen[number]:
            self._unseen[number] = False
            self._model.take(row)
            self._since.append(number)

    def tell(self, told: Iterable[Told]) -> None:
        for row, time_us in told:
            number = self._row_of[row]
            self._open[number] = self._unseen[number] = False
            self._model.tell(row, time_us)
            if time_us is None:
                continue
            build = int(self._build[number])
            self._best_of[build] = min(time_us, self._best_of.get(build, time_us))
            if self._best is None or time_us < self._best[0]:
                self._best = (time_us, number)
                self._seen = None  # gains are over the best

    def drop(self, rows: Iterable[Config]) -> None:
        for row in rows:
            self._open[self._row_of[row]] = False

    def made(self, build: Config) -> None:
        number = self._number_of[build]
        self._set(number, _MADE)
        self._promised.pop(number, None)

    # Choices.

    def measure(self, loaded: Config | None, price_s: float, *, building: bool) -> Config | None:
        made = self._open & self._is_made
        if not self._model.ready:
            return self._unlike(made) if self._prior is not None or not self._unmade_left() else None
        if not made.any():
            return None
        gains = self._gains(made)
        row, per_s = self._foremost_of(made, gains, self._seconds(loaded, price_s))
        if building:
            unmade = np.flatnonzero(self._open & self._is_unmade)
            seconds = self._seconds_with_build(price_s)
            rival = float((gains[unmade] / seconds(unmade)).max()) if len(unmade) else 0.0
        else:
            rival = self._worth_waiting(price_s)
        if rival > per_s:
            return None
        near, near_per_s = self._foremost_of(self._candidates(made), gains, self._seconds(loaded, price_s))
        self._turn += 1
        self._chosen()
        return self._rows[near if rival <= near_per_s else row]

    @staticmethod
    def _foremost_of(
        among: NDArray[np.bool_], gains: Floats, seconds: Callable[[Ints], Floats]
    ) -> tuple[int, float]:
        """Of these rows (one at least), the one of the most gain a second, and that."""
        numbers = np.flatnonzero(among & (gains > 0))
        if not len(numbers):
            numbers = np.flatnonzero(among)
        per_s = gains[numbers] / seconds(numbers)
        first = int(np.argmax(per_s))
        return int(numbers[first]), float(per_s[first])

    def build(self, count: int, price_s: float) -> list[Config]:
        found: list[Config] = []
        builds: set[int] = set()  # two rows of the model's opening may be of one build
        while len(builds) < count and len(found) < 2 * count:
            row = self._build_one(price_s)
            if row is None:
                break
            found.append(row)
            build = int(self._build[self._row_of[row]])
            if self._state[build] != _MADE:
                builds.add(build)
        return found

    def gain(self, trials: float) -> float | None:
        if not self._model.ready:
            return None
        gains = self._gains(self._open)[self._open]
        promising = gains[gains > 0]
        foremost = np.sort(promising)[::-1][: max(1, int(min(trials, len(gains))))]
        return float(-np.expm1(-foremost.sum()))

    def _build_one(self, price_s: float) -> Config | None:
        if not self._open.any():
            return None
        if not self._model.ready:
            self._asked_for += 1
            return self._foremost() or self._asked()
        unmade = self._open & self._is_unmade
        if not unmade.any():
            return None
        gains = self._gains(unmade)
        number, _ = self._foremost_of(unmade, gains, self._seconds_with_build(price_s))
        self._chosen()
        self._order(number, float(gains[number]))
        self.begin(self._rows[number])
        return self._rows[number]

    def _foremost(self) -> Config | None:
        """Once the model's opening is under way, in every other turn, the row that the prior likes best among what is not
        made: compilers that would idle take the prior at its word, and the others look elsewhere."""
        if self._prior is None or self._asked_for <= _OPENING or self._asked_for % 2:
            return None
        unmade = self._open & self._is_unmade & np.isfinite(self._prior)
        if not unmade.any():
            return None
        number = int(np.argmin(np.where(unmade, self._prior, np.inf)))
        self._order(number, 0.0)
        self.begin(self._rows[number])
        return self._rows[number]

    def _asked(self) -> Config | None:
        """The next row of the model's opening."""
        while asked := self._model.ask(1):
            number = self._row_of[asked[0]]
            self._unseen[number] = False
            if self._open[number]:
                self._open[number] = False
                if self._state[self._build[number]] == _UNMADE:
                    self._order(number, 0.0)
                return asked[0]
        return None

    def _unmade_left(self) -> bool:
        return bool((self._open & self._is_unmade).any())

    def _order(self, row: int, gain: float) -> None:
        build = int(self._build[row])
        self._set(build, _ORDERED)
        self._promised[build] = gain

    def _set(self, build: int, state: int) -> None:
        self._state[build] = state
        rows = self._rows_of(build)
        self._is_made[rows], self._is_unmade[rows] = state == _MADE, state == _UNMADE

    def _rows_of(self, build: int) -> Ints:
        return self._by_build[self._first[build] : self._first[build + 1]]

    def _unlike(self, made: NDArray[np.bool_]) -> Config | None:
        """Of what is made, the row least like those that were begun: launches are cheap to learn from, builds are not."""
        begun = [self._rows[int(number)] for number in np.flatnonzero(~self._unseen)]
        open_ = [self._rows[int(number)] for number in np.flatnonzero(made)]

        def apart(row: Config) -> tuple[int, int]:
            differ = [sum(row[name] != other[name] for name in row) for other in begun]
            return min(differ, default=0), sum(differ)

        return max(open_, key=apart, default=None)

    def _candidates(self, made: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Those of `made`; now and then only those one step from the best row, where there are any."""
        if self._turn % _TURNS != _LOCAL_TURN or self._best is None:
            return made
        near = np.zeros(len(made), bool)
        near[self._model.near_number(self._best[1])] = True
        near &= made
        return near if near.any() else made

    # What things are worth and cost.

    def _gains(self, wanted: NDArray[np.bool_]) -> Floats:
        """Of all rows, by the last look where that may serve one more choice."""
        if self._seen is not None and 0 < len(self._since) < self._pace.choices(self._costs.trial_s):
            gains = self._apart(self._seen)
            if (gains[wanted] > 0).any():
                return gains
        with self._pace.look():
            self._seen, self._since = self._look(wanted), []
        return self._seen

    def _chosen(self) -> None:
        """A row was chosen."""
        self._unlooked += bool(self._since)

    def _apart(self, gains: Floats) -> Floats:
        """Without what the rows begun since will tell most of: those one step from them."""
        gains = gains.copy()
        for number in self._since:
            gains[number] = 0.0
            gains[self._model.near_number(number)] = 0.0
        return gains

    def _look(self, wanted: NDArray[np.bool_]) -> Floats:
        """Of all rows; where the model looks at a pool, of the best made builds' rows as well."""
        gains = self._model.gains(None, self._unlooked)
        unlooked = wanted & (gains == 0)
        if unlooked.any():
            best = sorted(self._best_of, key=self._best_of.__getitem__)[:_NAMED_BUILDS]
            named = np.concatenate([np.zeros(0, np.int64), *(self._rows_of(build) for build in best)])
            named = np.sort(named[unlooked[named]])
            if len(named):
                gains = gains.copy()
                gains[named] = self._model.gains(named, self._unlooked)
        return gains

    def _seconds(self, loaded: Config | None, price_s: float) -> Callable[[Ints], Floats]:
        """What each of some rows takes if its artifact is there."""
        here = -1 if loaded is None else self._number_of.get(loaded, -1)
        costs = self._costs

        def seconds(rows: Ints) -> Floats:
            found: Floats = costs.trial_s + price_s + costs.load_s * (self._build[rows] != here)
            return found

        return seconds

    def _seconds_with_build(self, price_s: float) -> Callable[[Ints], Floats]:
        if self._shared_at != len(self._costs.builds):
            self._shared_at = len(self._costs.builds)
            self._share = self._costs.builds.of_coded(self._codes) / self._costs.jobs
            self._share[list(self._held)] = 0.0
        there = self._seconds(None, price_s)
        return lambda rows: there(rows) + self._share[self._build[rows]]

    def _worth_waiting(self, price_s: float) -> float:
        """The most gain a second that a build under way offers, counted from now."""
        if price_s <= 0:
            return 0.0
        after_s = self._costs.trial_s + self._costs.load_s + price_s
        return max(
            (
                gain / (self._costs.builds.of(self._builds[build]) / 2 + after_s)
                for build, gain in self._promised.items()
            ),
            default=0.0,
        )
