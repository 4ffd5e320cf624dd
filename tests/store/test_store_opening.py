"""Opening databases: fresh ones, foreign ones, broken ones, newer ones, and ones nobody may write."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import create_engine
from store_cases import ART, DEVICE, PROBLEM, as_nobody, child, config, edit, ended_well, open_key, prove, win

import tktune
from tktune.core.errors import DatabaseError, NewerSchema
from tktune.store import location
from tktune.store.engine import Database
from tktune.store.location import place
from tktune.store.models import Base
from tktune.store.results import Store
from tktune.store.schema import SCHEMA_VERSION

GARBAGE = [b"\x07", b"SQLite format", b"not a database\n" * 40, bytes(range(256)) * 64, b"\0" * 4096]


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that every user can read and only this one can write."""
    folder = Path(tempfile.mkdtemp(prefix="tktune-test-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def test_the_migrations_make_exactly_the_tables_of_the_models(path: Path) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    with create_engine(f"sqlite:///{path}").connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []


def test_the_version_that_the_code_speaks_of_is_the_newest_migration(path: Path) -> None:
    from alembic.script import ScriptDirectory

    scripts = Path(tktune.__file__).parent / "store" / "migrations"
    assert ScriptDirectory(str(scripts)).get_current_head() == SCHEMA_VERSION
    with Store.open(str(path)) as store:
        assert store.schema_version == SCHEMA_VERSION


def test_a_fresh_database_is_made_with_its_folder_in_wal_mode(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "tktune.db"
    with Store.open(f"sqlite:///{path}") as store:
        assert store.check() == [] and store.stats()["trials"] == 0
        assert store.shown == str(path) and store.url == f"sqlite:///{path}"
    assert path.read_bytes()[18:20] == b"\x02\x02"  # the header's WAL marks
    assert [p.name for p in path.parent.iterdir()] == ["tktune.db"]


def test_an_empty_file_is_a_fresh_database(tmp_path: Path) -> None:
    path = tmp_path / "tktune.db"
    path.touch()
    with pytest.raises(DatabaseError, match="still empty"):
        Store.open(str(path), mode="ro")
    with Store.open(str(path)) as store:
        assert store.stats()["trials"] == 0


@pytest.mark.alone
def test_a_fresh_database_is_made_within_a_second(tmp_path: Path) -> None:
    program = (
        "import sys, time; from tktune.store.results import Store; before = time.perf_counter();"
        "Store.open(sys.argv[1]).close(); print(time.perf_counter() - before);"
        "assert 'alembic' in sys.modules"
    )
    times = [
        float(subprocess.run([sys.executable, "-c", program, str(tmp_path / f"{n}.db")], capture_output=True, check=True).stdout)
        for n in range(3)
    ]  # fmt: skip
    assert min(times) <= 1.0


def test_alembic_is_not_imported_for_a_database_that_is_up_to_date(path: Path) -> None:
    program = (
        "import sys; from tktune.store.results import Store\n"
        "with Store.open(sys.argv[1]) as store: store.event('note', 'hello')\n"
        "assert not {'alembic', 'numpy', 'torch', 'optuna'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(path)], check=True)


def test_an_installed_copy_makes_databases_without_any_file_beside_it(tmp_path: Path) -> None:
    site = tmp_path / "50% off site"
    package = Path(tktune.__file__).parent
    for part in ("core", "families", "store"):
        shutil.copytree(package / part, site / "tktune" / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(package / "__init__.py", site / "tktune")
    program = "import sys, tktune; from tktune.store.results import Store; Store.open(sys.argv[1]); print(tktune.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "new.db")],
        capture_output=True, text=True, check=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    assert done.stdout.startswith(str(site)) and (tmp_path / "new.db").exists()


@pytest.mark.parametrize("content", GARBAGE, ids=[f"{len(g)} bytes" for g in GARBAGE])
@pytest.mark.parametrize("mode", ["rw", "ro"])
def test_a_file_that_is_no_database_is_refused_and_left_untouched(
    tmp_path: Path, content: bytes, mode: str
) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    with pytest.raises(DatabaseError, match=r"is not a database; it was left untouched\. Move it away"):
        Store.open(str(path), mode=mode)  # type: ignore[arg-type]
    assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("share", [0.01, 0.5, 0.97])
def test_a_truncated_database_is_refused_and_left_untouched(path: Path, share: float) -> None:
    content = path.read_bytes()
    content = content[: int(len(content) * share)]
    path.write_bytes(content)
    with pytest.raises(DatabaseError, match="damaged; it was left untouched"):
        Store.open(str(path))
    assert path.read_bytes() == content


def test_the_database_of_another_program_is_refused(tmp_path: Path, path: Path) -> None:
    other = tmp_path / "other.db"
    edit(other, "CREATE TABLE photos (name TEXT)")
    with pytest.raises(DatabaseError, match="belongs to another program"):
        Store.open(str(other))
    edit(path, "UPDATE alembic_version SET version_num = '5e1f00d'")
    with pytest.raises(DatabaseError, match="belongs to another program"):
        Store.open(str(path))


@pytest.mark.parametrize("mode", ["rw", "ro"])
def test_a_newer_schema_is_refused_in_a_sentence_and_left_untouched(path: Path, mode: str) -> None:
    edit(path, "UPDATE alembic_version SET version_num = '9000'")
    content = path.read_bytes()
    with pytest.raises(
        NewerSchema, match=r"has schema 9000, and this tktune knows only 0002\. Install a newer tktune"
    ):
        Store.open(str(path), mode=mode)  # type: ignore[arg-type]
    with pytest.raises(NewerSchema):
        Store.upgrade(str(path))
    assert path.read_bytes() == content


def test_an_older_schema_names_the_upgrade_and_one_without_a_way_is_refused(path: Path) -> None:
    edit(path, "UPDATE alembic_version SET version_num = '0000'")
    with pytest.raises(DatabaseError, match=r"older schema 0000.*tktune db upgrade"):
        Store.open(str(path))
    with pytest.raises(DatabaseError, match="cannot be upgraded"):
        Store.upgrade(str(path))


def test_upgrade_makes_a_database_where_there_is_none(tmp_path: Path) -> None:
    assert Store.upgrade(str(tmp_path / "new.db")) == (None, SCHEMA_VERSION)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("mysql://me@host/name", "scheme 'mysql' is not known"),
        ("sqlite://relative.db", "names no file"),
        ("postgresql://me:secret@127.0.0.1:1/none", r"me:\*\*\*@127|driver psycopg is not"),
    ],
)
def test_a_url_that_leads_nowhere_is_refused_in_words(url: str, words: str) -> None:
    with pytest.raises(DatabaseError, match=words) as refusal:
        Store.open(url)
    assert "secret" not in str(refusal.value)


def test_places_that_cannot_hold_a_database_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(DatabaseError, match=r"folder of the database .* cannot be made"):
        Store.open(str(tmp_path / "file" / "tktune.db"))
    with pytest.raises(DatabaseError, match="cannot be opened"):
        Store.open(str(tmp_path))
    with pytest.raises(DatabaseError, match="There is no database at"):
        Store.open(str(tmp_path / "none.db"), mode="ro")
    assert not (tmp_path / "none.db").exists()


def test_without_permission_to_write_one_can_read_and_is_told_so(public_folder: Path, template: Path) -> None:
    path = Path(shutil.copy(template, public_folder / "tktune.db"))
    path.chmod(0o644)
    with Store.open(str(path)) as store:
        win(store, PROBLEM, config(1))

    def ask() -> dict[str, str]:
        answers = {}
        for name, work in {
            "new": lambda: Store.open(str(public_folder / "new.db")).close(),
            "below": lambda: Store.open(str(public_folder / "a" / "new.db")).close(),
            "old": lambda: Store.open(str(path)).close(),
        }.items():
            try:
                work()
                answers[name] = "opened"
            except DatabaseError as error:
                answers[name] = str(error)
        with Store.open(str(path), mode="ro") as store:
            winner = store.winner(PROBLEM, DEVICE)
            answers["winner"] = str(winner and winner.config)
            answers["want"] = str(store.want(PROBLEM, DEVICE))
        return answers

    answers = as_nobody(ask)
    assert "cannot be opened" in answers["new"] and "cannot be made" in answers["below"]
    assert answers["old"] != "opened" and "TKTUNE_DB" in answers["old"]
    assert answers["winner"] == str(config(1)) and answers["want"] == "False"


def test_a_network_file_system_gets_a_rollback_journal_and_one_warning(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(location, "file_system_magic", lambda folder: 0x6969)
    for _ in range(2):
        with Store.open(str(path)) as store:
            (event,) = store.events("network_file_system")
            prove(store, open_key(store), config(store.stats()["trials"]))
    assert "NFS" in event.sentence and event.detail == {"file_system": "NFS", "journal": "delete"}
    assert path.read_bytes()[18:20] == b"\x01\x01"  # no WAL marks


def test_this_file_system_is_told_apart_by_its_magic(tmp_path: Path) -> None:
    assert location.file_system_magic(Path("/proc")) == 0x9FA0
    assert location.file_system_magic(tmp_path / "absent") == 0


def test_a_database_in_memory_works_and_is_gone_afterwards() -> None:
    with Store.open("sqlite://") as store:
        win(store, PROBLEM, config(1))
        assert store.winner(PROBLEM, DEVICE) is not None and store.want(PROBLEM, DEVICE)
        assert store.check() == []
    with Store.open("sqlite://") as store:
        assert store.stats()["trials"] == 0


def test_processes_that_make_the_same_database_at_once_all_get_it(tmp_path: Path) -> None:
    path = tmp_path / "tktune.db"

    def work(say: object) -> None:
        with Store.open(str(path)) as store:
            prove(store, open_key(store), config(os.getpid() % 1000), artifact=str(os.getpid()))

    children = [child(work) for _ in range(4)]
    assert [pid for pid, _ in children if not ended_well(pid)] == []
    with Store.open(str(path)) as store:
        assert store.stats()["trials"] == 4 and store.check() == []


def test_a_busy_database_is_told_in_words_and_want_does_not_wait(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tktune.store.engine.BUSY_TIMEOUT_S", 0.05)
    with Store.open(str(path)) as store, Database.opened(place(str(path)), "rw") as other:
        key = open_key(store)
        with other.write():
            with pytest.raises(DatabaseError, match="Another process is writing"):
                store.start_trial(key, config(1), ART, "run")
            assert store.want(PROBLEM, DEVICE) is False
            assert store.trials(key) == []
        store.start_trial(key, config(1), ART, "run")
