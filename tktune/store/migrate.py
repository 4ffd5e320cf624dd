"""Create and upgrade a database with Alembic, without an ini file. The only module that imports Alembic, and late."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection

from tktune.core.errors import DatabaseError


def migrate(connection: Connection) -> None:
    """Bring the schema to the newest version, inside the transaction that `connection` is in.

    Either all of it happens or none: DDL is transactional on SQLite and on PostgreSQL. Raises `DatabaseError` for a
    version that no migration leads on from.
    """
    from alembic import command
    from alembic.config import Config
    from alembic.util.exc import CommandError

    config = Config()
    location = str(Path(__file__).with_name("migrations"))
    config.set_main_option("script_location", location.replace("%", "%%"))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise DatabaseError(
            f"The database's schema cannot be upgraded: {error}.", "Keep it, and name another with TKTUNE_DB."
        ) from error
