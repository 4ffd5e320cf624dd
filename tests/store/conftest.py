"""Fixtures: a database of each backend, made from a template so that tests do not migrate each time."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tktune.store.results import Store


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "empty.db"
    Store.open(str(path)).close()
    return path


@pytest.fixture
def path(template: Path, tmp_path: Path) -> Path:
    """A fresh SQLite database of today's schema."""
    return Path(shutil.copy(template, tmp_path / "tktune.db"))


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a fresh database; on PostgreSQL a schema of its own in TKTUNE_TEST_POSTGRES."""
    if request.param == "sqlite":
        yield f"sqlite:///{shutil.copy(request.getfixturevalue('template'), tmp_path / 'tktune.db')}"
        return
    server = os.environ.get("TKTUNE_TEST_POSTGRES")
    if not server:
        pytest.skip("TKTUNE_TEST_POSTGRES names no server")
    from sqlalchemy import create_engine, text

    from tktune.store.location import place

    engine = create_engine(place(server).url)
    schema = f"tktune_test_{uuid.uuid4().hex[:12]}"
    with engine.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {schema}"))
    joint = "&" if "?" in server else "?"
    yield f"{server}{joint}options=-csearch_path%3D{schema}"
    with engine.begin() as connection:
        connection.execute(text(f"DROP SCHEMA {schema} CASCADE"))
    engine.dispose()


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with Store.open(url) as opened:
        yield opened


@pytest.fixture
def sqlite_store(path: Path) -> Iterator[Store]:
    with Store.open(str(path)) as opened:
        yield opened
