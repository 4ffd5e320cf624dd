"""One problem in one run of a study: recall what is known, search, verify finalists, attribute the winner's time.

The steps in their order; each step's own decisions are in its module.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from tktune.build.cache import ArtifactCache
from tktune.core.build_spec import BuildSpec
from tktune.core.canonical import digest
from tktune.core.config import Config
from tktune.core.space import Space
from tktune.families.base import Family
from tktune.gang.gang import Gang
from tktune.gang.trial import TrialPlan
from tktune.search.account import ACCOUNT, FINALISTS, PREPARING, Account, Spent
from tktune.search.aside import Aside
from tktune.search.budget import Budget, StopSignal
from tktune.search.building import Builder
from tktune.search.events import Finished, Listener, Note, Resumed, SpaceReady
from tktune.search.exploring import Search
from tktune.search.finals import Finals
from tktune.search.found import Found
from tktune.search.gangs import Gangs, SeatedGang
from tktune.search.lanes import Lane, Lanes
from tktune.search.ledger import Ledger
from tktune.search.measuring import Bench
from tktune.search.place import BuildPlace
from tktune.search.preparing import Preparation
from tktune.search.results import Rooms, TuneResult
from tktune.search.resume import Known, cut_short, recall
from tktune.search.start import start_configs
from tktune.search.stop_rule import GreaterGain, RecordGain, StopRule
from tktune.search.study import Study
from tktune.store.results import Store
from tktune.store.rows import TrialKey, WinnerRow

_SEARCH_ENDED = "search_ended"  # the kind of event that tells how long a run searched
# A finalist's share of verification and attribution, in units of one trial's seconds.
_TRIALS_PER_FINALIST = 4.0
# Trials that a lane is given at once where the driver decides meanwhile: one under way, and enough behind it for the ranks
# to be at work while a model is fitted.
_DEPTH = 3


class ProblemRun:
    """Tunes one problem, once; `run` is called once. Where threads work `aside`, what it needs can be made ready beside the
    problem before it, and its model learns while the driver goes on."""

    def __init__(
        self,
        study: Study,
        space: Space,
        family: Family,
        store: Store,
        cache: ArtifactCache,
        rooms: Rooms,
        run_id: str,
        listener: Listener,
        stop: StopSignal,
        lost: frozenset[int],
        gangs: Gangs,
        account: Account,
        name_of: Callable[[BuildSpec], str],
        aside: Aside | None = None,
    ) -> None:
        self.study = study
        self.space = space
        self.family = family
        self.store = store
        self.cache = cache
        self.rooms = rooms
        self.run_id = run_id
        self.listener = listener
        self.stop = stop
        self.lost = lost
        self.gangs = gangs
        self.account = account
        self.problem = space.problem
        self.device = space.device
        self.policy = study.policy(space.device)
        self.default = space.default_config()
        self.starts = start_configs(space, study.start_from)
        self._aside = aside
        self.preparation = Preparation(
            study, space, family, store, cache, rooms, name_of, lambda: self.key, aside
        )

    @property
    def places(self) -> dict[Config, BuildPlace]:
        """Every build of the feasible set, in its order."""
        return self.preparation.places

    @cached_property
    def cost_us(self) -> dict[Config, float]:
        """What the family's cost model says of every feasible config."""
        return dict(zip(self.space.feasible, self.preparation.estimates_us.tolist(), strict=True))

    def run(self, following: ProblemRun | None = None) -> TuneResult:
        """Tune it. What the problem after it (`following`) needs is made ready meanwhile. Raises as `tune` does."""
        seated = self.gangs.turn_to(self.problem)  # ranks start while the rest is prepared
        self.preparation.begin()
        with self.builder() as builder:
            with self.account.driver(PREPARING), self.preparation.undisturbed():
                ordered = self._order_default(builder)
                self.preparation.wait()
                known = self.begin()
                for build in ordered:
                    self.places[build].ordered = True
            budget = Budget(
                self.study.trials,
                self.study.seconds,
                spent_trials=len(known.closed),
                spent_s=known.spent_s,
                clock=self.rooms.clock,
                finals_trials=_TRIALS_PER_FINALIST * (self.study.finalists + 3),
            )
            try:
                return self._with(seated, builder, budget, known, following)
            finally:
                self._note_account(self.account.cut(len(seated)))
                self.preparation.forget()

    def _order_default(self, builder: Builder) -> list[Config]:
        """Where builds run beside measuring and nothing is known yet, begin with the one that everything waits for."""
        if self._aside is None or self.store.trials(self.key):
            return []
        builder.order({self.space.build_part(self.default): self._default_spec})
        return [self.space.build_part(self.default)]

    # What a run begins with.

    def begin(self) -> Known:
        """Tell of the space, and recall what earlier runs left."""
        found = self.space.feasible
        self.listener.on_event(
            SpaceReady(
                self.problem,
                self.device,
                found.total,
                len(found),
                len(self.places),
                found.waterfall,
                self.default,
            )
        )
        return self._recall()

    @contextlib.contextmanager
    def builder(self) -> Iterator[Builder]:
        """A builder for this run, closed at the end."""
        builder = self.rooms.make_builder(self.cache, self.listener, ahead=self.device.backend != "cpu")
        try:
            yield builder
        finally:
            builder.close()

    def bench(self, gang: Gang) -> Bench:
        """Where this run's trials are measured and filed."""
        plan = TrialPlan.of(self.problem, self.policy)
        return Bench(self.store, self.key, gang, self.run_id, self.family.name, plan, self.rooms.measure)

    def _with(
        self,
        seated: Sequence[SeatedGang],
        builder: Builder,
        budget: Budget,
        known: Known,
        following: ProblemRun | None,
    ) -> TuneResult:
        bench = self.bench(seated[0].gang)
        self.preparation.pace.lanes = len(seated)
        standing = self.store.winner(self.problem, self.device, self.policy.name)
        with self.account.driver(PREPARING), self.preparation.undisturbed():
            costs, chooser = self.preparation.chooser(builder.jobs)
            rule = StopRule(GreaterGain(RecordGain(), chooser.gain)) if self.study.stop_early else None
            ledger = Ledger(
                self.places, self.space.build_part, self.default, known, chooser, budget, rule, self.listener
            )
        if following is not None:
            following.preparation.make_ready()

        def late() -> None:
            if following is not None:
                following.preparation.choose(builder.jobs)

        with Lanes(self._lanes(seated, bench), builder.bell) as lanes:
            found = Search(
                places=self.places,
                default=self.default,
                preferred=self._preferred(standing),
                starts=self.starts,
                chooser=chooser,
                ledger=ledger,
                costs=costs,
                family=self.family,
                builder=builder,
                lanes=lanes,
                bench=bench,
                budget=budget,
                stop=self.stop,
                listener=self.listener,
                account=self.account,
                late=late,
            ).run()
        self._note_search(bench, budget, found)
        if following is not None and not self.stop.requested:
            following.preparation.choose(builder.jobs)
        bench = dataclasses.replace(bench, gang=lanes.lasting[0].gang)
        finals = Finals(self, bench, builder, budget, found, known, standing)
        with self.account.driver(FINALISTS):
            result = finals.run()
        self.listener.on_event(
            Finished(self.problem, found.measured, found.built, budget.run_s, found.reason)
        )
        return result

    def _lanes(self, seated: Sequence[SeatedGang], bench: Bench) -> list[Lane]:
        ahead = self._aside is not None
        return [
            Lane(
                number,
                one.gang,
                bench.plan.seeds[0],
                self.rooms.clock,
                one.seat[0],
                one.thread,
                depth=_DEPTH if ahead and one.thread is not None else 1,
                mark=self.account.lane(number),
            )
            for number, one in enumerate(seated)
        ]

    # What earlier runs left.

    @cached_property
    def key(self) -> TrialKey:
        toolchain = self.cache.toolchain(self._default_spec)
        detail = {"path": str(toolchain.path), "flags": list(toolchain.flags)}
        toolchain_id = self.store.toolchain_id(toolchain.kind, toolchain.version, toolchain.digest, detail)
        return self.store.key(self.problem, self.device, self.policy, toolchain_id)

    @cached_property
    def _default_spec(self) -> BuildSpec:
        return self.family.build_spec(self.space.build_part(self.default), self.problem, self.device)

    def place(self, config: Config) -> BuildPlace:
        """The build that `config` (feasible) belongs to."""
        return self.places[self.space.build_part(config)]

    def _recall(self) -> Known:
        rows = self.store.trials(self.key)
        seconds: dict[str, float] = {}
        exhausted = False
        for event in self.store.events(_SEARCH_ENDED):
            if event.detail.get("search") == self._search_digest:
                seconds[event.detail["run_id"]] = event.detail["seconds"]
                exhausted |= event.detail["over"] and event.detail["budget_s"] >= self.study.seconds
        members = self.space.feasible.members
        known = recall(rows, members, lambda config: self.place(config).digest, seconds)
        if exhausted:
            known = dataclasses.replace(known, spent_s=max(known.spent_s, self.study.seconds))
        if rows:
            wanted = min(self.study.trials, len(members))
            left = max(0, wanted - len(known.closed))
            lost = sum(row.id in self.lost for row in rows)
            self.listener.on_event(Resumed(len(known.final), wanted, len(known.quarantined), lost, left))
        finalists = cut_short(self.store.events(), self.problem.digest)
        if finalists:
            names = "; ".join(map(str, finalists))
            self.listener.on_event(
                Note(
                    f"The run before ended while it verified {len(finalists)} finalists: {names}. They are verified "
                    "again; if the host went down with that run, look at these first."
                )
            )
        return known

    @cached_property
    def _search_digest(self) -> str:
        """What must be the same for the seconds of an earlier search to count: key, pins and sources."""
        pins = {name: list(values) for name, values in self.study.pins.items()}
        return digest([dataclasses.astuple(self.key), pins, self.place(self.default).digest])

    def _note_search(self, bench: Bench, budget: Budget, found: Found) -> None:
        if found.measured == 0 and not found.out_of_time:
            return
        bench.event(
            _SEARCH_ENDED,
            found.reason,
            {
                "search": self._search_digest,
                "seconds": budget.run_s,
                "budget_s": self.study.seconds,
                "over": found.out_of_time,
                "measured": found.measured,
                "builds": found.built,
            },
        )

    def _note_account(self, spent: Spent) -> None:
        self.store.event(
            ACCOUNT, spent.sentence, {"run_id": self.run_id, "problem": self.problem.digest, **spent.facts()}
        )

    def _preferred(self, standing: WinnerRow | None) -> list[Config]:
        """What is worth trying at once: the standing winner, and the winners of nearby token counts."""
        rows = self.store.near_winners(self.problem, self.device, self.policy.name)
        rows = rows if standing is None else [standing, *rows]
        feasible = self.space.feasible.members
        return list(dict.fromkeys(row.config for row in rows if row.config in feasible))
