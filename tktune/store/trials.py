"""Rows of trials and their samples: started before the launch, ended once, reaped when their driver is gone.

Functions over one open transaction; `results.Store` gives each its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, bindparam, func, insert, select, update

from tktune.core.config import Config
from tktune.core.errors import AlreadyMeasured, DatabaseError
from tktune.core.status import ABANDONED, LOST, OK, WRONG, checked, is_final
from tktune.store.driver_identity import DriverIdentity, boot_id
from tktune.store.engine import inserted_id
from tktune.store.keys import config_from, mapping_from, text_from
from tktune.store.models import ProblemModel, SampleModel, TrialModel
from tktune.store.rows import SEED_NOT_TOLD, SLOWEST_RANK, STARTED, Sample, TrialKey, TrialRow
from tktune.store.surroundings import add_event

ENDS_BEFORE_QUARANTINE = 2
# No trial lasts an hour; a driver on another host cannot be seen, so its old rows are taken for lost.
ELSEWHERE_LOST_AFTER_S = 3600.0

# Statements of every trial, put together once: that takes longer than running them.
_TRIED = (
    select(
        TrialModel.id,
        TrialModel.status,
        TrialModel.attempt,
        TrialModel.driver_pid,
        TrialModel.driver_start_ticks,
        TrialModel.boot_id,
        TrialModel.host,
        TrialModel.started_at,
    )
    .where(
        TrialModel.problem_id == bindparam("problem_id"),
        TrialModel.device_class_id == bindparam("device_class_id"),
        TrialModel.policy_id == bindparam("policy_id"),
        TrialModel.toolchain_id == bindparam("toolchain_id"),
        TrialModel.config_digest == bindparam("config_digest"),
        TrialModel.artifact_digest == bindparam("artifact_digest"),
    )
    .order_by(TrialModel.attempt)
)
_STATUS = select(TrialModel.status).where(TrialModel.id == bindparam("trial"))
_END = update(TrialModel).where(TrialModel.id == bindparam("trial"))
_INSERT, _INSERT_SAMPLES = insert(TrialModel), insert(SampleModel)

Samples = Sequence[float | tuple[int, int, int, float] | Sample]


@dataclass(frozen=True)
class Ending:
    """How a trial ended. `samples`: rows (routing_seed, iteration, rank, µs), or µs of the slowest rank in order."""

    status: str
    time_us: float | None = None
    samples: Samples | None = None
    detail: Mapping[str, Any] | None = None
    build_us: float | None = None
    gate_error: float | None = None
    clocks: Mapping[str, Any] | None = None

    def values(self) -> dict[str, Any]:
        """Columns of the trial row. Raises ValueError when status and numbers contradict each other."""
        checked(self.status)
        if self.status == OK and self.time_us is None:
            raise ValueError("an ok trial has a time")
        if self.time_us is not None and not (math.isfinite(self.time_us) and self.time_us > 0):
            raise ValueError(f"time_us = {self.time_us} is not a positive number of microseconds")
        # A NaN gate error is a verdict about the output, told in the sentence; the column holds numbers only.
        gate_error = self.gate_error if self.gate_error is None or math.isfinite(self.gate_error) else None
        return {
            "status": self.status,
            "time_us": self.time_us,
            "build_us": self.build_us,
            "gate_error": gate_error,
            "clocks": text_from(self.clocks),
            "detail": text_from(self.detail),
        }


def spelt(samples: Samples | None) -> list[Sample]:
    """Samples as rows. Raises ValueError on one that is not a positive finite number."""
    rows = [_sample(index, sample) for index, sample in enumerate(samples or ())]
    for row in rows:
        if not (math.isfinite(row.time_us) and row.time_us > 0):
            raise ValueError(f"a sample of {row.time_us} µs is no measurement")
    return rows


def _sample(index: int, sample: float | tuple[int, int, int, float] | Sample) -> Sample:
    if isinstance(sample, Sample):
        return sample
    if isinstance(sample, tuple | list):
        return Sample(*sample)
    return Sample(SEED_NOT_TOLD, index, SLOWEST_RANK, float(sample))


def under(model: Any, key: TrialKey) -> tuple[ColumnElement[bool], ...]:
    return (
        model.problem_id == key.problem_id,
        model.device_class_id == key.device_class_id,
        model.policy_id == key.policy_id,
        model.toolchain_id == key.toolchain_id,
    )


def start(
    connection: Connection,
    key: TrialKey,
    config: Config,
    artifact_digest: str,
    run_id: str,
    driver: DriverIdentity,
    now: float,
) -> int:
    """Insert the `started` row. Raises `AlreadyMeasured` for a settled, a running or a quarantined config."""
    tried = _tried(connection, key, config, artifact_digest)
    _check_open(connection, config, tried, run_id, now)
    return _insert(connection, key, config, artifact_digest, tried, run_id, driver, now, {"status": STARTED})


def record(
    connection: Connection,
    key: TrialKey,
    config: Config,
    artifact_digest: str,
    run_id: str,
    driver: DriverIdentity,
    now: float,
    ending: Ending,
) -> int:
    """Insert a trial that ended without a launch. The same verdict twice is one row.

    `wrong` overrules what stands, for a finalist may be found out after its trial ended well.
    """
    values, samples = ending.values(), spelt(ending.samples)
    tried = _tried(connection, key, config, artifact_digest)
    for row in tried:
        if row.status == ending.status and is_final(row.status):
            return int(row.id)
    if ending.status != WRONG:
        _check_open(connection, config, tried, run_id, now)
    trial_id = _insert(
        connection, key, config, artifact_digest, tried, run_id, driver, now, {**values, "ended_at": now}
    )
    _insert_samples(connection, trial_id, samples)
    return trial_id


def finish(connection: Connection, trial_id: int, ending: Ending, now: float) -> None:
    """End a started trial, once. Raises `AlreadyMeasured` when it has ended, `DatabaseError` when it is unknown."""
    values, samples = ending.values(), spelt(ending.samples)
    status = connection.execute(_STATUS, {"trial": trial_id}).scalar_one_or_none()
    if status is None:
        raise DatabaseError(f"There is no trial {trial_id}.", "Start it before it is finished.")
    if status != STARTED:
        raise AlreadyMeasured(status, f"Trial {trial_id} has already ended as {status}.", "Start a new one.")
    connection.execute(_END, {"trial": trial_id, **values, "ended_at": now})
    _insert_samples(connection, trial_id, samples)


def abandon(connection: Connection, run_id: str, now: float) -> int:
    """End every started row of this run as `abandoned`; how many there were."""
    model = TrialModel
    ended = connection.execute(
        update(model)
        .where(model.run_id == run_id, model.status == STARTED)
        .values(status=ABANDONED, detail=text_from({"sentence": "The run was stopped."}), ended_at=now)
    )
    return ended.rowcount


def reap(connection: Connection, run_id: str, now: float) -> list[TrialRow]:
    """End every started row whose driver is gone as `lost`, each with an event that names its config."""
    model = TrialModel
    rows = connection.execute(
        select(
            model.id, model.driver_pid, model.driver_start_ticks, model.boot_id, model.host, model.started_at
        ).where(model.status == STARTED)
    ).all()
    gone = []
    for trial_id, pid, ticks, boot, host, started_at in rows:
        driver = DriverIdentity(pid, ticks, boot, host)
        if _is_gone(driver, started_at, now):
            _lose(connection, trial_id, driver, run_id, now)
            gone.append(trial_id)
    return trial_rows(connection, model.id.in_(gone)) if gone else []


def trial_rows(connection: Connection, *conditions: ColumnElement[bool]) -> list[TrialRow]:
    """Trials in the order they were started."""
    return [_row(row) for row in connection.execute(_listing().where(*conditions).order_by(TrialModel.id))]


def counted_ends(statuses: Sequence[str]) -> int:
    """Ends that count towards quarantine: not verdicts, and not the user's own stopping."""
    return sum(not is_final(status) and status not in (STARTED, ABANDONED) for status in statuses)


def samples_of(connection: Connection, trial_id: int) -> list[Sample]:
    model = SampleModel
    chosen = (
        select(model.routing_seed, model.iteration, model.rank, model.time_us)
        .where(model.trial_id == trial_id)
        .order_by(model.routing_seed, model.iteration, model.rank)
    )
    return [Sample(*row) for row in connection.execute(chosen)]


def _is_gone(driver: DriverIdentity, started_at: float, now: float) -> bool:
    life = driver.life()
    return life == "dead" or (life == "elsewhere" and now - started_at > ELSEWHERE_LOST_AFTER_S)


def _tried(connection: Connection, key: TrialKey, config: Config, artifact_digest: str) -> Sequence[Any]:
    """Every attempt at this config and artifact, and who drives it."""
    asked = {**dataclasses.asdict(key), "config_digest": config.digest, "artifact_digest": artifact_digest}
    return connection.execute(_TRIED, asked).all()


def _check_open(
    connection: Connection, config: Config, tried: Sequence[Any], run_id: str, now: float
) -> None:
    """Raise `AlreadyMeasured` when a verdict, a living driver or a quarantine forbids another attempt."""
    verdicts = [row.status for row in tried if is_final(row.status)]
    if verdicts:
        raise AlreadyMeasured(
            verdicts[-1],
            f"The config {config} already has the verdict {verdicts[-1]}.",
            "Use the stored trial.",
        )
    ends = []
    for row in tried:
        ends.append(row.status if row.status != STARTED else LOST)
        if row.status == STARTED:
            driver = DriverIdentity(row.driver_pid, row.driver_start_ticks, row.boot_id, row.host)
            if not _is_gone(driver, row.started_at, now):
                raise AlreadyMeasured(
                    STARTED,
                    f"The config {config} is being measured by process {driver.pid} on {driver.host}.",
                    "Let that run finish, or stop it.",
                )
            _lose(connection, row.id, driver, run_id, now)
    if counted_ends(ends) >= ENDS_BEFORE_QUARANTINE:
        raise AlreadyMeasured(
            ends[-1],
            f"The config {config} is quarantined: it ended without a verdict as {', '.join(ends)}.",
            "Leave it out; a changed kernel gets a new artifact and a new chance.",
        )


def _insert(
    connection: Connection,
    key: TrialKey,
    config: Config,
    artifact_digest: str,
    tried: Sequence[Any],
    run_id: str,
    driver: DriverIdentity,
    now: float,
    values: Mapping[str, Any],
) -> int:
    row = {
        **dataclasses.asdict(key),
        "config_digest": config.digest,
        "config": config.json,
        "artifact_digest": artifact_digest,
        "attempt": len(tried) + 1,
        "run_id": run_id,
        "driver_pid": driver.pid,
        "driver_start_ticks": driver.start_ticks,
        "boot_id": driver.boot_id,
        "host": driver.host,
        "started_at": now,
        **values,
    }
    return inserted_id(connection.execute(_INSERT, row))


def _lose(connection: Connection, trial_id: int, driver: DriverIdentity, run_id: str, now: float) -> None:
    """End one started row as lost and leave the event that attributes the crash."""
    model = TrialModel
    changed = connection.execute(
        update(model).where(model.id == trial_id, model.status == STARTED).values(status=LOST, ended_at=now)
    )
    if changed.rowcount == 0:
        return
    config, digest, family, lost_run = connection.execute(
        select(model.config, model.artifact_digest, ProblemModel.family, model.run_id)
        .join(ProblemModel, ProblemModel.id == model.problem_id)
        .where(model.id == trial_id)
    ).one()
    if driver.life() == "elsewhere":
        how = f"its driver on {driver.host} was not heard of for an hour"
    elif driver.boot_id != boot_id():
        how = "the host went down"
    else:
        how = f"its driver, process {driver.pid}, vanished"
    sentence = f"Trial {trial_id} of {family} ({config_from(config)}) is lost: {how} while it ran."
    detail = {
        "config": mapping_from(config),
        "artifact_digest": digest,
        "run_id": lost_run,
        "reaped_by": run_id,
        "pid": driver.pid,
        "host": driver.host,
        "host_went_down": driver.life() == "dead" and driver.boot_id != boot_id(),
    }
    add_event(connection, LOST, sentence, detail, trial_id)


def _insert_samples(connection: Connection, trial_id: int, samples: Sequence[Sample]) -> None:
    if samples:
        connection.execute(
            _INSERT_SAMPLES,
            [
                {
                    "trial_id": trial_id,
                    "routing_seed": sample.routing_seed,
                    "iteration": sample.iteration,
                    "rank": sample.rank,
                    "time_us": sample.time_us,
                }
                for sample in samples
            ],
        )


def _listing() -> Select[Any]:
    model = TrialModel
    count = (
        select(func.count())
        .select_from(SampleModel)
        .where(SampleModel.trial_id == model.id)
        .correlate(model)
        .label("samples")
    )
    return select(
        model.id,
        model.config,
        model.artifact_digest,
        model.attempt,
        model.status,
        model.time_us,
        count,
        model.run_id,
        model.started_at,
        model.ended_at,
        model.build_us,
        model.gate_error,
        model.clocks,
        model.detail,
    )


def _row(row: Any) -> TrialRow:
    return TrialRow(
        id=row.id,
        config=config_from(row.config),
        artifact_digest=row.artifact_digest,
        attempt=row.attempt,
        status=row.status,
        time_us=row.time_us,
        samples=row.samples,
        run_id=row.run_id,
        started_at=row.started_at,
        ended_at=row.ended_at,
        build_us=row.build_us,
        gate_error=row.gate_error,
        clocks=mapping_from(row.clocks),
        detail=mapping_from(row.detail),
    )
