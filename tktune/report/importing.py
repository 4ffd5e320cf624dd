"""Takes an export of our own form into the store. Everything is checked before anything is written."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.errors import AlreadyMeasured, TktuneError, WordsError
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.core.status import OK, WRONG, checked, is_final
from tktune.families.base import BUILT_IN, family
from tktune.report.export_form import FORMAT, VERSION, Export, ExportedKey, ExportedTrial
from tktune.store.results import Store
from tktune.store.rows import AttributionRow, TrialKey, VerificationRow


@dataclass(frozen=True)
class Checked:
    """One key of an export whose words are all understood."""

    problem: Problem
    device: DeviceClass
    policy: Policy
    exported: ExportedKey


@dataclass
class Imported:
    """What an import came to. `known` were here already; `kept` have another verdict here, and ours stand."""

    keys: int = 0
    trials: int = 0
    known: int = 0
    kept: int = 0
    sessions: int = 0
    sessions_left_out: int = 0


def read_export(text: str, name: str, own_families: Collection[str] = ()) -> list[Checked]:
    """Understand an export, whole or not at all. `name` is how sentences call the file.

    A family that does not ship with tktune is code that the file names, so it is taken only when it stands in
    `own_families`. Raises `WordsError`.
    """
    try:
        outer = json.loads(text)
    except ValueError as error:
        raise WordsError(f"{name} is not JSON: {error}.", "Give a file made by: tktune export.") from error
    if not isinstance(outer, dict) or outer.get("format") != FORMAT:
        raise WordsError(
            f"{name} is not an export of tktune.", "Give a file made by: tktune export --format json."
        )
    if outer.get("version") != VERSION:
        raise WordsError(
            f"{name} has version {outer.get('version')!r} of the export form, and this tktune reads {VERSION}.",
            "Use the tktune that made it, or export again with this one.",
        )
    try:
        export = Export.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise WordsError(
            f"{name} does not fit the export form at {place}: {first['msg'].lower()}.", "See docs/export.md."
        ) from error
    return [_checked(key, f"{name}, key {number}", own_families) for number, key in enumerate(export.keys)]


def import_into(store: Store, keys: list[Checked]) -> Imported:
    """Add what is not here yet; importing twice changes nothing. Raises `DatabaseError`."""
    done = Imported(keys=len(keys))
    for checked_key in keys:
        exported = checked_key.exported
        toolchain = exported.toolchain
        toolchain_id = store.toolchain_id(
            toolchain.kind, toolchain.version, toolchain.digest, toolchain.detail
        )
        key = store.key(checked_key.problem, checked_key.device, checked_key.policy, toolchain_id)
        for artifact in exported.artifacts:
            if store.artifact(artifact.digest) is None:
                store.artifact_id(
                    artifact.digest,
                    artifact.kind,
                    artifact.family,
                    Config(artifact.build_part),
                    artifact.facts,
                    artifact.bytes,
                    artifact.build_seconds,
                    toolchain_id,
                    artifact.sha256,
                )
        _trials(store, key, exported, done)
        _sessions(store, key, exported, done)
    if done.trials or done.sessions:
        store.event("imported", f"{done.trials} trials and {done.sessions} verifications were imported.")
    return done


def _checked(exported: ExportedKey, where: str, own_families: Collection[str]) -> Checked:
    name = str(exported.problem.get("family"))
    if name not in BUILT_IN and name not in own_families:
        raise WordsError(
            f"{where}: the family {name!r} does not ship with tktune.",
            f"If you trust it, add: --own-family {name}.",
        )
    try:
        problem = Problem(**_fields(exported.problem))
        device = DeviceClass(**_fields(exported.device))
        policy = Policy(
            **{**_fields(exported.policy), "routing_seeds": tuple(exported.policy.get("routing_seeds", ()))}
        )
    except TypeError as error:
        raise WordsError(f"{where} does not fit: {error}.", "See docs/export.md.") from error
    except TktuneError as error:
        raise WordsError(f"{where}: {error.sentence}", error.way_out) from error
    _check_keys(exported, problem, device, policy, where)
    space = family(name).space(problem, device)
    parameters = {*space.build_names, *space.launch_names}
    for number, trial in enumerate(exported.trials):
        _check_trial(trial, parameters, f"{where}, trial {number}")
    proved = {(Config(t.config), t.artifact_digest) for t in exported.trials if t.status == OK}
    chosen: set[str] = set()
    for row in exported.verifications:
        if row.chosen and (
            (Config(row.config), row.artifact_digest) not in proved or row.session_id in chosen
        ):
            raise WordsError(
                f"{where}: session {row.session_id} chooses {Config(row.config)}, which no ok trial proves or "
                "which is its second choice.",
                "Export it again.",
            )
        if row.chosen:
            chosen.add(row.session_id)
    return Checked(problem, device, policy, exported)


def _fields(values: dict[str, Any]) -> dict[str, Any]:
    return dict(values)


def _check_keys(
    exported: ExportedKey, problem: Problem, device: DeviceClass, policy: Policy, where: str
) -> None:
    """A key must be spelt as this version spells it, or its digests would not be found again."""
    spelt = (
        ("problem", exported.problem, problem.key),
        ("device", {k: v for k, v in exported.device.items() if k != "display_name"}, device.key),
        ("policy", exported.policy, {**policy.key, "routing_seeds": list(policy.routing_seeds)}),
    )
    for name, found, ours in spelt:
        if found != ours:
            differ = ", ".join(sorted(k for k in {*found, *ours} if found.get(k) != ours.get(k)))
            raise WordsError(f"{where}: the {name} is not spelt as here ({differ}).", "Export it again.")
    for field, value in (*device.key.items(), *policy.key.items()):
        expected = {**DeviceClass.__annotations__, **Policy.__annotations__}[field]
        if expected in ("int", "str", "bool") and type(value).__name__ != expected:
            raise WordsError(f"{where}: {field} = {value!r} is no {expected}.", "Export it again.")


def _check_trial(trial: ExportedTrial, parameters: set[str], where: str) -> None:
    try:
        checked(trial.status)
    except ValueError as error:
        raise WordsError(f"{where}: {error}.", "See docs/faults.md for the statuses.") from error
    if trial.status == OK and trial.time_us is None:
        raise WordsError(f"{where} is ok and has no time.", "Export it again.")
    if set(trial.config) != parameters:
        differ = ", ".join(sorted(set(trial.config) ^ parameters))
        raise WordsError(
            f"{where} was measured with other parameters than this tktune has ({differ}).",
            "Use the tktune that made it, or measure again.",
        )


def _trials(store: Store, key: TrialKey, exported: ExportedKey, done: Imported) -> None:
    standing = {
        (row.config, row.artifact_digest): row.status for row in store.trials(key) if is_final(row.status)
    }
    tried: dict[tuple[Config, str], int] = {}
    for row in store.trials(key):
        place = (row.config, row.artifact_digest)
        tried[place] = tried.get(place, 0) + 1
    for trial in sorted(exported.trials, key=lambda trial: (trial.started_at, trial.attempt)):
        place = (Config(trial.config), trial.artifact_digest)
        known = standing.get(place)
        if known is not None and known != trial.status:
            done.kept += 1
        elif known is not None or (not is_final(trial.status) and tried.get(place, 0) >= trial.attempt):
            done.known += 1
        elif _record(store, key, trial):
            done.trials += 1
        else:
            done.kept += 1


def _record(store: Store, key: TrialKey, trial: ExportedTrial) -> bool:
    """False when the store has settled this config otherwise in the meantime."""
    own_times = {"started_at": trial.started_at, "ended_at": trial.ended_at}
    try:
        store.record_trial(
            key,
            Config(trial.config),
            trial.artifact_digest,
            trial.status,
            run_id=trial.run_id,
            time_us=trial.time_us,
            samples=[(s.routing_seed, s.iteration, s.rank, s.time_us) for s in trial.samples],
            detail={**(trial.detail or {}), "imported": own_times},
            build_us=trial.build_us,
            gate_error=trial.gate_error,
            clocks=trial.clocks,
        )
    except AlreadyMeasured:
        return False
    return True


def _sessions(store: Store, key: TrialKey, exported: ExportedKey, done: Imported) -> None:
    """Sessions in their order; one that is older than what was verified here, or that chose what is wrong or not
    proved here, is left out."""
    here = store.verifications(key)
    known = {row.session_id for row in here}
    newest_here = max((row.verified_at for row in here), default=0.0)
    rows_here = store.trials(key)
    proved = {(row.config, row.artifact_digest) for row in rows_here if row.status == OK}
    proved -= {(row.config, row.artifact_digest) for row in rows_here if row.status == WRONG}
    sessions: dict[str, list[VerificationRow]] = {}
    moments: dict[str, float] = {}
    for row in sorted(exported.verifications, key=lambda row: row.verified_at):
        moments[row.session_id] = row.verified_at
        sessions.setdefault(row.session_id, []).append(
            VerificationRow(
                Config(row.config),
                row.artifact_digest,
                row.role,
                row.time_us,
                tuple(row.samples),
                row.chosen,
                row.reason,
            )
        )
    for session_id, rows in sessions.items():
        if session_id in known:
            continue
        unproved = any(row.chosen and (row.config, row.artifact_digest) not in proved for row in rows)
        if unproved or moments[session_id] <= newest_here:
            done.sessions_left_out += 1
            continue
        store.add_verification(key, session_id, rows)
        done.sessions += 1
        attributed = [
            AttributionRow(
                Config(row.config), row.artifact_digest, row.mode, row.split, row.time_us, tuple(row.samples)
            )
            for row in exported.attributions
            if row.session_id == session_id
        ]
        if attributed:
            store.add_attribution(key, session_id, attributed)
