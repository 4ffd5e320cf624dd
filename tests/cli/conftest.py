"""Places of their own for every test, and a command line that runs in this process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import ROOT, Ended

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Database, cache and reports under tmp_path."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TKTUNE_DB", raising=False)
    monkeypatch.delenv("TKTUNE_CACHE_DIR", raising=False)
    return tmp_path


@pytest.fixture
def tktune(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Run a command line in this process."""

    def call(*words: str) -> Ended:
        from tktune.cli.app import exit_code
        from tktune.runtime.lookup import lookup

        lookup.cache_clear()  # as a process of its own would begin
        capsys.readouterr()
        code = exit_code(words)
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return call


@pytest.fixture
def process() -> Callable[..., Ended]:
    """Run a command line as a process of its own."""

    def call(*words: str, timeout: float = 60) -> Ended:
        done = subprocess.run(
            [sys.executable, "-m", "tktune", *words],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('EXTRA_PYTHONPATH', '')}"},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    return call


@pytest.fixture
def filled(places: Path) -> str:
    """The default database as a finished quickstart leaves it; its URL."""
    from stored_run import fill

    from tktune.core.paths import database_url

    (places / "data" / "tktune").mkdir(parents=True)
    fill(database_url())
    return database_url()


STUDY = """\
name = "small"
family = "dispatch_gemm"
device = "cpu"

[problem]
hidden = 64
cols = 64
experts = 4
top_k = 2
tokens = 32
world = 2
pad = 32

[search]
trials = 6
seconds = 60
finalists = 2
"""


@pytest.fixture
def study(places: Path) -> Callable[..., str]:
    """Write a study file; each change replaces a line that begins with its key, or is appended when there is none."""

    def write(*lines: str, without: str = "") -> str:
        text = STUDY.splitlines()
        for line in lines:
            key = line.split("=")[0].strip()
            hits = [i for i, old in enumerate(text) if old.split("=")[0].strip() == key]
            if hits:
                text[hits[0]] = line
            else:
                text.insert(next(i for i, old in enumerate(text) if old == "[problem]") + 1, line)
        text = [line for line in text if not (without and line.split("=")[0].strip() == without)]
        path = places / "small.toml"
        path.write_text("\n".join(text) + "\n")
        return str(path)

    return write
