"""`record`: measure every feasible config of a small space, each in full, and put it together as a recording.

Every trial is a row of the store like any other, so a recording that was interrupted goes on, and what a search had
measured before is not measured again (a config that lost its race then stays `censored`, with its first launches).
"""

from __future__ import annotations

from collections.abc import Sequence

from tktune.build.cache import ArtifactCache
from tktune.build.resources import usable_cores
from tktune.core import status
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.errors import WordsError, WorkError
from tktune.core.roles import broken_rules
from tktune.gang.trial import TrialPlan
from tktune.search.budget import StopSignal
from tktune.search.building import Builder
from tktune.search.driver import problem_runs
from tktune.search.events import Finished, Listener, Note, Silent, TrialDone, TrialStarted
from tktune.search.measuring import Bench
from tktune.search.place import BuildPlace
from tktune.search.problem_run import ProblemRun
from tktune.search.recording import RecordedBuild, RecordedTrial, Recording, plain_facts, summary_of
from tktune.search.results import Rooms
from tktune.search.resume import QUARANTINE_AFTER, Known
from tktune.search.study import Study
from tktune.store.rows import Sample, TrialRow

MOST_CONFIGS = 8000
_NO_RACE = 1.0
_BATCH = 16


def record(
    study: Study,
    store_url: str,
    cache: ArtifactCache,
    *,
    listener: Listener | None = None,
    stop: StopSignal | None = None,
    rooms: Rooms | None = None,
    device: DeviceClass | None = None,
    most: int = MOST_CONFIGS,
) -> Recording | None:
    """The recording of the study's one problem; None when the user stopped it (the same call then goes on).

    Raises `WordsError` when the study has several problems or more than `most` feasible configs, and as `tune` does.
    """
    if len(study.problems) != 1:
        raise WordsError(
            f"{study.name} has {len(study.problems)} problems, and a recording has one.",
            "Write a study with one value for each of its shapes.",
        )
    listener, stop = listener or Silent(), stop or StopSignal()
    with problem_runs(study, store_url, cache, listener, stop, rooms or Rooms(), device) as runs:
        for run in runs:
            count = len(run.space.feasible)
            if count > most:
                raise WordsError(
                    f"{run.problem} has {count} feasible configs, and a recording takes at most {most}.",
                    f"Limit parameters, for example --pin {_example(run)}.",
                )
            return _Recorder(run).run()
    return None


def _example(run: ProblemRun) -> str:
    """A pin that would help: the parameter with the most values, at the default's."""
    widest = max(run.space.parameters, key=lambda p: len(p.values))
    return f"{widest.name}={run.default[widest.name]}"


class _Recorder:
    """One recording under way."""

    def __init__(self, run: ProblemRun) -> None:
        self._run = run
        self._total = len(run.space.feasible)
        self._done = 0
        self._measured = self._built = 0
        self._best: tuple[float, Config] | None = None

    def run(self) -> Recording | None:
        run, known = self._run, self._run.begin()
        self._done = len(known.closed)
        began = run.rooms.clock()
        todo = self._todo(known)
        with run.builder() as builder, run.rooms.make_gang(run.problem, run.device, run.policy) as gang:
            bench = run.bench(gang)
            for at in range(0, len(todo), _BATCH):
                if run.stop.requested:
                    break
                self._batch(todo[at : at + _BATCH], known, builder, bench)
        whole = not run.stop.requested
        seconds = run.rooms.clock() - began
        reason = (
            "every feasible config is measured." if whole else "you stopped it; the same command continues."
        )
        run.listener.on_event(Finished(run.problem, self._measured, self._built, seconds, reason))
        return self._recording() if whole else None

    def _todo(self, known: Known) -> list[BuildPlace]:
        """Builds with configs that have no verdict yet, the default's first."""
        run = self._run
        open_ = [p for p in run.places.values() if any(c not in known.closed for c in p.points)]
        first = run.place(run.default).build
        return sorted(open_, key=lambda place: place.build != first)

    def _batch(self, places: Sequence[BuildPlace], known: Known, builder: Builder, bench: Bench) -> None:
        outcomes = builder.build({place.build: place.spec for place in places})
        for place in places:
            outcome = outcomes[place.build]
            place.artifact, place.build_seconds = outcome.artifact, outcome.seconds
            self._built += not outcome.cached and outcome.ok
            if outcome.ok:
                bench.file_artifact(place)
            left = [config for config in place.points if config not in known.closed]
            for config in left:
                if self._run.stop.requested:
                    return
                if outcome.ok:
                    self._trial(place, config, known.ends.get(config, 0), bench)
                    continue
                end = status.refused("compiler") if outcome.rejected else status.BUILD_FAILED
                bench.file(config, place.digest, end, outcome.error_sentence, outcome.seconds * 1e6)
                self._ended(config, end, None, outcome.error_sentence)

    def _trial(self, place: BuildPlace, config: Config, ends: int, bench: Bench) -> None:
        """Measure one config in full; one that ends without a verdict is tried once more."""
        run = self._run
        for _ in range(QUARANTINE_AFTER - ends):
            run.listener.on_event(TrialStarted(config, self._done + 1, self._total))
            broken = broken_rules(run.family.roles(config, run.problem, run.device))
            if broken:
                end = status.refused(broken[0].rule)
                bench.file(config, place.digest, end, broken[0].sentence)
                self._ended(config, end, None, broken[0].sentence)
                return
            result = bench.trial(config, place, None, _NO_RACE)
            if result is None:
                run.listener.on_event(Note(f"Another run is measuring {config}; it is left to that one."))
                return
            self._ended(config, result.status, result.time_us, result.sentence)
            if status.is_final(result.status) or run.stop.requested:
                return

    def _ended(self, config: Config, end: str, time_us: float | None, sentence: str) -> None:
        if end == status.OK and time_us is not None and (self._best is None or time_us < self._best[0]):
            self._best = (time_us, config)
        self._measured += 1
        self._done += status.is_final(end)
        best_us, best = self._best or (None, None)
        self._run.listener.on_event(
            TrialDone(config, end, time_us, best_us, best, self._done, self._total, sentence)
        )

    # From rows to a recording.

    def _recording(self) -> Recording:
        """Everything of this key that the store holds. Raises `WorkError` when a config has no row."""
        run = self._run
        rows: dict[Config, TrialRow] = {}
        for row in run.store.trials(run.key):
            members, place_of = run.space.feasible.members, run.place
            if row.config in members and row.artifact_digest == place_of(row.config).digest:
                rows[row.config] = row
        missing = self._total - len(rows)
        if missing:
            raise WorkError(f"{missing} configs have no trial yet.", "Run the same command again.")
        toolchain = run.cache.toolchain(run.place(run.default).spec)
        return Recording(
            name=run.study.name,
            problem=run.problem,
            device=run.device,
            policy=run.policy,
            toolchain=(toolchain.kind, toolchain.version, toolchain.flags),
            parameters=run.space.parameters,
            default=run.default,
            builds={place.build: self._build(place, rows) for place in run.places.values()},
            trials={config: self._trial_of(rows[config]) for config in run.space.feasible},
            iterations=run.policy.iterations * len(run.policy.routing_seeds),
            gates=len(TrialPlan.of(run.problem, run.policy).gate_routings) + 1,
            build_jobs=usable_cores(),
        )

    def _build(self, place: BuildPlace, rows: dict[Config, TrialRow]) -> RecordedBuild:
        stored = self._run.store.artifact(place.digest)
        if stored is not None:
            facts = plain_facts({**place.spec.facts, **stored.facts})
            return RecordedBuild(place.build, stored.build_seconds, facts=facts)
        ends = [rows[config] for config in place.points]
        failed = next((row for row in ends if row.status == status.BUILD_FAILED), ends[0])
        seconds = max((row.build_us or 0.0) for row in ends) / 1e6
        sentence = (failed.detail or {}).get("sentence", "")
        return RecordedBuild(place.build, seconds, failed.status, sentence, plain_facts(place.spec.facts))

    def _trial_of(self, row: TrialRow) -> RecordedTrial:
        run, detail = self._run, row.detail or {}
        spent: dict[str, float] = detail.get("seconds", {})
        gate_s = spent.get("gated", 0.0) + spent.get("rechecked", 0.0)
        us = slowest_us(run.store.samples(row.id))
        return RecordedTrial(
            row.config,
            row.status,
            row.time_us,
            sum(spent.values()) or max(0.0, (row.ended_at or row.started_at) - row.started_at),
            spent.get("loaded", 0.0),
            gate_s,
            spent.get("raced", 0.0) + spent.get("timed", 0.0),
            summary_of(us),
            run.cost_us[row.config],
            "" if row.status in (status.OK, status.CENSORED) else detail.get("sentence", ""),
        )


def slowest_us(samples: Sequence[Sample]) -> list[float]:
    """The slowest rank's microseconds of each iteration."""
    slowest: dict[tuple[int, int], float] = {}
    for one in samples:
        at = (one.routing_seed, one.iteration)
        slowest[at] = max(one.time_us, slowest.get(at, 0.0))
    return list(slowest.values())
