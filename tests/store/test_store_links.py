"""Measured links in the store: the newest one counts, classes stay apart, and an older database is brought up whole."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from sqlalchemy import create_engine
from store_cases import DEVICE, PROBLEM, config, toolchain, win

import tktune
from tktune.core.errors import DatabaseError
from tktune.store import results
from tktune.store.results import Store
from tktune.store.schema import SCHEMA_VERSION

FACTS = {"form": 1, "curves": [{"way": "pull", "sms": [1, 8], "gb_s": [43.0, 324.5]}], "launch_us": None}


def test_the_newest_measurement_comes_first_with_where_it_comes_from(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert store.links(DEVICE) == []
    for at, gb_s in ((200.0, 2), (300.0, 3), (100.0, 1)):
        monkeypatch.setattr(results.time, "time", lambda at=at: at)
        store.add_link(DEVICE, toolchain(store), {**FACTS, "gb_s": gb_s}, "580.65.06", "here")
    found = store.links(DEVICE)
    assert [(row.measured_at, row.facts["gb_s"]) for row in found] == [(300.0, 3), (200.0, 2), (100.0, 1)]
    assert (found[0].driver, found[0].toolchain, found[0].host) == ("580.65.06", "g++ one", "here")
    assert {**found[0].facts, "gb_s": 0} == {**FACTS, "gb_s": 0}
    assert store.check() == []


def test_device_classes_stay_apart(store: Store) -> None:
    other = dataclasses.replace(DEVICE, interconnect="none")
    store.add_link(DEVICE, toolchain(store), FACTS, "1", "here")
    assert store.links(other) == []
    store.add_link(other, toolchain(store), {}, "2", "there")
    assert [row.driver for row in store.links(DEVICE)] == ["1"]
    assert [row.driver for row in store.links(other)] == ["2"]


def test_a_reader_sees_links_and_cannot_write_them(path: Path) -> None:
    with Store.open(str(path)) as writer:
        writer.add_link(DEVICE, toolchain(writer), FACTS, "1", "here")
    with Store.open(str(path), mode="ro") as reader:
        assert len(reader.links(DEVICE)) == 1
        with pytest.raises(DatabaseError):
            reader.add_link(DEVICE, 1, FACTS, "1", "here")


@pytest.fixture
def older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database of the first schema, with a winner, a wanted problem, an event and device facts in it."""
    from alembic import command
    from alembic.config import Config

    path = tmp_path / "older.db"
    alembic = Config()
    alembic.set_main_option("script_location", str(Path(tktune.__file__).parent / "store" / "migrations"))
    engine = create_engine(f"sqlite:///{path}")
    with engine.begin() as connection:
        alembic.attributes["connection"] = connection
        command.upgrade(alembic, "0001")
    engine.dispose()
    with monkeypatch.context() as past:
        for module in ("schema", "opening"):
            past.setattr(f"tktune.store.{module}.SCHEMA_VERSION", "0001")
        with Store.open(str(path)) as store:
            win(store, PROBLEM, config(1), 77.0)
            store.want(PROBLEM.replace(tokens=7), DEVICE)
            store.event("note", "It was so.")
            store.note_device_facts(DEVICE, {"hops": 1})
            assert store.schema_version == "0001"
    return path


def test_an_older_database_is_refused_until_it_is_upgraded_and_then_has_all_it_had(older: Path) -> None:
    with pytest.raises(DatabaseError, match=r"older schema 0001.*tktune db upgrade"):
        Store.open(str(older))
    assert Store.upgrade(str(older)) == ("0001", SCHEMA_VERSION)
    with Store.open(str(older)) as store:
        assert store.check() == []
        winner = store.winner(PROBLEM, DEVICE)
        assert winner is not None and (winner.time_us, winner.config) == (77.0, config(1))
        assert [w.problem.tokens for w in store.wanted()] == [7]
        assert [e.sentence for e in store.events("note")] == ["It was so."]
        assert store.device_facts(DEVICE) == {"hops": 1} and store.links(DEVICE) == []
        store.add_link(DEVICE, toolchain(store), FACTS, "1", "here")
        assert len(store.links(DEVICE)) == 1
    assert Store.upgrade(str(older)) == (SCHEMA_VERSION, SCHEMA_VERSION)


def test_an_upgraded_database_has_exactly_the_tables_of_the_models(older: Path) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    from tktune.store.models import Base

    Store.upgrade(str(older))
    with create_engine(f"sqlite:///{older}").connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
