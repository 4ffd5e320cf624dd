"""The small script that runs one compile, in this process: its result, its time limit, its lifeline."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tktune.build import compile_step


class Lab:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.monkeypatch = monkeypatch
        self.alive, self.owner = os.pipe()
        monkeypatch.setattr(signal, "signal", lambda number, handler: None)

    @property
    def result(self) -> dict[str, object]:
        return json.loads((self.folder / "result.json").read_text())

    def run(self, script: str, timeout_s: float = 30.0) -> int:
        job = {
            "digest": "d" * 64,
            "argv": ["/bin/sh", "-c", script],
            "tmp": str(self.folder),
            "log": str(self.folder / "build.log"),
            "result": str(self.folder / "result.json"),
            "timeout_s": timeout_s,
        }
        (self.folder / "job.json").write_text(json.dumps(job))
        self.monkeypatch.setattr(
            sys, "argv", ["compile_step.py", str(self.folder / "job.json"), str(self.alive)]
        )
        return compile_step.main()


@pytest.fixture
def lab(tmp_path, monkeypatch):
    made = Lab(tmp_path, monkeypatch)
    yield made
    os.close(made.alive)
    if made.owner >= 0:
        os.close(made.owner)


def test_a_success_is_reported_with_seconds_and_peak_memory(lab, capfd):
    assert lab.run('echo said; echo loud >&2; echo "$TMPDIR"') == 0
    assert capfd.readouterr().out == f"tktune-compiled {'d' * 64}\n"
    assert (lab.folder / "build.log").read_text() == f"said\nloud\n{lab.folder}\n"
    assert lab.result["code"] == 0 and not lab.result["timed_out"]
    assert lab.result["seconds"] > 0 and lab.result["peak_bytes"] > 1 << 20


def test_a_failure_and_a_signal_are_told_apart(lab):
    assert lab.run("exit 3") == 1
    assert lab.result["code"] == 3
    assert lab.run("kill -9 $$") == 1
    assert lab.result["code"] == -9


def test_a_compile_past_its_limit_is_killed(lab):
    assert lab.run("sleep 600", timeout_s=0.05) == 1
    assert lab.result["timed_out"]


def test_the_end_of_the_owner_stops_the_compile_without_a_result(lab):
    os.close(lab.owner)
    lab.owner = -1
    assert lab.run("sleep 600") == 1
    assert not (lab.folder / "result.json").exists()
