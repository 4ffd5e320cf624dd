"""The search for one problem: proposes builds, has them built, sweeps their launch points, and keeps the best.

Decides what is measured next and for how long; measuring, judging finalists and SQL live elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tktune.build.artifact import BuildOutcome
from tktune.core import status
from tktune.core.config import Config
from tktune.core.roles import broken_rules
from tktune.families.base import Family
from tktune.search.budget import Budget, StopSignal
from tktune.search.building import Batch, Builder
from tktune.search.drift import DRIFT, DriftWatch
from tktune.search.events import Listener, Note, TrialDone, TrialStarted
from tktune.search.measuring import Bench, slowest_rank_us
from tktune.search.place import BuildPlace
from tktune.search.racing import RaceMargin
from tktune.search.resume import QUARANTINE_AFTER, Known
from tktune.search.sampler import ConfigSampler
from tktune.search.stop_rule import StopRule

# After this share of the budget no new build is proposed: what is left goes to launch points of the best builds.
_EXPLORE_SHARE = 0.8
# Launch points of the best builds that are tried before the stop rule may end the run.
_DEEPEN_LEAST = 12


@dataclass(frozen=True)
class Found:
    """What a search came to: times by config (microseconds), the best, and how much was done.

    `margin` is the factor by which a config must be slower than another to be clearly slower here.
    """

    times_us: Mapping[Config, float]
    best: Config | None
    measured: int
    built: int
    reason: str
    out_of_time: bool
    margin: float


class Search:
    """One problem's search in one run.

    `places` are all builds of the feasible set. The build of `default` comes first, then those of `preferred`
    configs, then `seeds` (builds), then what the sampler asks. A default or preferred config is its build's first;
    `starts` are measured right after the default. `rule` may end the search before its budget does (None: it may not).
    """

    def __init__(
        self,
        *,
        places: Mapping[Config, BuildPlace],
        default: Config,
        preferred: Sequence[Config],
        starts: Sequence[Config] = (),
        rule: StopRule | None = None,
        seeds: Sequence[Config],
        sampler: ConfigSampler,
        known: Known,
        family: Family,
        build_of: Callable[[Config], Config],
        builder: Builder,
        bench: Bench,
        budget: Budget,
        stop: StopSignal,
        listener: Listener,
        batch_builds: int,
    ) -> None:
        self._places = places
        self._default = default
        self._preferred = [default, *starts, *preferred]
        self._starts = [config for config in starts if config != default]
        seeds = [*map(build_of, [*starts, *preferred]), *seeds]
        self._seeds = [seed for seed in dict.fromkeys(seeds) if not places[seed].told]
        self._sampler = sampler
        self._family = family
        self._build_of = build_of
        self._builder = builder
        self._bench = bench
        self._budget = budget
        self._stop = stop
        self._listener = listener
        self._batch_builds = batch_builds
        self._quota = 4 if budget.trials is None else min(max(round(budget.trials / 12), 2), 8)
        points = sum(len(place.points) for place in places.values())
        self._wanted = None if budget.trials is None else min(budget.trials, points)
        self._ends = dict(known.ends)
        self._proposed: set[Config] = set()
        self._margin = RaceMargin()
        self._rule = rule
        self._enough = ""
        self._watch = DriftWatch(bench.gang, bench.plan.seeds[0], self._note)
        self.times_us: dict[Config, float] = {}
        self.best: Config | None = None
        self.measured = 0
        self.built = 0
        self._explore_share = _EXPLORE_SHARE
        self._recall(known)
        self._default_tried = default in known.closed or places[build_of(default)].exhausted

    # What earlier runs left.

    def _recall(self, known: Known) -> None:
        for config, row in known.final.items():
            place = self._places[self._build_of(config)]
            if row.status == status.BUILD_FAILED or row.status == status.refused("compiler"):
                place.failed = True
            scored = row.status in (status.OK, status.CENSORED)
            drift = (row.detail or {}).get(DRIFT, 1.0)
            time_us = None if row.time_us is None or not scored else row.time_us / drift
            place.sweep.tell(config, time_us)
            if row.status == status.OK and time_us is not None:
                self._consider(config, time_us)
            self._noted(time_us)
        for config in known.quarantined:
            sweep = self._places[self._build_of(config)].sweep
            if config in known.vanished:
                sweep.drop(config)  # says nothing of its build
            else:
                sweep.tell(config, None)
        for config in known.ends.keys() - known.closed:
            place = self._places[self._build_of(config)]
            place.sweep.drop(config)
            place.again.append(config)
        for build, place in self._places.items():
            if not place.sweep.told and not place.again:
                continue
            swept = place.sweep.told >= self._quota or self._worthless(place)
            if place.failed or (not place.again and (swept or place.exhausted)):
                self._tell(place)
            else:
                self._seeds.insert(0, build)
        self._seeds = [seed for seed in dict.fromkeys(self._seeds) if not self._places[seed].told]

    # The search itself.

    def run(self) -> Found:
        """Search until the budget, the space or the user ends it. Raises what cache, gang and store raise."""
        self._enough = self._rule_says()  # an earlier run may have come this far
        self._explore()
        self._deepen(promising=True)
        self._explore_share = 1.0  # the best builds have nothing more to give
        self._explore()
        self._deepen(promising=False)
        budget = self._budget
        out_of_time = not self._stop.requested and budget.trials_left != 0 and budget.search_over
        return Found(
            self.times_us,
            self.best,
            self.measured,
            self.built,
            self._reason(),
            out_of_time,
            self._margin.value,
        )

    def _explore(self) -> None:
        waiting = self._start(self._propose())
        while waiting is not None and not self._over():
            outcomes = waiting.wait()
            ahead = self._start(self._propose()) if self._builder.ahead else None
            for build, outcome in outcomes.items():
                self._take(self._places[build], outcome)
            self._begin(list(outcomes))
            for build in outcomes:
                if self._rule_says():
                    break
                self._sweep(self._places[build])
            waiting = ahead or self._start(self._propose())

    def _begin(self, builds: Sequence[Config]) -> None:
        """The default, and right after it what the user wants tried, whichever of them these builds hold."""
        for config in [self._default, *self._starts] if self._starts else ():
            place = self._places[self._build_of(config)]
            here = place.build in builds and place.artifact is not None and config in place.sweep
            if here and not self._over():
                place.sweep.drop(config)
                self._trial(place, config)

    def _over(self) -> bool:
        if self._stop.requested:
            return True
        return self._default_tried and (self._budget.search_over or bool(self._enough))

    def _rule_says(self) -> str:
        """Why another minute is not worth it; "" while it is, or nobody asks."""
        budget = self._budget
        if self._rule is None or not self._default_tried or not budget.used:
            return ""
        unseen = sum(len(place.sweep) for place in self._places.values() if not place.exhausted)
        left = unseen if budget.trials_left is None else min(unseen, budget.trials_left)
        noise = self._margin.noise(self._bench.plan.iterations)
        return self._rule.verdict(noise, budget.spent_s / budget.used, left, budget.search_left_s)

    def _propose(self) -> list[BuildPlace]:
        """The next builds: the default's, those an earlier run left half swept, seeds, then the sampler's."""
        if not self._default_tried:
            self._seeds.insert(0, self._build_of(self._default))
        elif self._over() or self._budget.search_share >= self._explore_share:
            return []
        elif says := self._rule_says():
            if self._explore_share == 1.0:
                self._enough = says
            return []
        room = self._batch_builds
        left = self._budget.trials_left
        if left is not None:
            room = min(room, max(1, -(-left // self._quota)))
        if not self._default_tried:
            room = max(room, 1 + len(self._starts))
        found: list[BuildPlace] = []
        while len(found) < room:
            build = self._seeds.pop(0) if self._seeds else next(iter(self._sampler.ask(1)), None)
            if build is None:
                break
            place = self._places[build]
            if build in self._proposed or place.told or place.exhausted:
                continue
            self._proposed.add(build)
            found.append(place)
        return found

    def _start(self, places: Sequence[BuildPlace]) -> Batch | None:
        return self._builder.start({place.build: place.spec for place in places}) if places else None

    def _take(self, place: BuildPlace, outcome: BuildOutcome) -> None:
        """Note what was built; file a build that failed under the config that would have been run first."""
        place.artifact = outcome.artifact
        place.build_seconds = outcome.seconds
        for sentence in outcome.mismatches:
            self._note("formula", sentence)
        if outcome.artifact is not None:
            self.built += not outcome.cached
            self._bench.file_artifact(place)
            return
        if self._stop.requested:
            return  # an interrupted compiler is no verdict on the config
        config = self._next(place)
        place.failed = True
        if config is not None:
            end = status.refused("compiler") if outcome.rejected else status.BUILD_FAILED
            self._start_event(config)
            self._bench.file(config, place.digest, end, outcome.error_sentence, outcome.seconds * 1e6)
            self._ended(place, config, end, None, outcome.error_sentence)
        self._tell(place)

    def _sweep(self, place: BuildPlace) -> None:
        """Measure launch points of one build until its quota, its hopelessness or the budget ends it."""
        if place.artifact is None:
            return
        retries, place.again = place.again, []  # of earlier runs
        while retries and not self._over():
            self._trial(place, retries.pop(0))
        place.again += retries
        while not self._over() and place.sweep.told < self._quota and not self._worthless(place):
            config = self._next(place)
            if config is None:
                break
            self._trial(place, config)
        while place.again and not self._over():
            self._trial(place, place.again.pop(0))
        if not self._over() or place.sweep.told:
            self._tell(place)

    def _next(self, place: BuildPlace) -> Config | None:
        """The next launch point of a build."""
        for config in self._preferred:
            if config in place.sweep:
                place.sweep.drop(config)
                return config
        return place.sweep.next(self.best)

    def _worthless(self, place: BuildPlace) -> bool:
        best_us = None if self.best is None else self.times_us[self.best]
        return place.sweep.closed() or place.sweep.hopeless(best_us, self._margin.value)

    def _deepen(self, *, promising: bool) -> None:
        """Spend what is left on more launch points of builds that were swept, the best build first."""
        before = self.measured
        while not self._over():
            if self.measured - before >= _DEEPEN_LEAST:
                self._enough = self._rule_says()
            places = [p for p in self._places.values() if p.sweep.best_us is not None and not p.exhausted]
            places = [p for p in places if not (promising and self._worthless(p))]
            if not places or self._enough:
                return
            place = min(places, key=lambda p: (p.sweep.best_us or 0.0, p.digest))
            if place.artifact is None:
                self._take(place, self._builder.start({place.build: place.spec}).wait()[place.build])
                if place.artifact is None:
                    continue
            config = place.again.pop(0) if place.again else self._next(place)
            if config is not None:
                self._trial(place, config)

    # One trial.

    def _trial(self, place: BuildPlace, config: Config) -> None:
        if self._watch.due(self._budget.run_s):
            self._watch.look(self._margin.sigma, self._budget.run_s)
        self._start_event(config)
        gang = self._bench.gang
        broken = broken_rules(self._family.roles(config, gang.problem, gang.device))
        if broken:
            end = status.refused(broken[0].rule)
            self._bench.file(config, place.digest, end, broken[0].sentence)
            self._ended(place, config, end, None, broken[0].sentence)
            return
        best_us = None if self.best is None else self.times_us[self.best]
        began = self._budget.run_s
        drift = self._watch.factor
        limit_us = None if config == self._default or best_us is None else best_us * drift
        result = self._bench.trial(config, place, limit_us, self._margin.value, drift)
        if result is None:
            self._listener.on_event(Note(f"Another run is measuring {config}; it is left to that one."))
            self._default_tried = self._default_tried or config == self._default
            return
        self._budget.note_trial(self._budget.run_s - began)
        self._watch.ended()
        if result.status == status.OK:
            us = slowest_rank_us(result)
            self._margin.note(us)
            is_default = config == self._default
            self._watch.passed(config, place, us, is_default=is_default, now_s=self._budget.run_s)
        self._ended(place, config, result.status, result.time_us, result.sentence)

    def _start_event(self, config: Config) -> None:
        self._listener.on_event(TrialStarted(config, self._budget.used + 1, self._wanted))

    def _ended(
        self, place: BuildPlace, config: Config, end: str, time_us: float | None, sentence: str
    ) -> None:
        if config == self._default:
            self._default_tried = True
        scaled_us = None if time_us is None else time_us / self._watch.factor
        if end == status.OK and scaled_us is not None:
            self._consider(config, scaled_us)
        if not status.is_final(end):
            self._ends[config] = self._ends.get(config, 0) + 1
        if status.is_final(end) or self._ends[config] >= QUARANTINE_AFTER:
            scored_us = scaled_us if end in (status.OK, status.CENSORED) else None
            place.sweep.tell(config, scored_us)
            self._noted(scored_us)
            self._budget.used += 1
            self.measured += 1
        else:
            place.again.append(config)
        if not status.is_final(end) and config not in place.again:
            self._note("quarantine", f"{config} ended twice without a verdict and is quarantined: {sentence}")
        best_us = None if self.best is None else self.times_us[self.best]
        self._listener.on_event(
            TrialDone(config, end, time_us, best_us, self.best, self._budget.used, self._wanted, sentence)
        )

    def _consider(self, config: Config, time_us: float) -> None:
        self.times_us[config] = time_us
        if self.best is None or time_us < self.times_us[self.best]:
            self.best = config

    def _noted(self, time_us: float | None) -> None:
        if self._rule is not None:
            self._rule.note(time_us)

    def _tell(self, place: BuildPlace) -> None:
        if not place.told:
            place.told = True
            self._sampler.tell(place.build, None if place.failed else place.sweep.best_us)

    def _note(self, kind: str, sentence: str, detail: Mapping[str, Any] | None = None) -> None:
        self._bench.event(kind, sentence, dict(detail or {}))
        self._listener.on_event(Note(sentence))

    def _reason(self) -> str:
        if self._stop.requested:
            return "you stopped it; the same command continues."
        if self._budget.trials_left == 0:
            return f"all {self._budget.trials} configs of the budget are measured."
        if self._budget.search_over:
            return f"its {self._budget.seconds:g} seconds are used up; a larger budget continues."
        if self._enough:
            return self._enough
        return "every feasible config is measured."
