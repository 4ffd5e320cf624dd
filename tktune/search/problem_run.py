"""One problem in one run of a study: recall what is known, search, verify finalists, attribute the winner's time.

The steps in their order; each step's own decisions are in its module.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from functools import cached_property
from typing import TYPE_CHECKING

from tktune.build.cache import ArtifactCache
from tktune.core.build_spec import BuildSpec
from tktune.core.canonical import digest
from tktune.core.config import Config
from tktune.core.space import Space
from tktune.families.base import Family
from tktune.families.link_model import first_known, informed
from tktune.gang.gang import Gang
from tktune.gang.trial import TrialPlan
from tktune.search.account import ACCOUNT, FINALISTS, PREPARING, Account, Spent
from tktune.search.budget import Budget, StopSignal
from tktune.search.building import Builder
from tktune.search.choosing import Asked, Chooser
from tktune.search.collecting import laid_aside
from tktune.search.costs import Costs
from tktune.search.events import Finished, Listener, Note, Resumed, SpaceReady
from tktune.search.exploring import Search
from tktune.search.finals import Finals
from tktune.search.found import Found
from tktune.search.gangs import Gangs, SeatedGang
from tktune.search.lanes import Lane, Lanes
from tktune.search.ledger import Ledger
from tktune.search.measuring import Bench
from tktune.search.place import BuildPlace, places_of
from tktune.search.results import Rooms, TuneResult
from tktune.search.resume import Known, cut_short, recall
from tktune.search.sampler import ConfigSampler
from tktune.search.samplers import SAMPLERS
from tktune.search.start import start_configs
from tktune.search.stop_rule import GreaterGain, RecordGain, StopRule
from tktune.search.study import Study
from tktune.store.results import Store
from tktune.store.rows import TrialKey, WinnerRow

if TYPE_CHECKING:
    from tktune.search.coordinates import Floats

_SEARCH_ENDED = "search_ended"  # the kind of event that tells how long a run searched
# A finalist's share of verification and attribution, in units of one trial's seconds.
_TRIALS_PER_FINALIST = 4.0
# Trials that a lane is given at once where the driver decides meanwhile: one under way, and enough behind it for the ranks
# to be at work while a model is fitted.
_DEPTH = 3


class ProblemRun:
    """Tunes one problem, once; `run` is called once. Where there is an executor `aside`, what it needs can be made ready
    beside the problem before it."""

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
        aside: Executor | None = None,
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
        self.name_of = name_of
        self.problem = space.problem
        self.device = space.device
        self.policy = study.policy(space.device)
        self.default = space.default_config()
        self.starts = start_configs(space, study.start_from)
        self._aside = aside
        self._prepared: Future[None] | None = None
        self._chosen: Future[tuple[Costs, Chooser]] | None = None

    @cached_property
    def cost_us(self) -> dict[Config, float]:
        """What the family's cost model says of every feasible config, with what is known of the device's links."""
        model = informed(self.family, first_known(row.facts for row in self.store.links(self.device)))
        return {c: model.cost_us(c, self.problem, self.device) for c in self.space.feasible}

    @cached_property
    def places(self) -> dict[Config, BuildPlace]:
        return places_of(self.space, self.family, self.name_of)

    def run(self, following: ProblemRun | None = None) -> TuneResult:
        """Tune it. What the problem after it (`following`) needs is made ready meanwhile. Raises as `tune` does."""
        seated = self.gangs.turn_to(self.problem)  # ranks start while the rest is prepared
        with self.builder() as builder:
            with self.account.driver(PREPARING), self._undisturbed():
                ordered = self._order_default(builder)
                if self._prepared is not None:
                    self._prepared.result()
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
                self._forget()

    def _forget(self) -> None:
        """Let go of what is large: a study may have many problems."""
        for name in ("places", "cost_us"):
            self.__dict__.pop(name, None)
        self._prepared = self._chosen = None

    def _order_default(self, builder: Builder) -> list[Config]:
        """Where builds run beside measuring and nothing is known yet, begin with the one that everything waits for."""
        if self._aside is None or self.store.trials(self.key):
            return []
        builder.order({self.space.build_part(self.default): self._default_spec})
        return [self.space.build_part(self.default)]

    # What can be done beside the problem before.

    def prepare_aside(self) -> None:
        """Enumerate the space and what follows from it alone, in a thread."""
        if self._aside is not None:
            self._prepared = self._aside.submit(self._prepare)

    def choose_aside(self, jobs: int) -> None:
        """Make the chooser, in a thread, once: what was measured of neighbouring problems until now speaks in it."""
        if self._aside is not None and self._chosen is None:
            self._chosen = self._aside.submit(self._costs_and_chooser, jobs)

    def _prepare(self) -> None:
        with self._undisturbed():
            assert self.space.feasible.members and self.cost_us
            for place in self.places.values():
                assert place.digest

    def _costs_and_chooser(self, jobs: int) -> tuple[Costs, Chooser]:
        costs = Costs(jobs)
        with self._undisturbed():
            return costs, self._chooser(costs)

    def _undisturbed(self) -> contextlib.AbstractContextManager[None]:
        """Where the driver works beside its ranks, the objects of a space are many and for good."""
        return contextlib.nullcontext() if self._aside is None else laid_aside()

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
        standing = self.store.winner(self.problem, self.device, self.policy.name)
        with self.account.driver(PREPARING), self._undisturbed():
            chosen = self._chosen
            costs, chooser = self._costs_and_chooser(builder.jobs) if chosen is None else chosen.result()
            rule = StopRule(GreaterGain(RecordGain(), chooser.gain)) if self.study.stop_early else None
            ledger = Ledger(
                self.places, self.space.build_part, self.default, known, chooser, budget, rule, self.listener
            )
        if following is not None:
            following.prepare_aside()

        def late() -> None:
            if following is not None:
                following.choose_aside(builder.jobs)

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
            following.choose_aside(builder.jobs)
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

    def _chooser(self, costs: Costs) -> Chooser:
        """What decides what is measured next: the study's sampler over all configs, weighed where it has a model."""
        rows = list(self.space.feasible)
        build_of = {config: build for build, place in self.places.items() for config in place.points}
        if self.rooms.make_sampler is not None:
            sampler, prior = self.rooms.make_sampler(rows, self.study.seed), None
        elif self.study.sampler == "model":
            sampler, prior = self._model(rows)
        else:
            sampler, prior = SAMPLERS[self.study.sampler](rows, self.study.seed), None
        from tktune.search.gains import GainChooser, GainModel

        if not isinstance(sampler, GainModel):
            return Asked(sampler, build_of)
        held = [build for build, place in self.places.items() if self.cache.holds(place.digest)]
        return GainChooser(rows, build_of, sampler, costs, held, prior=prior)

    def _model(self, rows: Sequence[Config]) -> tuple[ConfigSampler, Floats | None]:
        """Our sampler, and the log microseconds expected of the rows before any is measured, where something is known: what
        the family's cost model says of them, and what was measured of neighbouring problems and other device classes."""
        from tktune.search.feasible_sampler import ModelSampler
        from tktune.search.prior import in_store, log_prior

        elsewhere = in_store(self.store, self.key, self.family)
        estimates = self.cost_us if len(set(self.cost_us.values())) > 1 else None
        if not elsewhere and estimates is None:
            return ModelSampler(rows, self.study.seed), None
        prior = log_prior(rows, estimates, elsewhere)
        return ModelSampler(rows, self.study.seed, prior), prior

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
