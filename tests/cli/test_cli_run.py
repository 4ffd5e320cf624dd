"""Real runs on the CPU backend: a winner, a report, a resume, and what Ctrl-C does."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import ROOT

Run = Callable[..., Any]
pytestmark = pytest.mark.timeout(240)


def start(*words: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tktune", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
def test_a_run_ends_with_a_winner_a_report_and_a_resume(process: Run, study: Run, places: Path) -> None:
    path = study()
    first = process("run", path, "--json", timeout=200)
    assert first.code == 0, first
    told = events(first.out)
    assert {"space_ready", "build_done", "trial_done", "winner_chosen", "finished", "report"} <= {
        line["event"] for line in told
    }
    last = told[-1]
    result = last["results"][0]
    assert result["winner"] and result["default_us"] and result["measured"] == 6 and result["builds"] >= 1
    report = Path(last["file"])
    assert report == places / "data" / "tktune" / "reports" / "small.md"
    text = report.read_text()
    for part in ("### Where the time goes", "### Space", "### Finalists", f"tktune run {path}"):
        assert part in text

    again = process("run", path, "--report-dir", str(places / "mine"), timeout=200)
    assert again.code == 0, again
    assert "Resumed: 6 configs measured before" in again.out and "Built" not in again.out
    assert f"The report is in {places / 'mine' / 'small.md'}." in again.out
    assert "default" in again.out and "exact from now on: tktune lookup" in again.out

    shape = [
        "--family",
        "dispatch_gemm",
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
    ]
    answer = process("lookup", *shape, "--device", "cpu", "--json").json
    assert answer["provenance"] == "exact" and answer["config"] == result["winner"]
    assert process("db", "check").code == 0 and process("cache", "verify").code == 0

    for victim in (places / "cache" / "tktune" / "artifacts").glob("*/*.so"):
        victim.write_bytes(victim.read_bytes()[:100])
    assert process("cache", "verify").code == 1
    mended = process("run", path, "--trials", "8", timeout=200)
    assert mended.code == 0 and "moved to" in mended.out and "8/8" in mended.out, mended
    assert process("report", path, "--json").json["problems"][0]["attribution"]["fused_us"] > 0


@pytest.mark.slow
def test_one_ctrl_c_stops_gently_and_still_verifies_finalists(study: Run, process: Run) -> None:
    path = study("trials = 5000", "seconds = 600")
    running = start("run", path)
    assert running.stdout is not None
    for line in running.stdout:
        if "  ok  " in line:
            break
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=200)
    assert running.returncode == 0, (out, err)
    assert "Stopping: the finalists are still verified." in err and "Traceback" not in err
    assert "Winner" in out and "The report is in" in out
    assert process("db", "stats", "--json").json["winners"] == 1


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once_and_keeps_what_is_measured(study: Run, process: Run) -> None:
    path = study("trials = 5000", "seconds = 600")
    running = start("run", path)
    assert running.stdout is not None
    for line in running.stdout:
        if "  ok  " in line:
            break
    running.send_signal(signal.SIGINT)
    assert running.stderr is not None
    assert "Stopping" in running.stderr.readline()
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 1, (out, err)
    assert "Stopped." in err and "Traceback" not in err
    stats = process("db", "stats", "--json").json
    assert stats["statuses"].get("ok", 0) >= 1 and "started" not in stats["statuses"]
    assert process("db", "check").code == 0


@pytest.mark.slow
def test_a_terminal_gets_the_live_table(study: Run) -> None:
    path = study("trials = 3")
    ours, theirs = pty.openpty()
    running = subprocess.Popen(
        [sys.executable, "-m", "tktune", "run", path],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "120", "LINES": "40"},
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        if select.select([ours], [], [], 0.5)[0]:
            try:
                piece = os.read(ours, 65536)
            except OSError:
                break
            if not piece:
                break
            shown += piece
    assert running.wait(timeout=10) == 0
    os.close(ours)
    text = shown.decode()
    for part in ("statuses", "best", "configs", "The report is in", "exact from now on"):
        assert part in text, part


def test_a_run_without_a_winner_exits_1(tktune: Run, study: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from tktune.core.config import Config
    from tktune.core.device import device_class
    from tktune.search.results import TuneResult
    from tktune.search.study import Study
    from tktune.store.results import Store

    def fruitless(loaded: Study, store_url: str, cache: object, **_: object) -> list[TuneResult]:
        Store.open(store_url).close()
        device = device_class("cpu")
        return [
            TuneResult(
                problem=problem, device=device, policy=loaded.policy(device), winner=None, time_us=None,
                default=Config(A=1), default_us=None, reason="", resumed=0, measured=1, builds=0, seconds=1.0,
                stopped=False, ended="all done.", sentence="No config finished; see the statuses.",
            )
            for problem in loaded.problems
        ]  # fmt: skip

    monkeypatch.setattr("tktune.cli.tuning.tune", fruitless)
    ended = tktune("run", study())
    assert ended.code == 1 and "No config finished; see the statuses." in ended.out
    assert "The report is in" in ended.out
    assert json.loads(tktune("run", study(), "--json").out)["results"][0]["winner"] is None


def test_the_command_that_makes_it_again_holds_every_word() -> None:
    from tktune.cli.run import again

    command = again("my study.toml", "cpu", 5, 2.5, 7, ["A=1", "B=x"], None)
    assert command == (
        "tktune run 'my study.toml' --device cpu --trials 5 --seconds 2.5 --seed 7 --pin A=1 --pin B=x"
    )
