"""Wrong words and bad input: one sentence on stderr, the right exit code, never a traceback."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SHAPE = [
    "--hidden",
    "64",
    "--cols",
    "64",
    "--experts",
    "4",
    "--top-k",
    "2",
    "--tokens",
    "32",
    "--world",
    "2",
    "--device",
    "cpu",
]
LOOKUP = ["lookup", "--family", "dispatch_gemm", *SHAPE]
COMMANDS = [
    ["doctor"],
    ["run"],
    ["lookup"],
    ["explain"],
    ["report"],
    ["export"],
    ["import"],
    ["studies"],
    ["cache", "ls"],
    ["cache", "gc"],
    ["cache", "verify"],
    ["db", "upgrade"],
    ["db", "check"],
    ["db", "stats"],
]
Run = Callable[..., Any]


def refused(ended: Any, code: int, *words: str) -> None:
    """One line on stderr that holds `words`, and this exit code."""
    assert ended.code == code, ended
    assert ended.err.count("\n") == 1 and ended.err.endswith("\n"), ended.err
    assert "Traceback" not in ended.err
    for word in words:
        assert word in ended.err, ended.err


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_help_with_an_example_and_json(command: list[str], tktune: Run) -> None:
    ended = tktune(*command, "--help")
    assert ended.code == 0
    assert "Example: tktune " + command[0] in " ".join(ended.out.split())
    assert "--json" in ended.out and "--debug" in ended.out


def test_no_words_show_the_help(tktune: Run) -> None:
    ended = tktune()
    assert ended.code == 0 and "Commands:" in ended.out and "tktune doctor" in ended.out


def test_the_version_is_printed(tktune: Run) -> None:
    import tktune as package

    assert tktune("--version").out == f"tktune {package.__version__}\n"


WRONG_WORDS = {
    "an unknown command": (["rnu"], "rnu"),
    "an unknown option": (["run", "x", "--trails", "3"], "--trails"),
    "no study": (["run"], "STUDY"),
    "a group without a command": (["cache"], "ls"),
    "a group with a wrong command": (["db", "chekc"], "check"),
    "no subject to gc": (["cache", "gc"], "--older-than-days"),
    "a format there is not": (["report", "--format", "pdf"], "pdf"),
    "a family there is not": (["lookup", "--family", "nope", *SHAPE], "nope"),
    "a module there is not": (["lookup", "--family", "no.module:X", *SHAPE], "no.module"),
    "no family": (["lookup", *SHAPE], "--family"),
    "a device there is not": ([*LOOKUP[:-1], "tpu"], "tpu"),
    "a routing there is not": ([*LOOKUP, "--routing", "skewed"], "skewed"),
    "a dtype there is not": ([*LOOKUP, "--dtype", "fp64"], "fp64"),
    "a layout there is not": ([*LOOKUP, "--weight-layout", "nk"], "nk"),
    "ep_rank of another family": ([*LOOKUP, "--ep-rank", "0"], "ep_"),
    "a pin without a value": (["run", "quickstart", "--dry-run", "--pin", "STAGES"], "STAGES"),
    "a pin of nothing": (["run", "quickstart", "--dry-run", "--pin", "STAGES="], "STAGES"),
    "a pin there is not": (["run", "quickstart", "--dry-run", "--pin", "COLOUR=1"], "COLOUR"),
    "a pin to a value there is not": (["run", "quickstart", "--dry-run", "--pin", "STAGES=99"], "99"),
    "a study there is not": (["run", "nope"], "nope"),
    "a study file there is not": (["run", "nope/nope.toml"], "nope.toml"),
    "a folder for a study": (["run", "/"], "folder"),
    "a study there is not, to report": (["report", "nope"], "nope"),
    "a file there is not, to import": (["import", "nope.json"], "nope.json"),
    "a folder to import": (["import", "/"], "/"),
    "a database scheme there is not": (["db", "stats", "--db", "mongo://x"], "mongo"),
}


@pytest.mark.parametrize("what", WRONG_WORDS)
def test_wrong_words_are_one_sentence_and_exit_2(what: str, tktune: Run) -> None:
    words, named = WRONG_WORDS[what]
    code = 1 if what.startswith("a database scheme") else 2
    refused(tktune(*words), code, named)


@pytest.mark.parametrize("what", ["an unknown command", "an unknown option", "a study there is not"])
def test_with_json_an_error_is_an_object(what: str, tktune: Run) -> None:
    words, named = WRONG_WORDS[what]
    ended = tktune(*words, "--json")
    error = json.loads(ended.err)
    assert (
        ended.code == 2
        and set(error) == {"error", "way_out"}
        and named in error["error"]
        and error["way_out"]
    )


NUMBERS = {
    ("run", "--trials"): ["0", "-1", "1.5", "many", "99999999999999999999", ""],
    ("run", "--seconds"): ["0", "-1", "nan", "inf", "-inf", "long", "1e300"],
    ("run", "--seed"): ["-1", "x", "99999999999999999999"],
    ("cache gc", "--older-than-days"): ["-1", "nan", "inf", "old"],
    ("cache gc", "--max-mib"): ["-1", "x", "99999999999999999999"],
    **{
        ("lookup", f"--{name}"): ["0", "-1", "1.5", "many", "99999999999999999999"]
        for name in ("hidden", "cols", "experts", "top-k", "tokens", "world", "pad", "ep-world")
    },
    ("lookup", "--ep-rank"): ["-1", "x", "99999999999999999999"],
}


@pytest.mark.parametrize(("place", "value"), [(p, v) for p, values in NUMBERS.items() for v in values])
def test_numbers_out_of_range_are_refused(place: tuple[str, str], value: str, tktune: Run) -> None:
    command, option = place
    rest = {"run": ["quickstart", "--dry-run"], "lookup": LOOKUP[1:], "cache gc": []}[command]
    refused(tktune(*command.split(), *rest, option, value), 2, option)


@pytest.mark.parametrize("name", ["hidden", "cols", "experts", "top-k", "tokens", "world", "pad"])
def test_the_largest_numbers_end_in_a_sentence_or_an_answer(name: str, tktune: Run) -> None:
    ended = tktune(*LOOKUP, f"--{name}", "2147483647")
    assert ended.code in (0, 2) and "Traceback" not in ended.err
    assert ended.code == 0 or ended.err.count("\n") == 1


BAD_STUDIES = {
    "an unknown key": (["hiden = 64"], "hiden"),
    "a wrong type": (['hidden = "64"'], "hidden"),
    "a fraction": (["tokens = 1.5"], "tokens"),
    "world 0": (["world = 0"], "world"),
    "world 99": (["world = 99"], "world"),
    "top_k > experts": (["top_k = 5"], "top_k"),
    "tokens 0": (["tokens = 0"], "tokens"),
    "tokens negative": (["tokens = -4"], "tokens"),
    "an empty list": (["tokens = []"], "tokens"),
    "experts that ranks do not share": (["experts = 5"], "experts"),
    "an odd pad": (["pad = 7"], "pad"),
    "a strange routing": (['routing = "skewed"'], "skewed"),
    "a trace there is not": (['routing = "trace:nope.npy"'], "nope.npy"),
    "a strange device": (['device = "tpu"'], "tpu"),
    "a strange family": (['family = "nope"'], "nope"),
    "trials 0": (["trials = 0"], "trials"),
    "seconds negative": (["seconds = -1"], "seconds"),
    "seconds nan": (["seconds = nan"], "seconds"),
    "finalists 0": (["finalists = 0"], "finalists"),
    "not TOML": (["hidden = = 3"], "TOML"),
    "a shape no config fits": (["hidden = 50"], "hidden"),
    "a huge shape": (["hidden = 1000000000000000000000000"], "hidden"),
    "a device that is not there": (['device = "sm_90a"'], "sm_90a"),
}


@pytest.mark.parametrize("what", BAD_STUDIES)
def test_a_bad_study_is_refused_before_any_work(what: str, tktune: Run, study: Run, places: Path) -> None:
    lines, named = BAD_STUDIES[what]
    refused(tktune("run", study(*lines)), 2, named)
    assert not (places / "data" / "tktune" / "tktune.db").exists()
    assert not (places / "cache").exists()


@pytest.mark.parametrize("field", ["name", "family", "hidden", "cols", "experts", "top_k", "tokens"])
def test_a_missing_field_is_named(field: str, tktune: Run, study: Run) -> None:
    refused(tktune("run", study(without=field)), 2, field)


def test_a_binary_study_is_refused(tktune: Run, places: Path) -> None:
    path = places / "binary.toml"
    path.write_bytes(bytes(range(256)))
    refused(tktune("run", str(path)), 2, "binary.toml")


def unreadable(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"this is no database" * 100)


def newer(path: Path) -> None:
    from tktune.store.results import Store

    Store.open(f"sqlite:///{path}").close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()


def folder(path: Path) -> None:
    path.mkdir(parents=True)


DATABASES = {"unreadable": unreadable, "newer": newer, "a folder": folder}
USERS = [
    ["report"],
    ["export"],
    ["db", "check"],
    ["db", "stats"],
    ["db", "upgrade"],
    ["run"],
    LOOKUP,
    ["import"],
]


@pytest.mark.parametrize("kind", DATABASES)
@pytest.mark.parametrize(
    "words", USERS, ids=lambda words: words[0] + words[1] if len(words) == 2 else words[0]
)
def test_a_database_that_cannot_be_used_is_left_alone(
    kind: str, words: list[str], tktune: Run, study: Run, places: Path
) -> None:
    path = places / "bad.db"
    DATABASES[kind](path)
    before = path.read_bytes() if path.is_file() else b""
    words = [*words, study()] if words == ["run"] else words
    if words == ["import"]:
        (places / "x.json").write_text(
            '{"format": "tktune-export", "version": 1, "made_by": "", "made_at": "", "keys": []}'
        )
        words = ["import", str(places / "x.json")]
    refused(tktune(*words, "--db", str(path)), 1, "bad.db")
    assert (path.read_bytes() if path.is_file() else b"") == before


@pytest.mark.skipif(os.geteuid() != 0 and not os.access("/proc/1", os.R_OK), reason="needs /proc")
@pytest.mark.parametrize("words", [["db", "upgrade"], ["run"]], ids=" ".join)
def test_a_database_that_cannot_be_written_is_named(words: list[str], tktune: Run, study: Run) -> None:
    words = [*words, study()] if words == ["run"] else words
    refused(tktune(*words, "--db", "/proc/nowhere/x.db"), 1, "/proc/nowhere/x.db")


@pytest.mark.parametrize("words", [["report"], ["export"], ["db", "check"], ["db", "stats"]], ids=" ".join)
def test_reading_makes_no_database(words: list[str], tktune: Run, places: Path) -> None:
    refused(tktune(*words, "--db", str(places / "none.db")), 1, "none.db", "tktune run")
    assert not (places / "none.db").exists()


def test_a_cache_that_others_can_write_is_refused(tktune: Run, places: Path) -> None:
    (places / "open").mkdir()
    (places / "open").chmod(0o777)
    for command in ("ls", "verify"):
        refused(tktune("cache", command, "--cache", str(places / "open")), 1, "open", "chmod")


def test_a_file_in_place_of_the_cache_is_refused(tktune: Run, places: Path, study: Run) -> None:
    (places / "file").write_text("")
    for words in (["cache", "ls"], ["run", study()]):
        refused(tktune(*words, "--cache", str(places / "file")), 1, "file")


@pytest.mark.parametrize("words", [["report", "--out"], ["export", "--out"]], ids=" ".join)
def test_a_place_that_cannot_be_written_is_named(
    words: list[str], tktune: Run, filled: str, places: Path
) -> None:
    (places / "plain").write_text("")
    for place in ("/proc/nowhere/x.md", str(places / "plain" / "x.md"), str(places)):
        refused(tktune(*words, place), 1, place)


def test_a_report_folder_is_tried_before_any_work(tktune: Run, study: Run, places: Path) -> None:
    (places / "plain").write_text("")
    refused(tktune("run", study(), "--report-dir", str(places / "plain")), 1, "plain")
    assert not (places / "data").exists()


def test_debug_shows_the_traceback(tktune: Run) -> None:
    ended = tktune("run", "nope", "--debug")
    assert ended.code == 2 and "Traceback" in ended.err and "StudyError" in ended.err


def test_a_defect_is_one_sentence_too(process: Run, places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (places / "sitecustomize.py").write_text(
        "import tktune.cli.doctor as d\ndef broken(*a): raise ValueError('two\\nlines')\nd._versions = broken\n"
    )
    import subprocess
    import sys

    from command_line import ROOT

    for flag, traceback in ((), False), (("--debug",), True):
        done = subprocess.run(
            [sys.executable, "-m", "tktune", "doctor", *flag],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{places}:{ROOT}"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        assert ("Traceback" in done.stderr) == traceback
        assert traceback or (done.stderr.count("\n") == 1 and "ValueError: two lines" in done.stderr)
