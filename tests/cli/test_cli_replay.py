"""`tktune run --replay` and `--record`, `--effort`, `--start-from`: what they print, and what they refuse."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import ROOT

sys.path.insert(0, str(ROOT / "tests" / "search"))

Run = Callable[..., Any]


@pytest.fixture
def toy(places: Path) -> str:
    from recorded import recording

    from tktune.search.recording_form import write_recording

    path = places / "toy.json.xz"
    write_recording(recording(), path)
    return str(path)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_replay_shows_a_run_and_the_truth(tktune: Run, toy: str, places: Path) -> None:
    ended = tktune("run", "--replay", toy)
    assert ended.code == 0, ended
    for part in (
        "72 of 72 configs feasible",
        "  ok  ",
        "Winner:",
        "In truth:",
        "optimum",
        "+0.0%",
        "Charged",
    ):
        assert part in ended.out, part
    assert "tktune lookup" not in ended.out and "The report" not in ended.out
    assert [child.name for child in places.iterdir()] == ["toy.json.xz"]  # no database, cache or report


def test_a_replay_speaks_json(tktune: Run, toy: str) -> None:
    words = ["run", "--replay", toy, "--replay-noise", "0.02", "--seed", "3", "--trials", "30", "--json"]
    told = lines(tktune(*words).out)
    assert told[0]["event"] == "space_ready" and told[-1]["event"] == "replayed"
    last = told[-1]
    assert last["gap"] < 0.1 and last["winner_us"] and last["charged_s"] > last["run_s"] > 0
    assert last["results"][0]["measured"] == 30
    again = lines(tktune(*words).out)
    assert again == told
    assert last["command"] == f"tktune run --trials 30 --seed 3 --replay {toy} --replay-noise 0.02"


def test_a_study_lends_budget_and_pins(tktune: Run, toy: str, study: Run) -> None:
    path = study()
    told = lines(tktune("run", path, "--replay", toy, "--pin", "STAGES=2", "--json").out)
    assert told[0]["feasible"] == 24 and told[-1]["results"][0]["measured"] == 6
    assert told[-1]["optimum"]["STAGES"] == 2


def test_an_effort_changes_the_budget_of_a_replay(tktune: Run, toy: str) -> None:
    told = lines(tktune("run", "--replay", toy, "--effort", "quick", "--json").out)
    assert max(line["of"] for line in told if line["event"] == "finalist_round") == 6
    assert told[-1]["results"][0]["measured"] <= 60
    whole = lines(tktune("run", "--replay", toy, "--effort", "exhaustive", "--json").out)[-1]["results"][0]
    assert whole["ended"] == "every feasible config is measured."
    few = lines(tktune("run", "--replay", toy, "--effort", "exhaustive", "--trials", "5", "--json").out)
    assert few[-1]["results"][0]["measured"] == 5


def test_a_start_is_tried_second(tktune: Run, toy: str) -> None:
    words = ["run", "--replay", toy, "--start-from", "TILE=64 STAGES=3", "--json"]
    told = lines(tktune(*words).out)
    done = [line for line in told if line["event"] == "trial_done" and line["status"] != "build_failed"]
    assert done[1]["config"] == done[0]["config"] | {"TILE": 64, "STAGES": 3}


def test_failures_and_drift_are_replayed(tktune: Run, toy: str) -> None:
    ended = tktune("run", "--replay", toy, "--replay-failures", "0.3", "--replay-drift", "0.2@10")
    assert ended.code == 0 and "crashed" in ended.out and "stored as measured" in ended.out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--replay", "none.json"], "No such file"),
        (["--replay", "TOY", "--device", "cpu"], "A replay takes no --device"),
        (["--replay", "TOY", "--db", "x.db"], "A replay takes no --db"),
        (["--replay", "TOY", "--record", "x.json"], "A replay takes no --record"),
        (["--replay", "TOY", "--dry-run"], "A replay takes no --dry-run"),
        (["--replay", "TOY", "--replay-drift", "much"], "SHARE@SECONDS"),
        (["--replay", "TOY", "--replay-drift", "nan"], "SHARE@SECONDS"),
        (["--replay", "TOY", "--replay-noise", "7"], "--replay-noise"),
        (["--replay", "TOY", "--pin", "COLOUR=1"], "no parameter 'COLOUR'"),
        (["--replay", "TOY", "--start-from", "TILE=17"], "TILE cannot be 17"),
        (["--replay", "TOY", "--effort", "lazy"], "quick, full, exhaustive"),
        (["quickstart", "--effort", "lazy", "--dry-run"], "quick, full, exhaustive"),
        (["quickstart", "--replay-noise", "0.1"], "Only a replay takes --replay-noise"),
        (["quickstart", "--record", "x.json", "--trials", "5"], "takes no --trials"),
        (["quickstart", "--record", "x.txt"], ".json.xz"),
        ([], "STUDY is missing"),
    ],
)
def test_what_cannot_be_meant_is_refused_in_one_sentence(
    tktune: Run, toy: str, words: list[str], said: str
) -> None:
    ended = tktune("run", *[toy if word == "TOY" else word for word in words])
    assert ended.code == 2, ended
    assert said in ended.err and "Traceback" not in ended.err and ended.err.count("\n") == 1


def test_a_space_that_is_too_large_is_not_recorded(tktune: Run, study: Run, places: Path) -> None:
    path = study("hidden = 512", "cols = 768", "tokens = 512", "pad = 128")
    ended = tktune("run", path, "--record", str(places / "x.json.xz"))
    assert ended.code == 2 and "a recording takes at most 8000" in ended.err and "--pin" in ended.err
    assert not (places / "x.json.xz").exists()


def test_a_recording_is_written_and_replayed(
    tktune: Run, study: Run, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recorded import recording

    monkeypatch.setattr("tktune.cli.replaying.record", lambda *words, **more: recording())
    path = places / "folder" / "x.json.gz"
    ended = tktune("run", study(), "--record", str(path))
    assert ended.code == 0 and "Recorded 72 configs of 12 builds" in ended.out, ended
    assert lines(tktune("run", study(), "--record", str(path), "--json").out)[-1]["event"] == "recorded"
    assert tktune("run", "--replay", str(path), "--trials", "5").code == 0
    monkeypatch.setattr("tktune.cli.replaying.record", lambda *words, **more: None)
    assert tktune("run", study(), "--record", str(path)).code == 1


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_small_space_of_the_cpu_is_recorded_and_replayed(process: Run, study: Run, places: Path) -> None:
    path, file = study(), str(places / "small.json.xz")
    pins = [
        "--pin",
        "STAGES=2",
        "--pin",
        "CONSUMER_WARPS=1",
        "--pin",
        "RED_BLOCK=64",
        "--pin",
        "ROW_BLOCK=32",
    ]
    ended = process("run", path, *pins, "--record", file, timeout=110)
    assert ended.code == 0 and "Recorded" in ended.out, ended
    again = process("run", path, *pins, "--record", file, timeout=60)
    assert again.code == 0 and "Resumed" in again.out and "  ok  " not in again.out
    replayed = process("run", "--replay", file, "--json")
    assert replayed.code == 0 and lines(replayed.out)[-1]["gap"] < 0.5
