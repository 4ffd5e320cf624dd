"""The schema's version and how a found one is judged. Reads through any `rows` function; standard library only."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from tktune.core.errors import DatabaseError, NewerSchema

SCHEMA_VERSION = "0002"

Rows = Callable[[str, Mapping[str, Any]], Sequence[Sequence[Any]]]


def found_version(rows: Rows, kind: Literal["sqlite", "postgresql"], shown: str) -> str | None:
    """The schema version of a database, or None when it is empty.

    Raises `DatabaseError` when it holds the tables of something else.
    """
    if kind == "sqlite":
        listing = "SELECT name FROM sqlite_master WHERE type = 'table'"
    else:
        listing = "SELECT tablename FROM pg_catalog.pg_tables WHERE schemaname = current_schema()"
    tables = {row[0] for row in rows(listing, {})}
    if not tables:
        return None
    versions = (
        [row[0] for row in rows("SELECT version_num FROM alembic_version", {})]
        if ("alembic_version" in tables)
        else []
    )
    if len(versions) == 1 and re.fullmatch(r"\d{4}", versions[0]):
        return str(versions[0])
    raise DatabaseError(
        f"The database {shown} belongs to another program.", "Name another database with TKTUNE_DB."
    )


def judge_version(found: str, shown: str) -> None:
    """Raises `NewerSchema` or, for an older one, `DatabaseError` that names `tktune db upgrade`."""
    if found > SCHEMA_VERSION:
        raise NewerSchema(
            f"The database {shown} has schema {found}, and this tktune knows only {SCHEMA_VERSION}.",
            "Install a newer tktune, or name another database with TKTUNE_DB.",
        )
    if found < SCHEMA_VERSION:
        raise DatabaseError(
            f"The database {shown} has the older schema {found}; this tktune needs {SCHEMA_VERSION}.",
            "Bring it up to date with: tktune db upgrade.",
        )
