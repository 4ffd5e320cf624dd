"""What every command answers when its words are right, as text and as JSON."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import ROOT

Run = Callable[..., Any]
SHAPE = [
    "--hidden",
    "512",
    "--cols",
    "512",
    "--experts",
    "8",
    "--top-k",
    "2",
    "--world",
    "2",
    "--pad",
    "64",
    "--device",
    "cpu",
]
LOOKUP = ["--family", "dispatch_gemm", *SHAPE, "--tokens"]


@pytest.mark.parametrize(
    ("words", "forbidden"),
    [
        (["--help"], "torch optuna alembic numpy sqlalchemy pydantic rich"),
        (["run", "--help"], "torch optuna alembic numpy sqlalchemy rich"),
        (["lookup", *LOOKUP, "512"], "torch optuna alembic numpy rich"),
        (["explain", *LOOKUP, "512"], "torch optuna alembic numpy rich"),
        (["studies", "quickstart"], "torch optuna alembic numpy rich"),
        (["run", "quickstart", "--dry-run"], "torch optuna alembic numpy rich"),
        (["cache", "ls"], "torch optuna alembic numpy rich"),
        (["doctor"], "torch optuna alembic rich"),
        (["report"], "torch optuna alembic rich"),
    ],
    ids=lambda value: "-".join(value[:2]) if isinstance(value, list) else "",
)
def test_imports_are_late(words: list[str], forbidden: str, filled: str) -> None:
    program = (
        "import sys\nfrom tktune.cli.app import exit_code\n"
        f"assert exit_code({words!r}) == 0\n"
        f"sys.exit(' '.join(sorted(set({forbidden.split()!r}) & set(sys.modules))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 or done.stderr == "\n", done.stderr


@pytest.mark.alone
def test_help_is_quick(process: Run) -> None:
    process("--help")
    best = min(_seconds(lambda: process("--help")) for _ in range(5))
    assert best <= 0.4


@pytest.mark.alone
def test_a_lookup_is_quick(process: Run, filled: str) -> None:
    process("lookup", *LOOKUP, "512")
    best = min(_seconds(lambda: process("lookup", *LOOKUP, "512", "--json")) for _ in range(5))
    assert best <= 0.5


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@pytest.mark.parametrize(("tokens", "provenance"), [("512", "exact"), ("1024", "near"), ("8192", "default")])
def test_lookup_says_where_its_answer_comes_from(
    tokens: str, provenance: str, tktune: Run, filled: str
) -> None:
    answer = tktune("lookup", *LOOKUP, tokens, "--json").json
    assert answer["provenance"] == provenance
    assert (answer["time_us"] is None) == (provenance == "default")
    assert set(answer) >= {"config", "artifact_digest", "problem", "device", "measured_on"}
    said = tktune("lookup", *LOOKUP, tokens).out
    assert provenance in said and "num_comm_sms=" in said
    explained = tktune("explain", *LOOKUP, tokens)
    assert explained.code == 0 and len(explained.out) > 60
    assert tktune("explain", *LOOKUP, tokens, "--json").json["explanation"] == explained.out.strip()


def test_report_in_its_three_forms(tktune: Run, filled: str, places: Path) -> None:
    assert "# tktune report: quickstart" in tktune("report", "quickstart").out
    assert tktune("report", "quickstart", "--format", "json").json["problems"][0]["speedup"] == 2.0
    assert tktune("report", "--json").json["problems"][0]["speedup"] == 2.0
    assert len(list(csv.DictReader(io.StringIO(tktune("report", "--format", "csv").out)))) == 1
    out = places / "new" / "r.md"
    assert str(out) in tktune("report", "--out", str(out)).out
    assert out.read_text().startswith("# tktune report")


def test_a_report_of_what_is_not_measured_says_how_to_measure_it(tktune: Run, filled: str) -> None:
    ended = tktune("report", "gpt-oss-120b")
    assert ended.code == 1 and "tktune run gpt-oss-120b" in ended.err
    ended = tktune("report", "quickstart", "--device", "sm_120a")
    assert ended.code == 1 and "--device sm_120a" in ended.err


def test_export_then_import_gives_the_same_winner(tktune: Run, filled: str, places: Path) -> None:
    file, other = str(places / "x.json"), str(places / "other.db")
    assert tktune("export", "--out", file).code == 0
    assert tktune("export", "quickstart").out.count('"trials"') == 1
    first = tktune("import", file, "--db", other)
    assert first.code == 0 and "9 trials" in first.out
    again = tktune("import", file, "--db", other, "--json").json
    assert (again["trials"], again["known"]) == (0, 9)
    here, there = (tktune("lookup", *LOOKUP, "512", "--json", "--db", db).json for db in (filled, other))
    assert here["config"] == there["config"] and there["provenance"] == "exact"
    rows = list(csv.DictReader(io.StringIO(tktune("export", "--format", "csv").out)))
    assert len(rows) == 9
    assert (
        tktune("export", "--format", "csv", "--out", str(places / "x.csv"), "--json").json["format"] == "csv"
    )


def test_studies_lists_what_ships(tktune: Run) -> None:
    found = {study["name"]: study for study in tktune("studies", "--device", "cpu", "--json").json}
    assert set(found) >= {"quickstart", "gpt-oss-120b", "deepseek-v3", "mixtral-8x7b"}
    assert all(study["spaces"][0]["feasible"] > 0 for study in found.values())
    listing = tktune("studies", "--device", "cpu").out
    assert "quickstart" in listing and "first: feasible" in listing


def test_studies_counts_every_problem_of_a_given_one(tktune: Run, study: Run) -> None:
    path = study("tokens = [16, 32]", "pad = [16, 32]")
    said = tktune("studies", path)
    assert said.out.count("dispatch_gemm 64×64") == 4
    assert len(tktune("studies", path, "--json").json[0]["spaces"]) == 4


@pytest.mark.parametrize("device", ["cpu", "sm_90a", "sm_120a"])
def test_a_dry_run_shows_space_waterfall_builds_and_default(
    device: str, tktune: Run, study: Run, places: Path
) -> None:
    path = study("hidden = 2880", "cols = 5760", "pad = 64")
    said = tktune("run", path, "--dry-run", "--device", device)
    assert said.code == 0 and said.out.count("default: ") == 1
    assert "feasible, from" in said.out and "every combination" in said.out
    spaces = tktune("run", path, "--dry-run", "--device", device, "--json").json["problems"]
    for space in spaces:
        left = space["total"]
        for row in space["waterfall"]:
            left -= row["removed"]
            assert row["left"] == left
        assert left == space["feasible"] > 0 and space["builds"] > 0 and space["default"]
    assert not (places / "cache").exists() and not (places / "data").exists()


def test_a_dry_run_of_what_does_not_fit_still_shows_the_waterfall(tktune: Run, study: Run) -> None:
    ended = tktune("run", study("hidden = 50"), "--dry-run")
    assert ended.code == 2 and "0 of" in ended.out and ended.err.count("\n") == 1 and "hidden" in ended.err


def test_pins_shrink_the_space(tktune: Run, study: Run) -> None:
    whole = tktune("run", study(), "--dry-run", "--json").json["problems"][0]
    pinned = tktune("run", study(), "--dry-run", "--json", "--pin", "STAGES=2,3", "--pin", "order=token")
    assert 0 < pinned.json["problems"][0]["feasible"] < whole["feasible"]
    assert pinned.json["problems"][0]["default"]["STAGES"] in (2, 3)


def test_db_commands(tktune: Run, filled: str, places: Path) -> None:
    assert "9" in tktune("db", "stats").out
    stats = tktune("db", "stats", "--json").json
    assert stats["trials"] == 9 and stats["statuses"]["ok"] == 6
    assert "whole" in tktune("db", "check").out
    assert tktune("db", "check", "--json").json["ok"] is True
    assert "already" in tktune("db", "upgrade").out
    new = str(places / "new.db")
    assert "was made" in tktune("db", "upgrade", "--db", new).out
    assert tktune("db", "upgrade", "--db", new, "--json").json["before"] is not None


def test_db_check_finds_what_is_wrong(tktune: Run, filled: str) -> None:
    import sqlite3

    with sqlite3.connect(filled.removeprefix("sqlite:///")) as connection:
        connection.execute("UPDATE problem SET digest = 'x'")
    connection.close()
    ended = tktune("db", "check")
    assert ended.code == 1 and "digest" in ended.out
    assert tktune("db", "check", "--json").json["ok"] is False


def test_a_password_is_never_printed(tktune: Run) -> None:
    for words in (["db", "stats"], ["report"], ["doctor"]):
        ended = tktune(*words, "--db", "postgresql://me:secret@127.0.0.1:9/none")
        assert "secret" not in ended.out + ended.err and ended.code == 1


def test_doctor_finds_what_a_run_needs(tktune: Run, filled: str) -> None:
    ended = tktune("doctor")
    assert ended.code == 0, ended.out
    for word in ("cpu", "g++", "memfd", "database", "9 trials", "cache", "disk", "All is well"):
        assert word in ended.out
    checks = {check["name"]: check for check in tktune("doctor", "--json").json["checks"]}
    assert checks["g++"]["ok"] and checks["cpu"]["ok"]


def test_doctor_says_what_is_missing(tktune: Run, places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bin_folder = places / "bin"
    bin_folder.mkdir()
    monkeypatch.setenv("PATH", str(bin_folder))
    (places / "open").mkdir()
    (places / "open").chmod(0o777)
    (places / "bad.db").write_text("this is no database" * 100)
    ended = tktune("doctor", "--db", str(places / "bad.db"), "--cache", str(places / "open"))
    assert ended.code == 1
    assert (
        "g++: Install it" in ended.out and "bad.db" in ended.out and "chmod" not in ended.out.splitlines()[-1]
    )
    advice = tktune("doctor", "--cache", str(places / "open"), "--json").json
    assert advice["ok"] is False


def test_doctor_makes_nothing(tktune: Run, places: Path) -> None:
    assert tktune("doctor").code == 0
    assert not (places / "data").exists() and not (places / "cache").exists()


@pytest.fixture
def artifacts(places: Path) -> Path:
    """A cache with two published artifacts, made without a compiler; its root."""
    import hashlib

    from tktune.build.artifact import Artifact
    from tktune.build.folder import CacheFolder

    folder = CacheFolder(places / "cache" / "tktune")
    folder.create()
    for number in range(2):
        code = bytes([number]) * 100
        digest = hashlib.sha256(b"name" + code).hexdigest()
        private = folder.private_folder()
        (private / "kernel.so").write_bytes(code)
        artifact = Artifact(
            digest, private / "kernel.so", hashlib.sha256(code).hexdigest(), 100, {}, "t", "2026-01-01", 1.0, 1,
            describes={"name": f"kernel-{number}"},
        )  # fmt: skip
        assert folder.publish(private, digest, artifact.manifest())
    return folder.root


def test_cache_lists_verifies_and_cleans(tktune: Run, artifacts: Path) -> None:
    listing = tktune("cache", "ls")
    assert "kernel-0" in listing.out and "2 artifacts" in listing.out
    assert len(tktune("cache", "ls", "--json").json) == 2
    assert "all whole" in tktune("cache", "verify").out
    victim = next((artifacts / "artifacts").glob("*/kernel.so"))
    victim.write_bytes(b"short")
    ended = tktune("cache", "verify")
    assert ended.code == 1 and "5 bytes instead of 100" in ended.out
    assert len(tktune("cache", "verify", "--json").json["bad"]) == 1
    assert "Removed 0" in tktune("cache", "gc", "--older-than-days", "1").out
    assert len(tktune("cache", "gc", "--max-mib", "0", "--json").json["removed"]) == 2
    assert "No artifacts" in tktune("cache", "ls").out


def test_gc_keeps_the_artifacts_of_winners(tktune: Run, artifacts: Path, filled: str) -> None:
    from stored_run import DIGEST

    place = next((artifacts / "artifacts").iterdir())
    manifest = json.loads((place / "manifest.json").read_text())
    (place / "manifest.json").write_text(json.dumps({**manifest, "digest": DIGEST}))
    place.rename(place.with_name(DIGEST))
    assert tktune("cache", "gc", "--max-mib", "0").code == 0
    assert [entry["digest"] for entry in tktune("cache", "ls", "--json").json] == [DIGEST]
    assert len(tktune("cache", "gc", "--max-mib", "0", "--all", "--json").json["removed"]) == 1


def test_a_closed_pipe_is_no_defect(filled: str) -> None:
    done = subprocess.run(
        f"{sys.executable} -m tktune report | head -1",
        shell=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "# tktune report\n" and done.stderr == ""
