"""The store as the rest of tktune sees it: one writer, every method one transaction, committed before it returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.core.status import is_final
from tktune.store import checks, links, subjects, surroundings, trials, verifications, winners
from tktune.store.driver_identity import this_driver
from tktune.store.engine import Database, Mode
from tktune.store.links import LinkRow
from tktune.store.location import place
from tktune.store.models import (
    DeviceClassModel,
    PolicyModel,
    ProblemModel,
    ToolchainModel,
    TrialModel,
)
from tktune.store.opening import opened, upgraded
from tktune.store.rows import (
    ArtifactRow,
    AttributionRow,
    EventRow,
    KeyFacts,
    Sample,
    TrialKey,
    TrialRow,
    VerificationRow,
    WantedRow,
    WinnerRow,
)
from tktune.store.trials import ENDS_BEFORE_QUARANTINE, Ending, Samples


class Store:
    """Every measurement of one database.

    >>> with Store.open("sqlite://") as store:
    ...     store.stats()["trials"]
    0

    Every method may raise `DatabaseError`; what was committed before is safe then. Threads may share a store,
    processes open their own.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._ids: dict[tuple[str, str], int] = {}

    # -- life ---------------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, url: str, mode: Mode = "rw") -> Store:
        """Open a database by URL or path; "rw" makes it when it is missing, "ro" changes nothing.

        Raises `NewerSchema` when a newer tktune made it, `DatabaseError` when it cannot be opened, is not
        tktune's, or is older (`Store.upgrade` helps). The file is left untouched then.
        """
        return cls(opened(place(url), mode))

    @classmethod
    def upgrade(cls, url: str) -> tuple[str | None, str]:
        """Bring a database to this version's schema; (before, after). `before` is None when it was made now."""
        return upgraded(place(url))

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The URL it was opened by (with the password, if one was in it)."""
        return self._database.where.url

    @property
    def shown(self) -> str:
        """The place, as sentences name it: a path, or a URL without its password."""
        return self._database.where.shown

    @property
    def schema_version(self) -> str:
        return self._database.version() or ""

    # -- what is measured, and under what -----------------------------------------------------------------------

    def problem_id(self, problem: Problem) -> int:
        return self._id(ProblemModel, problem.digest, lambda: subjects.problem_values(problem))

    def device_class_id(self, device: DeviceClass) -> int:
        return self._id(DeviceClassModel, device.digest, lambda: subjects.device_values(device))

    def policy_id(self, policy: Policy) -> int:
        return self._id(PolicyModel, policy.digest, lambda: subjects.policy_values(policy))

    def toolchain_id(
        self, kind: str, version: str, digest: str, detail: Mapping[str, Any] | None = None
    ) -> int:
        return self._id(
            ToolchainModel, digest, lambda: subjects.toolchain_values(kind, version, digest, detail or {})
        )

    def key(self, problem: Problem, device: DeviceClass, policy: Policy, toolchain_id: int) -> TrialKey:
        """The key under which measurements of this problem are filed."""
        return TrialKey(
            self.problem_id(problem), self.device_class_id(device), self.policy_id(policy), toolchain_id
        )

    def key_facts(self, key: TrialKey) -> KeyFacts:
        with self._database.read() as connection:
            return subjects.key_facts(connection, key)

    def keys(self) -> list[TrialKey]:
        """Every key that has trials, oldest first."""
        with self._database.read() as connection:
            return subjects.keys_in_use(connection, TrialModel)

    def artifact_id(
        self,
        digest: str,
        kind: str,
        family: str,
        build_part: Config,
        facts: Mapping[str, Any],
        bytes: int,
        build_seconds: float,
        toolchain_id: int,
        sha256: str,
    ) -> int:
        """Keep what is known of an artifact; one built anew under the same digest replaces the facts."""
        values = subjects.artifact_values(
            kind, family, build_part, facts, bytes, build_seconds, toolchain_id, sha256
        )
        with self._database.write() as connection:
            return subjects.keep_artifact(connection, digest, values)

    def artifact(self, digest: str) -> ArtifactRow | None:
        with self._database.read() as connection:
            return subjects.artifact(connection, digest)

    def note_device_facts(self, device: DeviceClass, facts: Mapping[str, Any]) -> None:
        """Keep facts beside a device class; named facts replace older ones."""
        row_id = self.device_class_id(device)
        with self._database.write() as connection:
            subjects.note_device_facts(connection, row_id, facts)

    def device_facts(self, device: DeviceClass) -> dict[str, Any]:
        with self._database.read() as connection:
            return subjects.device_facts(connection, device.digest)

    def add_link(
        self, device: DeviceClass, toolchain_id: int, facts: Mapping[str, Any], driver: str, host: str
    ) -> int:
        """Keep what the link of a device class was measured to do just now."""
        row_id = self.device_class_id(device)
        with self._database.write() as connection:
            return links.add_link(connection, row_id, toolchain_id, facts, driver, host, time.time())

    def links(self, device: DeviceClass) -> list[LinkRow]:
        """Measurements of this device class's link, newest first: the first one counts."""
        with self._database.read() as connection:
            return links.links(connection, device.digest)

    # -- trials -------------------------------------------------------------------------------------------------

    def start_trial(self, key: TrialKey, config: Config, artifact_digest: str, run_id: str) -> int:
        """Commit a `started` row before the launch, so that a crash is attributed to this config.

        Raises `AlreadyMeasured` when the config with this artifact has a verdict, is running under a living
        driver, or ended twice without a verdict (quarantine).
        """
        with self._database.write() as connection:
            return trials.start(connection, key, config, artifact_digest, run_id, this_driver(), time.time())

    def finish_trial(
        self,
        trial_id: int,
        status: str,
        *,
        time_us: float | None = None,
        samples: Samples | None = None,
        detail: Mapping[str, Any] | None = None,
        build_us: float | None = None,
        gate_error: float | None = None,
        clocks: Mapping[str, Any] | None = None,
    ) -> None:
        """End a started trial with its samples: rows (routing_seed, iteration, rank, µs), or the slowest rank's µs.

        Raises `AlreadyMeasured` when it has ended, ValueError for a status outside the closed set.
        """
        ending = Ending(status, time_us, samples, detail, build_us, gate_error, clocks)
        with self._database.write() as connection:
            trials.finish(connection, trial_id, ending, time.time())

    def record_trial(
        self,
        key: TrialKey,
        config: Config,
        artifact_digest: str,
        status: str,
        *,
        run_id: str = "",
        time_us: float | None = None,
        samples: Samples | None = None,
        detail: Mapping[str, Any] | None = None,
        build_us: float | None = None,
        gate_error: float | None = None,
        clocks: Mapping[str, Any] | None = None,
    ) -> int:
        """A trial that ended without a launch (refused, build_failed). `artifact_digest` "" where there is none.

        The same verdict again is the same row; another one raises `AlreadyMeasured`, except `wrong`, which
        overrules whatever stands (a finalist found out while it was verified).
        """
        ending = Ending(status, time_us, samples, detail, build_us, gate_error, clocks)
        with self._database.write() as connection:
            return trials.record(
                connection, key, config, artifact_digest, run_id, this_driver(), time.time(), ending
            )

    def abandon(self, run_id: str) -> int:
        """End what the run `run_id` has started and not finished as `abandoned`; how many trials that were."""
        with self._database.write() as connection:
            return trials.abandon(connection, run_id, time.time())

    def reap(self, run_id: str = "") -> list[TrialRow]:
        """End the started rows of drivers that are gone as `lost`, each with an event; the rows of living
        drivers stay. On another host a driver cannot be seen: its rows are lost after an hour.
        """
        with self._database.write() as connection:
            return trials.reap(connection, run_id, time.time())

    def trials(self, key: TrialKey) -> list[TrialRow]:
        with self._database.read() as connection:
            return trials.trial_rows(connection, *trials.under(TrialModel, key))

    def measured(
        self, key: TrialKey, artifact_digest_of: Callable[[Config], str] | None = None
    ) -> dict[Config, TrialRow]:
        """Configs with a verdict, each with its newest one.

        With `artifact_digest_of`, only verdicts on the artifact that the config would be built to today (and
        refusals, which have none).
        """
        return {
            row.config: row
            for row in self.trials(key)
            if is_final(row.status)
            and (artifact_digest_of is None or row.artifact_digest in ("", artifact_digest_of(row.config)))
        }

    def attempts(self, key: TrialKey, config: Config, artifact_digest: str | None = None) -> int:
        """How often a config was tried (with this artifact, or with any)."""
        return len(self._of_config(key, config, artifact_digest))

    def quarantined(
        self, key: TrialKey, artifact_digest_of: Callable[[Config], str] | None = None
    ) -> set[Config]:
        """Configs that twice ended without a verdict, the user's own stopping not counted."""
        statuses: dict[tuple[Config, str], list[str]] = {}
        for row in self.trials(key):
            if artifact_digest_of is None or row.artifact_digest == artifact_digest_of(row.config):
                statuses.setdefault((row.config, row.artifact_digest), []).append(row.status)
        return {
            config
            for (config, _), ends in statuses.items()
            if trials.counted_ends(ends) >= ENDS_BEFORE_QUARANTINE and not any(map(is_final, ends))
        }

    def samples(self, trial_id: int) -> list[Sample]:
        with self._database.read() as connection:
            return trials.samples_of(connection, trial_id)

    # -- winners ------------------------------------------------------------------------------------------------

    def add_verification(self, key: TrialKey, session_id: str, rows: Sequence[VerificationRow]) -> None:
        """One session of interleaved finalists; its chosen row becomes the winner of `key`.

        Raises ValueError when more than one is chosen, or one without an ok trial under `key`.
        """
        with self._database.write() as connection:
            verifications.add_verification(connection, key, session_id, rows, time.time())

    def verifications(self, key: TrialKey) -> list[VerificationRow]:
        with self._database.read() as connection:
            return verifications.verifications(connection, key)

    def add_attribution(self, key: TrialKey, session_id: str, rows: Sequence[AttributionRow]) -> None:
        """Where a config's time goes: a row per mode and split, in one session."""
        with self._database.write() as connection:
            verifications.add_attribution(connection, key, session_id, rows, time.time())

    def attributions(self, key: TrialKey) -> list[AttributionRow]:
        with self._database.read() as connection:
            return verifications.attributions(connection, key)

    def winner(self, problem: Problem, device: DeviceClass, policy_name: str = "serving") -> WinnerRow | None:
        """The winner of exactly this problem: the newest verification over toolchains and policies of that name."""
        found = winners.winners_near(self._database.rows, problem, device, policy_name)
        return next((w for w in found if w.problem == problem), None)

    def near_winners(
        self, problem: Problem, device: DeviceClass, policy_name: str = "serving"
    ) -> list[WinnerRow]:
        """Winners of problems that differ in tokens alone, within 4 ×: nearest log ratio first, ties to the larger."""
        found = winners.winners_near(self._database.rows, problem, device, policy_name)
        return [w for w in found if w.problem.pad == problem.pad and w.problem.tokens != problem.tokens]

    def winners(self) -> list[WinnerRow]:
        """Every winner, one a (problem, device class, toolchain, policy), newest first."""
        return winners.all_winners(self._database.rows)

    # -- wanted, events, health ---------------------------------------------------------------------------------

    def want(self, problem: Problem, device: DeviceClass, policy_name: str = "serving") -> bool:
        """Note that a runtime asked for a problem. Never waits: False when the database is busy or read-only."""
        return self._database.want(problem, device, policy_name)

    def wanted(self) -> list[WantedRow]:
        """Problems that were asked for and still have no exact winner, most asked first."""
        with self._database.read() as connection:
            return surroundings.wanted(connection)

    def event(
        self,
        kind: str,
        sentence: str,
        detail: Mapping[str, Any] | None = None,
        trial_id: int | None = None,
    ) -> int:
        """Keep something worth telling a person later."""
        with self._database.write() as connection:
            return surroundings.add_event(connection, kind, sentence, detail, trial_id)

    def events(self, kind: str | None = None) -> list[EventRow]:
        """Events, oldest first."""
        with self._database.read() as connection:
            return surroundings.events(connection, kind)

    def stats(self) -> dict[str, Any]:
        """Counts of rows, of trials by status ("statuses"), the schema and the bytes on disk."""
        with self._database.read() as connection:
            return {"schema": self.schema_version, **checks.counts(connection)}

    def check(self) -> list[str]:
        """One sentence for each fault found in the file, its rows or its winners; empty when it is sound."""
        with self._database.read() as connection:
            return checks.faults(connection)

    # -- inside -------------------------------------------------------------------------------------------------

    def _id(self, model: subjects.Named, digest: str, values: Callable[[], dict[str, Any]]) -> int:
        known = self._ids.get((model.__tablename__, digest))
        if known is not None:
            return known
        with self._database.read() as connection:
            found = subjects.find(connection, model, digest)
        if found is None:
            with self._database.write() as connection:
                found = subjects.found_or_made(connection, model, values())
        self._ids[model.__tablename__, digest] = found
        return found

    def _of_config(self, key: TrialKey, config: Config, artifact_digest: str | None) -> list[TrialRow]:
        conditions = [*trials.under(TrialModel, key), TrialModel.config_digest == config.digest]
        if artifact_digest is not None:
            conditions.append(TrialModel.artifact_digest == artifact_digest)
        with self._database.read() as connection:
            return trials.trial_rows(connection, *conditions)
