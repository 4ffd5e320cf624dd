"""Opening a database: its schema is judged before anything is changed, made when it is missing, upgraded when asked."""

from __future__ import annotations

from tktune.core.errors import DatabaseError
from tktune.store import surroundings
from tktune.store.engine import Database, Mode, rows_of
from tktune.store.location import Place
from tktune.store.schema import SCHEMA_VERSION, found_version, judge_version


def opened(where: Place, mode: Mode) -> Database:
    """An open database of this version's schema. "rw" makes a missing one, "ro" changes nothing.

    Raises `NewerSchema` or `DatabaseError` and leaves the file as it was.
    """
    database = Database.open(where, mode)
    try:
        version = database.version()
        if version is not None:
            judge_version(version, where.shown)
        elif mode == "ro":
            raise DatabaseError(
                f"The database {where.shown} is still empty.", "Fill it with: tktune run STUDY."
            )
        if mode == "rw":
            database.choose_journal()
            if version is None:
                _bring_up(database)
            _tell_of_the_journal(database)
    except BaseException:
        database.close()
        raise
    return database


def upgraded(where: Place) -> tuple[str | None, str]:
    """Bring a database to this version's schema; (before, after). `before` is None when it was made now."""
    with Database.opened(where, "rw") as database:
        before = database.version()
        if before is None or before <= SCHEMA_VERSION:
            database.choose_journal()
            _bring_up(database)
        after = database.version() or ""
        judge_version(after, where.shown)
    return before, after


def _bring_up(database: Database) -> None:
    where = database.where
    with database.write() as connection:
        # Another process may have done it while this one waited for the lock.
        version = found_version(lambda sql, values: rows_of(connection, sql, values), where.kind, where.shown)
        if version is None or version < SCHEMA_VERSION:
            from tktune.store.migrate import migrate

            migrate(connection)


def _tell_of_the_journal(database: Database) -> None:
    """A rollback journal in place of WAL is slower and locks readers out for moments: say so, once."""
    if database.network is None:
        return
    with database.write() as connection:
        if not surroundings.events(connection, "network_file_system"):
            surroundings.add_event(
                connection,
                "network_file_system",
                f"The database {database.where.shown} is on a network file system ({database.network}): it uses a "
                "rollback journal, and only one host should write to it. Keep it on a local disk, or use PostgreSQL.",
                {"file_system": database.network, "journal": database.journal},
            )
