"""A small source, a cache, and compilers that misbehave on request. No test lives here."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tktune.build.cache import ArtifactCache
from tktune.core.build_spec import BuildSpec

REAL_GXX = shutil.which("g++") or "/usr/bin/g++"
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Sources:
    """A translation unit with two headers, in a folder of its own."""

    folder: Path
    unit: Path = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        (self.folder / "include").mkdir()
        self.write("include/deep.h", "#define DEEP 1\n")
        self.write("near.h", '#pragma once\n#include "deep.h"\n')
        self.unit = self.write(
            "unit.cpp",
            '#include <stdint.h>\n#include "near.h"\n'
            'extern "C" __attribute__((visibility("default"))) int answer() { return TKT_ANSWER + DEEP; }\n',
        )

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.write_text(text)
        return path

    def spec(self, answer: int | str = 41, **fields: object) -> BuildSpec:
        defaults: dict[str, object] = {
            "name": f"unit[{answer}]",
            "kind": "shared",
            "source": self.unit,
            "arch": "native",
            "defines": {"TKT_ANSWER": str(answer)},
            "include_dirs": (self.folder / "include",),
        }
        return BuildSpec(**{**defaults, **fields})  # type: ignore[arg-type]


@dataclass
class FakeCompiler:
    """A `g++` first on PATH that runs `script` for each real compile, and keeps count."""

    folder: Path
    environment: dict[str, str]

    @property
    def compiles(self) -> int:
        counter = self.folder / "count"
        return len(counter.read_text().splitlines()) if counter.exists() else 0

    @property
    def gate(self) -> Path:
        """A held compiler goes on once this file exists."""
        return self.folder / "go"


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    return Sources(tmp_path / "sources")


@pytest.fixture
def cache(tmp_path: Path) -> ArtifactCache:
    return ArtifactCache(tmp_path / "cache")


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], FakeCompiler]:
    def install(script: str = ":") -> FakeCompiler:
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        program = folder / "g++"
        program.write_text(
            f'#!/bin/sh\nHERE="{folder}"\ncase " $* " in *" -shared "*)\n'
            f'  echo $$ >> "$HERE/count"\n  {script}\n;; esac\nexec {REAL_GXX} "$@"\n'
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        return FakeCompiler(folder, {**os.environ, "PYTHONPATH": str(REPOSITORY)})

    return install


@pytest.fixture
def until() -> Callable[[Callable[[], bool]], None]:
    """Wait for a condition, up to 30 s; fails loudly instead of going on."""

    def wait(condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < end, "the awaited condition never came"
            time.sleep(0.01)

    return wait


BUILDER = """
import sys
from pathlib import Path
from tktune.build.cache import ArtifactCache
from tktune.core.build_spec import BuildSpec
root, unit, include = (Path(word) for word in sys.argv[1:4])
specs = [BuildSpec("unit", "shared", unit, "native", {"TKT_ANSWER": answer}, include_dirs=(include,))
         for answer in sys.argv[4:]]
for outcome in ArtifactCache(root).build(specs):
    print("cached" if outcome.cached else "built", outcome.artifact.sha256, flush=True)
"""


@pytest.fixture
def start_builder(sources: Sources, cache: ArtifactCache) -> Callable[..., subprocess.Popen[str]]:
    """Another process that builds the sources' unit for the given answers."""

    def start(fake: FakeCompiler, *answers: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [
                sys.executable,
                "-c",
                BUILDER,
                str(cache.root),
                str(sources.unit),
                str(sources.folder / "include"),
                *(str(answer) for answer in answers),
            ],
            env={**fake.environment, "PATH": os.environ["PATH"]},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start
