"""What a search knows of the configs of its problem: their ends, the best, what is tried again, how noisy launches are.

Keeps count and tells the chooser, the stop rule and the listener; chooses, measures and files nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tktune.core import status
from tktune.core.config import Config
from tktune.search.budget import Budget
from tktune.search.choosing import Chooser
from tktune.search.drift import DRIFT
from tktune.search.events import Listener, TrialDone, TrialStarted
from tktune.search.place import BuildPlace
from tktune.search.racing import RaceMargin
from tktune.search.resume import QUARANTINE_AFTER, Known
from tktune.search.stop_rule import StopRule


class Ledger:
    """The ends of one problem's configs, of earlier runs (`known`) and of this one.

    Times are comparable: measured microseconds divided by how much slower the machine, or the device, was then.
    """

    def __init__(
        self,
        places: Mapping[Config, BuildPlace],
        build_of: Callable[[Config], Config],
        default: Config,
        known: Known,
        chooser: Chooser,
        budget: Budget,
        rule: StopRule | None,
        listener: Listener,
    ) -> None:
        self._places = places
        self._place_of: dict[Config, BuildPlace] = {}  # of configs that were asked for
        self._build_of = build_of
        self._default = default
        self._chooser = chooser
        self._budget = budget
        self._rule = rule
        self._listener = listener
        points = sum(len(place.points) for place in places.values())
        self._wanted = None if budget.trials is None else min(budget.trials, points)
        self._ends = dict(known.ends)
        self.margin = RaceMargin()
        self.times_us: dict[Config, float] = {}
        self._shown_us: dict[Config, float] = {}  # stored medians, made comparable: what people are shown
        self.first_us: dict[Config, tuple[float, ...]] = {}  # first launches of those this run measured
        self.best: Config | None = None
        self.measured = 0
        self.again: list[Config] = []  # ended without a verdict, once
        self.interrupted = [config for config in known.interrupted if config not in known.closed]
        self._recall(known)
        self.default_tried = default in known.closed or self.place(default).closed

    def place(self, config: Config) -> BuildPlace:
        place = self._place_of.get(config)
        if place is None:
            place = self._place_of[config] = self._places[self._build_of(config)]
        return place

    def doubted(self, config: Config) -> bool:
        """Whether `config` has ended without a verdict, and may take its driver or its host with it."""
        return self._ends.get(config, 0) > 0

    @property
    def best_us(self) -> float | None:
        return None if self.best is None else self.times_us[self.best]

    @property
    def ruled(self) -> bool:
        """Whether a rule may end the search before its budget is used up."""
        return self._rule is not None

    @property
    def left(self) -> int:
        """Configs that may still be issued."""
        return len(self.again) + sum(len(place.left) for place in self._places.values() if not place.closed)

    # What earlier runs left.

    def _recall(self, known: Known) -> None:
        told: list[tuple[Config, float | None]] = []
        for config, row in known.final.items():
            place = self.place(config)
            place.left.pop(config, None)
            if row.status in (status.BUILD_FAILED, status.refused("compiler")):
                self.close(place)
            scored = row.status in (status.OK, status.CENSORED)
            drift = (row.detail or {}).get(DRIFT, 1.0)
            time_us = None if row.time_us is None or not scored else row.time_us / drift
            place.ended(passed=time_us is not None)
            if row.status == status.OK and time_us is not None:
                self._consider(config, time_us)
                self._shown_us[config] = time_us
            told.append((config, time_us))
            self._noted(time_us)
        for config in known.quarantined:
            place = self.place(config)
            place.left.pop(config, None)
            if config in known.vanished:
                self._chooser.drop([config])  # says nothing of its build
            else:
                place.ended(passed=False)
                told.append((config, None))
        self._chooser.tell(told)
        for config in known.ends.keys() - known.closed:
            self.again.append(config)
            self._chooser.begin(config)
            self.place(config).left.pop(config, None)
        self.again.sort(key=lambda config: config.digest)
        for place in self._places.values():
            if place.closed:
                self.close(place)

    # What this run does.

    def started(self, config: Config) -> None:
        """`config` is about to be measured."""
        self.place(config).left.pop(config, None)
        self._chooser.begin(config)
        self._listener.on_event(TrialStarted(config, self._budget.used + 1, self._wanted))

    def ended(
        self,
        config: Config,
        end: str,
        sentence: str,
        *,
        raw_us: float | None = None,
        time_us: float | None = None,
        us: Sequence[float] = (),
        drift: float = 1.0,
    ) -> str:
        """A trial ended. `raw_us` is its stored time, `drift` what makes it comparable, `time_us` the comparable score, `us`
        its launches, comparable too.

        Returns a sentence when the config is now quarantined.
        """
        place = self.place(config)
        self.default_tried |= config == self._default
        if end == status.OK and time_us is not None:
            self._consider(config, time_us)
            self._shown_us[config] = time_us if raw_us is None else raw_us / drift
            self.first_us[config] = tuple(us)
        if not status.is_final(end):
            self._ends[config] = self._ends.get(config, 0) + 1
        quarantined = ""
        if status.is_final(end) or self._ends[config] >= QUARANTINE_AFTER:
            scored_us = time_us if end in (status.OK, status.CENSORED) else None
            self._chooser.tell([(config, scored_us)])
            place.ended(passed=scored_us is not None)
            if place.closed:
                self.close(place)
            self._noted(scored_us)
            self._budget.used += 1
            self.measured += 1
            if not status.is_final(end):
                quarantined = f"{config} ended twice without a verdict and is quarantined: {sentence}"
        else:
            self.again.append(config)
        best_us = None if self.best is None else self._shown_us[self.best]
        self._listener.on_event(
            TrialDone(config, end, raw_us, best_us, self.best, self._budget.used, self._wanted, sentence)
        )
        return quarantined

    def given_up(self, config: Config) -> None:
        """Another run measures `config`, so this one does not."""
        self.default_tried |= config == self._default
        self._chooser.drop([config])

    def close(self, place: BuildPlace, *, failed: bool = False) -> None:
        """No more points of this build are to be had; `failed`: it could not be built."""
        place.failed |= failed
        self._chooser.drop(place.points)
        self.again = [config for config in self.again if config not in place.points]

    def says_enough(self, iterations: int) -> str:
        """Why another minute is not worth it; "" while it is, or nobody asks."""
        budget = self._budget
        if self._rule is None or not self.default_tried or not budget.used:
            return ""
        left = self.left if budget.trials_left is None else min(self.left, budget.trials_left)
        noise = self.margin.noise(iterations)
        return self._rule.verdict(noise, budget.spent_s / budget.used, left, budget.search_left_s)

    def _consider(self, config: Config, time_us: float) -> None:
        self.times_us[config] = time_us
        if self.best is None or time_us < self.times_us[self.best]:
            self.best = config

    def _noted(self, time_us: float | None) -> None:
        if self._rule is not None:
            self._rule.note(time_us)
