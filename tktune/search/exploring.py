"""The search for one problem: keeps compilers and lanes busy with what its chooser says, and stops when it should.

What is worth doing next is the chooser's word, what configs came to the ledger's; judging finalists lives elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tktune.build.artifact import BuildOutcome
from tktune.core import status
from tktune.core.build_spec import BuildSpec
from tktune.core.config import Config
from tktune.core.roles import broken_rules
from tktune.families.base import Family
from tktune.gang.noise import NoiseFloor
from tktune.gang.trial import TrialResult
from tktune.search.account import COMMITTING, DECIDING, OTHER, WAITING, Account
from tktune.search.budget import Budget, StopSignal
from tktune.search.building import Builder
from tktune.search.choosing import Chooser
from tktune.search.costs import Costs, trial_price_s
from tktune.search.events import Listener, Note
from tktune.search.found import Found
from tktune.search.lane_work import (
    LAUNCHES_OF_A_HALF,
    NOISE_LAUNCHES,
    join_work,
    noise_work,
    score_us,
    trial_work,
)
from tktune.search.lanes import Ended, Job, Lane, Lanes
from tktune.search.ledger import Ledger
from tktune.search.measuring import Bench, slowest_rank_us
from tktune.search.place import BuildPlace
from tktune.search.stop_rule import may_speak_soon

_RULE_EVERY = 4  # trials between two questions to the stop rule
_LATE = 0.4  # of the budget: enough is known by then, and a search may end early
_CHOSEN_AT_ONCE = 2  # builds, while a lane measures
_NOISE_SHARE = 0.05  # of the seconds left that measuring the noise may take


class Search:
    """One problem's search in one run.

    The default is measured first, then `starts` and `preferred` configs, then those in whose midst the last run was
    stopped and those that ended without a verdict, then what the chooser says. With a builder that builds ahead, compilers
    and lanes work side by side. A lane of some depth is given its next trial while it is at the one before: the row of each
    is committed before it can begin. `late` is called once: when a good part of the budget is used up, or when the stop rule may
    soon end a search that stands still.
    """

    def __init__(
        self,
        *,
        places: Mapping[Config, BuildPlace],
        default: Config,
        preferred: Sequence[Config],
        starts: Sequence[Config],
        chooser: Chooser,
        ledger: Ledger,
        costs: Costs,
        family: Family,
        builder: Builder,
        lanes: Lanes,
        bench: Bench,
        budget: Budget,
        stop: StopSignal,
        listener: Listener,
        account: Account,
        late: Callable[[], None] = lambda: None,
    ) -> None:
        self._account = account
        self._late, self._is_late = late, False
        self._places = places
        self._default = default
        self._chooser = chooser
        self._ledger = ledger
        self._costs = costs
        self._family = family
        self._builder = builder
        self._lanes = lanes
        self._bench = bench
        self._budget = budget
        self._stop = stop
        self._listener = listener
        again, self._queue = set(ledger.again), []
        for config in dict.fromkeys([default, *starts, *preferred, *ledger.interrupted, *ledger.again]):
            place = ledger.place(config)
            if not place.closed and (config in place.left or config in again):
                self._queue.append(config)
                chooser.begin(config)
        ledger.again.clear()
        self._at_least = 1 + len(starts)  # builds of the first batch
        self._gathering = 0  # builds of the batch that is being chosen
        self._gathered: dict[Config, BuildSpec] = {}
        self._enough = ""
        self._asked_at = 0
        self._best_at = 0  # trials when the best of now was found
        self._anchor: tuple[Config, BuildPlace, Sequence[float]] | None = None
        self.built = 0

    def run(self) -> Found:
        """Search until the budget, the space or the user ends it. Raises what cache, gang and store raise."""
        self._ask_whether_enough()  # an earlier run may have come this far
        try:
            while True:
                self._hear()
                if self._over():
                    break
                if self._begin_some():
                    continue
                if not (self._lanes.busy or self._lanes.starting or self._builder.under_way):
                    break
                self._wait()
            while self._lanes.busy:  # what runs may end
                self._wait()
                self._hear()
        finally:
            self._builder.cancel()
            for job in self._lanes.flight:
                if job.trial_id is not None:
                    self._bench.abandon(job.trial_id, "The run was stopped.")
        budget, ledger = self._budget, self._ledger
        out_of_time = not self._stop.requested and budget.trials_left != 0 and budget.search_over
        return Found(
            ledger.times_us,
            ledger.best,
            ledger.measured,
            self.built,
            self._reason(),
            out_of_time,
            ledger.margin.value,
            ledger.margin.noise(self._bench.plan.iterations),
            any(lane.watch.moved for lane in self._lanes.all),
        )

    def _wait(self) -> None:
        with self._account.driver(WAITING if self._builder.under_way else OTHER):
            self._builder.wait()

    def _over(self) -> bool:
        if self._stop.requested:
            return True
        ledger, budget = self._ledger, self._budget
        soon = ledger.ruled and may_speak_soon(budget.run_s, ledger.measured, self._best_at)
        if not self._is_late and (soon or budget.search_share >= _LATE):
            self._is_late = True
            self._late()
        if self._ledger.measured >= self._asked_at + _RULE_EVERY and not self._enough:
            self._ask_whether_enough()
        return self._ledger.default_tried and (self._budget.search_over or bool(self._enough))

    def _ask_whether_enough(self) -> None:
        self._asked_at = self._ledger.measured
        with self._account.driver(DECIDING):
            self._enough = self._ledger.says_enough(self._bench.plan.iterations)

    # What comes back.

    def _hear(self) -> None:
        for build, outcome in self._builder.finished():
            self._take(self._places[build], outcome)
        for lane, ended in self._lanes.ended():
            self._heard(lane, ended)

    def _take(self, place: BuildPlace, outcome: BuildOutcome) -> None:
        """Note what was built; file a build that failed under the config that would have been run first."""
        if outcome.cancelled:  # says nothing of the config
            place.ordered = False
            return
        place.artifact, place.build_seconds = outcome.artifact, outcome.seconds
        if not outcome.cached:
            self._costs.builds.note(place.build, outcome.seconds)
        for sentence in outcome.mismatches:
            self._note("formula", sentence)
        if outcome.artifact is not None:
            self.built += not outcome.cached
            with self._account.driver(COMMITTING):
                self._bench.file_artifact(place)
            self._chooser.made(place.build)
            return
        waiting = [config for config in self._queue if self._ledger.place(config) is place]
        config = next(iter([*waiting, *place.left]), None)
        self._queue = [config for config in self._queue if config not in waiting]
        left = self._budget.trials_left
        within = left is None or left > len(self._lanes.flight) or config == self._default
        if config is not None and within:
            end = status.refused("compiler") if outcome.rejected else status.BUILD_FAILED
            self._ledger.started(config)
            self._bench.file(config, place.digest, end, outcome.error_sentence, outcome.seconds * 1e6)
            self._ended(config, end, outcome.error_sentence)
        self._ledger.close(place, failed=True)

    def _heard(self, lane: Lane, ended: Ended) -> None:
        job, result = ended.job, ended.result
        for kind, sentence, detail in ended.said:
            self._note(kind, sentence, detail)
        if isinstance(result, NoiseFloor):
            self._ledger.margin.floor(result.relative, LAUNCHES_OF_A_HALF)
        elif result is not None and job.trial_id is not None:
            device = lane.first if len(self._lanes.all) > 1 else None
            with self._account.driver(COMMITTING):
                self._bench.finish(job.trial_id, result, job.place, ended.drift, device)
            self._budget.note_trial(ended.seconds)
            self._costs.note_trial(ended.seconds - ended.load_s)
            if ended.load_s:
                self._costs.note_load(ended.load_s)
            with self._account.driver(DECIDING):
                self._judged(lane, job, result, ended.drift)
        if ended.error is None or job.trial_id is None:
            return
        if result is None:
            self._bench.abandon(job.trial_id, str(ended.error))
            self._queue.insert(0, job.config)
        if not self._lanes.lasting:
            raise ended.error
        self._note("lane", f"Device {lane.first} is out, and the search goes on without it: {ended.error}")

    def _judged(self, lane: Lane, job: Job, result: TrialResult, drift: float) -> None:
        us = [one / drift for one in slowest_rank_us(result)]
        time_us = None if result.time_us is None else score_us(result) / drift
        if result.status == status.OK:
            self._ledger.margin.note(us)
            if self._anchor is None:
                self._anchor = (job.config, job.place, us)
                lane.joined = True
        self._ended(job.config, result.status, result.sentence, result.time_us, time_us, us, drift)
        if result.status == status.OK and job.config == self._default:
            self._measure_noise(lane, job)

    def _ended(
        self,
        config: Config,
        end: str,
        sentence: str,
        raw_us: float | None = None,
        time_us: float | None = None,
        us: Sequence[float] = (),
        drift: float = 1.0,
    ) -> None:
        quarantined = self._ledger.ended(
            config, end, sentence, raw_us=raw_us, time_us=time_us, us=us, drift=drift
        )
        if self._ledger.best == config:
            self._best_at = self._ledger.measured
        if quarantined:
            self._note("quarantine", quarantined)
        self._queue += self._ledger.again
        self._ledger.again.clear()
        if self._ledger.place(config).closed:
            self._queue = [queued for queued in self._queue if not self._ledger.place(queued).closed]

    # What is begun.

    def _begin_some(self) -> bool:
        """Give compilers and lanes something to do; whether anything was begun."""
        ahead, measuring = self._builder.ahead, bool(self._lanes.flight)
        began = self._order() if ahead and not measuring else False
        for lane in self._lanes.free:
            began |= self._occupy(lane)
        if ahead and measuring:  # lanes first: of compilers there are many
            began |= self._order()
        if began or ahead or self._lanes.busy:
            return began
        wanted = self._wanted(max(self._builder.jobs, self._at_least))
        self._at_least = 1
        with self._account.driver(WAITING):
            outcomes = self._builder.build(wanted, lambda: self._stop.requested) if wanted else {}
        for build, outcome in outcomes.items():
            self._take(self._places[build], outcome)
        return bool(wanted) or any(self._ledger.place(config).artifact for config in self._queue)

    def _order(self) -> bool:
        """Have compilers build ahead, unless what they built waits to be measured; whether anything was chosen or begun.

        Where lanes measure meanwhile a few builds are chosen at a time, so that lanes are served in between.
        """
        if not self._gathering:
            unmeasured = sum(self._ledger.place(config).artifact is not None for config in self._queue)
            room, jobs = self._builder.room, self._builder.jobs
            if room < max(1, jobs // 4) or unmeasured > max(len(self._lanes.all), jobs // 2):
                return False
            self._gathering, self._at_least = max(room, self._at_least), 1
        at_once = _CHOSEN_AT_ONCE if self._lanes.flight else self._gathering
        chosen = self._wanted(min(at_once, self._gathering - len(self._gathered)))
        self._gathered |= chosen
        if chosen and len(self._gathered) < self._gathering:
            return True
        ordered, self._gathered, self._gathering = self._gathered, {}, 0
        self._builder.order(ordered)
        return bool(ordered)

    def _wanted(self, count: int) -> dict[Config, BuildSpec]:
        """Builds to make next: those of what is queued, then the chooser's. What they are made for is queued."""
        left = self._budget.trials_left
        if left is not None:  # each build is worth one trial at least
            ready = sum(self._ledger.place(config).artifact is not None for config in self._queue)
            count = min(count, left - ready - self._builder.under_way - len(self._gathered))
        places: dict[Config, BuildPlace] = {}
        for config in self._queue:
            place = self._ledger.place(config)
            if place.artifact is None and not place.ordered and len(places) < count:
                places[place.build] = place
        if len(places) < count:
            with self._account.driver(DECIDING):
                chosen = self._chooser.build(count - len(places), self._price_s())
            for config in chosen:
                place = self._ledger.place(config)
                self._queue.append(config)
                if place.artifact is None and not place.ordered:
                    places[place.build] = place
        for place in places.values():
            place.ordered = True
        return {build: place.spec for build, place in places.items()}

    def _occupy(self, lane: Lane) -> bool:
        """Give a lane the next thing to measure; whether there was one."""
        if self._anchor is not None and not lane.joined:
            self._join(lane)
            return True
        if self._anchor is None and (lane is not self._lanes.lasting[0] or self._lanes.busy):
            return False  # devices are not comparable before something passed
        if any(self._ledger.doubted(job.config) for job in lane.flight):
            return False
        config = self._next(lane)
        if config is None:
            return False
        self._start(lane, config)
        return True

    def _next(self, lane: Lane) -> Config | None:
        ledger, left = self._ledger, self._budget.trials_left
        if left is not None and ledger.default_tried and len(self._lanes.flight) >= left:
            return None
        if not ledger.default_tried:
            ready = ledger.place(self._default).artifact is not None and self._default in self._queue
            return self._pop(self._default) if ready else None
        for config in self._queue:
            if ledger.place(config).artifact is not None:
                if lane.flight and ledger.doubted(config):
                    return (
                        None  # where a driver or a host dies, the row of no other config is open beside its
                    )
                return self._pop(config)
        with self._account.driver(DECIDING):
            ahead = self._builder.ahead
            return self._chooser.measure(lane.will_hold, self._price_s(), building=not ahead)

    def _pop(self, config: Config) -> Config:
        self._queue.remove(config)
        return config

    def _price_s(self) -> float:
        budget = self._budget
        return trial_price_s(budget.trials_left, budget.search_left_s, self._costs.trial_s)

    # One trial.

    def _start(self, lane: Lane, config: Config) -> None:
        place, gang = self._ledger.place(config), lane.gang
        broken = broken_rules(self._family.roles(config, gang.problem, gang.device))
        if not broken:
            self._lanes.start(lane)
            with self._account.driver(COMMITTING):
                trial_id = self._bench.begin(config, place)
            if trial_id is None:
                self._listener.on_event(Note(f"Another run is measuring {config}; it is left to that one."))
                self._ledger.given_up(config)
                return
        with self._account.driver(DECIDING):
            self._ledger.started(config)
        if broken:
            end = status.refused(broken[0].rule)
            self._bench.file(config, place.digest, end, broken[0].sentence)
            self._ended(config, end, broken[0].sentence)
            return
        is_default = config == self._default
        work = trial_work(config, place, self._bench, self._ledger, self._budget, is_default=is_default)
        self._lanes.submit(lane, Job(config, place, trial_id, work))

    # What is learnt of the machine.

    def _join(self, lane: Lane) -> None:
        """Have a lane measure the anchor, so that its times can be compared with those of the first."""
        assert self._anchor is not None
        config, place, us = self._anchor
        lane.joined = True
        self._lanes.submit(lane, Job(config, place, None, join_work(config, place, us, self._budget)))

    def _measure_noise(self, lane: Lane, job: Job) -> None:
        """Measure the default against itself, once, when there is time for it."""
        left_s, plan = self._budget.search_left_s, self._bench.plan
        takes_s = NOISE_LAUNCHES / (plan.iterations * len(plan.seeds)) * self._costs.trial_s
        if self._over() or (left_s is not None and takes_s > _NOISE_SHARE * left_s):
            return
        work = noise_work(job.config, plan.seeds[0])
        self._lanes.submit(lane, Job(job.config, job.place, None, work))

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
