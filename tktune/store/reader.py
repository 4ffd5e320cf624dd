"""The light read path of lookups: SQLite through the standard library alone, PostgreSQL through SQLAlchemy.

Creates nothing, waits for nobody, and writes nothing but a `wanted` row. Never imports Alembic.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.store.location import Place, check_whole, connect_for_reading, in_words, made, place
from tktune.store.schema import found_version, judge_version
from tktune.store.wanted import want_in_file

READ_TIMEOUT_S = 0.25


class Reader(Protocol):
    """An open database that answers questions."""

    def rows(self, sql: str, parameters: Mapping[str, Any]) -> Sequence[Sequence[Any]]: ...

    def want(self, problem: Problem, device: DeviceClass, policy_name: str) -> bool:
        """Note that a runtime asked for this problem. False when the database cannot be written just now."""
        ...


@contextmanager
def reader(url: str) -> Iterator[Reader | None]:
    """A reader, or None where no database was made yet.

    Raises `DatabaseError` when there is one that cannot be read, `NewerSchema` when a newer tktune made it.
    """
    where = place(url)
    if where.kind == "postgresql":
        from tktune.store.engine import Database

        with Database.opened(where, "ro") as database:
            version = database.version()
            if version is None:
                yield None
                return
            judge_version(version, where.shown)
            yield database
        return
    if where.path is None or not made(where.path, where.shown):
        yield None
        return
    yield from _sqlite(where, where.path)


def _sqlite(where: Place, path: Path) -> Iterator[Reader | None]:
    try:
        connection = connect_for_reading(path, READ_TIMEOUT_S)
    except sqlite3.Error as error:
        raise in_words(error, where.shown) from error
    try:
        check_whole(connection, path, where.shown)
        found = SqliteReader(where, path, connection)
        version = found_version(found.rows, "sqlite", where.shown)
        if version is None:
            yield None
            return
        judge_version(version, where.shown)
        yield found
    finally:
        connection.close()


class SqliteReader:
    """A reader over the standard library's module."""

    def __init__(self, where: Place, path: Path, connection: sqlite3.Connection) -> None:
        self._where = where
        self._path = path
        self._connection = connection

    def rows(self, sql: str, parameters: Mapping[str, Any]) -> Sequence[Sequence[Any]]:
        try:
            return self._connection.execute(sql, dict(parameters)).fetchall()
        except sqlite3.Error as error:
            raise in_words(error, self._where.shown) from error

    def want(self, problem: Problem, device: DeviceClass, policy_name: str) -> bool:
        return want_in_file(self._path, problem, device, policy_name)
