"""One trial of one config: the `started` row before the launch, the gang's verdict, the final row after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tktune.core import status
from tktune.core.config import Config
from tktune.core.errors import AlreadyMeasured, GangError
from tktune.gang.gang import Gang
from tktune.gang.trial import TrialPlan, TrialResult
from tktune.search.drift import DRIFT
from tktune.search.place import BuildPlace
from tktune.store.results import Store
from tktune.store.rows import TrialKey

Measure = Callable[..., TrialResult]


@dataclass(frozen=True)
class Bench:
    """Where the trials of one key are run and filed: the gang, the store, and how to measure."""

    store: Store
    key: TrialKey
    gang: Gang
    run_id: str
    family: str
    plan: TrialPlan
    measure: Measure

    def trial(
        self,
        config: Config,
        place: BuildPlace,
        race_limit_us: float | None,
        race_margin: float,
        drift: float = 1.0,
    ) -> TrialResult | None:
        """Run one trial and commit it, whatever becomes of it; None when another driver holds this config.

        `drift` is by how much the machine is slower than when the run began; the row tells it beside raw times.
        Raises `GangError` when no gang can be had, and KeyboardInterrupt; the row then says `abandoned`.
        """
        assert place.artifact is not None
        self.gang.start()  # so that a driver killed meanwhile does not count against the config
        trial_id = self.begin(config, place)
        if trial_id is None:
            return None
        result: TrialResult | None = None
        why = "The run was stopped."
        try:
            plan = dataclasses.replace(self.plan, race_limit_us=race_limit_us, race_margin=race_margin)
            result = self.measure(self.gang, config, place.build, place.artifact, plan)
        except GangError as error:
            why = str(error)
            raise
        finally:
            if result is None:
                self.abandon(trial_id, why)
        self.finish(trial_id, result, place, drift)
        return result

    def begin(self, config: Config, place: BuildPlace) -> int | None:
        """Commit the `started` row; None when another driver holds this config. The gang must live."""
        try:
            return self.store.start_trial(self.key, config, place.digest, self.run_id)
        except AlreadyMeasured:
            return None

    def finish(
        self,
        trial_id: int,
        result: TrialResult,
        place: BuildPlace,
        drift: float = 1.0,
        device: int | None = None,
    ) -> None:
        """Commit what became of a trial; `device` names the first device of its gang where several work."""
        detail = _detail(result, drift)
        if device is not None:
            detail = {**(detail or {}), "device": device}
        self.store.finish_trial(
            trial_id,
            result.status,
            time_us=result.time_us,
            samples=result.samples,
            detail=detail,
            build_us=place.build_seconds * 1e6,
            gate_error=result.gate_error,
            clocks=result.detail.get("clocks"),
        )

    def abandon(self, trial_id: int, why: str) -> None:
        """Commit that a trial has no end of its own."""
        self.store.finish_trial(trial_id, status.ABANDONED, detail={"sentence": why})

    def file(
        self, config: Config, digest: str, end: str, sentence: str, build_us: float | None = None
    ) -> bool:
        """Commit a trial that ended without a launch of its own; False when another verdict stands."""
        detail = {"sentence": sentence}
        try:
            self.store.record_trial(
                self.key, config, digest, end, run_id=self.run_id, detail=detail, build_us=build_us
            )
        except AlreadyMeasured:
            return False
        return True

    def file_artifact(self, place: BuildPlace) -> None:
        """Commit what is known of an artifact: what the compiler said of it beside what the formulas predict."""
        artifact = place.artifact
        assert artifact is not None
        self.store.artifact_id(
            artifact.digest,
            place.spec.kind,
            self.family,
            place.build,
            {**place.spec.facts, **artifact.facts},
            artifact.bytes,
            artifact.seconds,
            self.key.toolchain_id,
            artifact.sha256,
        )

    def event(self, kind: str, sentence: str, detail: dict[str, Any] | None = None) -> None:
        self.store.event(kind, sentence, {"run_id": self.run_id, **(detail or {})})


def _detail(result: TrialResult, drift: float) -> dict[str, Any] | None:
    detail = dict(result.detail)
    if drift != 1.0:
        detail[DRIFT] = round(drift, 5)
    if result.sentence:
        detail["sentence"] = result.sentence
    return detail or None


def slowest_by_seed(result: TrialResult) -> dict[int, list[float]]:
    """The slowest rank's microseconds of each iteration, by routing seed."""
    slowest: dict[int, dict[int, float]] = {}
    for sample in result.samples:
        iterations = slowest.setdefault(sample.routing_seed, {})
        iterations[sample.iteration] = max(sample.us, iterations.get(sample.iteration, 0.0))
    return {seed: list(iterations.values()) for seed, iterations in slowest.items()}


def slowest_rank_us(result: TrialResult) -> list[float]:
    """The slowest rank's microseconds of each iteration, in the order in which they were measured."""
    slowest: dict[tuple[int, int], float] = {}
    for sample in result.samples:
        at = (sample.routing_seed, sample.iteration)
        slowest[at] = max(sample.us, slowest.get(at, 0.0))
    return list(slowest.values())
