"""An open database as SQLAlchemy Core sees it: transactions, settings, errors in words. No tables, no ORM, no Alembic."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import Connection, CursorResult, Engine, create_engine, event, exc, text
from sqlalchemy.pool import NullPool, QueuePool, StaticPool

from tktune.core.device import DeviceClass
from tktune.core.errors import DatabaseError
from tktune.core.problem import Problem
from tktune.store.location import (
    Place,
    check_whole,
    connect_for_reading,
    connect_sqlite,
    in_words,
    made,
    network_file_system,
)
from tktune.store.schema import found_version
from tktune.store.wanted import UPSERT_WANTED, WANT_TIMEOUT_S, want_in_file, wanted_parameters

Mode = Literal["rw", "ro"]
BUSY_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 2
_WRITER_LOCK = 0x746B7475  # the PostgreSQL advisory lock that makes writers one at a time, as SQLite does


class Database:
    """One engine, one writer at a time, every failure a `DatabaseError`.

    `journal` is SQLite's journal mode; `network` names the network file system under it, if any. Threads may
    share it; a forked child may not.
    """

    def __init__(self, where: Place, engine: Engine, mode: Mode) -> None:
        self.where = where
        self.mode = mode
        self.journal = ""
        self.network: str | None = None
        self._engine = engine
        self._writing = threading.RLock()

    @classmethod
    @contextmanager
    def opened(cls, where: Place, mode: Mode) -> Iterator[Database]:
        database = cls.open(where, mode)
        try:
            yield database
        finally:
            database.close()

    @classmethod
    def open(cls, where: Place, mode: Mode) -> Database:
        """Connect. "rw" makes the folder and the file of an SQLite database; "ro" raises when there is none."""
        if where.kind == "postgresql":
            engine = _server_engine(where)
        elif where.path is None:
            engine = create_engine("sqlite://", creator=_memory, poolclass=StaticPool)
        else:
            found = made(where.path, where.shown)
            if mode == "rw":
                _make_folder(where.path.parent, where.shown)
            elif not found:
                raise DatabaseError(
                    f"There is no database at {where.shown}.", "Make one with: tktune run STUDY."
                )
            engine = _file_engine(where.path, mode)
        event.listen(engine, "begin", _begin)
        database = cls(where, engine, mode)
        try:
            with database.in_words(), engine.connect() as connection:
                raw = connection.connection.dbapi_connection
                if where.path is not None and isinstance(raw, sqlite3.Connection):
                    check_whole(raw, where.path, where.shown)
        except DatabaseError:
            engine.dispose()
            raise
        return database

    def close(self) -> None:
        with self.in_words():
            self._engine.dispose()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """One transaction that sees one snapshot and changes nothing."""
        with self.in_words(), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """One transaction, committed before this returns, or rolled back whole. Writers queue up."""
        if self.mode != "rw":
            raise DatabaseError(
                f"The database {self.where.shown} was opened for reading only.", "Open it for writing."
            )
        with self._writing, self.in_words(), self._engine.connect() as connection:
            writer = connection.execution_options(tktune_write=True)
            with writer.begin():
                yield writer

    def rows(self, sql: str, parameters: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        with self.read() as connection:
            return rows_of(connection, sql, parameters)

    def want(self, problem: Problem, device: DeviceClass, policy_name: str) -> bool:
        """Note that a runtime asked for this problem, in any mode. False, at once, when that is not possible."""
        if self.where.path is not None:
            return want_in_file(self.where.path, problem, device, policy_name)
        parameters = wanted_parameters(problem, device, policy_name, time.time())
        try:
            with self._engine.connect() as connection, connection.begin():
                if self.where.kind == "postgresql":
                    connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{int(WANT_TIMEOUT_S * 1000)}ms'")
                connection.execute(text(UPSERT_WANTED), dict(parameters))
        except exc.DBAPIError:
            return False
        return True

    def version(self) -> str | None:
        """The schema version, or None when the database is empty."""
        return found_version(self.rows, self.where.kind, self.where.shown)

    def choose_journal(self) -> None:
        """SQLite only: WAL on a local file system, a rollback journal on a network one, where WAL corrupts."""
        path = self.where.path
        if path is None:
            return
        self.network = network_file_system(path.parent)
        wanted = "DELETE" if self.network else "WAL"
        with self.in_words(), contextlib.closing(self._engine.raw_connection()) as connection:
            cursor = connection.cursor()
            cursor.execute(f"PRAGMA journal_mode={wanted}")
            answer = cursor.fetchone()
            self.journal = str(answer[0]).lower() if answer else ""

    @contextmanager
    def in_words(self) -> Iterator[None]:
        try:
            yield
        except exc.DBAPIError as error:
            raise in_words(error.orig, self.where.shown) from error
        except sqlite3.Error as error:
            raise in_words(error, self.where.shown) from error


def rows_of(connection: Connection, sql: str, parameters: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
    return connection.execute(text(sql), dict(parameters)).all()


def inserted_id(made: CursorResult[Any]) -> int:
    """The primary key of the one row that an INSERT made."""
    key = made.inserted_primary_key
    assert key is not None
    return int(key[0])


def _begin(connection: Connection) -> None:
    """SQLite's own BEGIN is deferred and fails half-way when two writers meet; ours takes the lock at once."""
    writes = connection.get_execution_options().get("tktune_write", False)
    if connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
    elif writes:
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_WRITER_LOCK})")


def _file_engine(path: Path, mode: Mode) -> Engine:
    def connect() -> sqlite3.Connection:
        if mode == "ro":
            return connect_for_reading(path, BUSY_TIMEOUT_S)
        connection = connect_sqlite(path, "rwc", BUSY_TIMEOUT_S)
        connection.execute("PRAGMA foreign_keys=ON")
        # FULL: a `started` row must survive the host crash that it is there to explain.
        connection.execute("PRAGMA synchronous=FULL")
        return connection

    return create_engine("sqlite://", creator=connect, poolclass=QueuePool, pool_size=2)


def _memory() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA foreign_keys=ON")
    return connection


def _server_engine(where: Place) -> Engine:
    try:
        return create_engine(
            where.url, poolclass=NullPool, connect_args={"connect_timeout": CONNECT_TIMEOUT_S}
        )
    except ModuleNotFoundError as error:
        raise DatabaseError(
            f"The PostgreSQL driver {error.name} is not installed.",
            "Install it with: pip install 'psycopg[binary]'.",
        ) from error
    except exc.ArgumentError as error:
        raise DatabaseError(
            f"The database URL {where.shown} cannot be read: {error}.",
            "Write it as postgresql://USER@HOST/NAME.",
        ) from error


def _make_folder(folder: Path, shown: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatabaseError(
            f"The folder of the database {shown} cannot be made: {error.strerror}.",
            "Name a place this user can write to with TKTUNE_DB.",
        ) from error
