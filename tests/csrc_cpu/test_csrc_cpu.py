"""The CPU kernels' C++ by itself: hooks and loads for every vector width, and the whole machine under sanitizers."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parent.parent / "csrc"
TILE = {"WORLD": 2, "ROW_BLOCK": 16, "COL_BLOCK": 32, "RED_BLOCK": 32, "STAGES": 2, "CONSUMER_WARPS": 2}
DEFINES = [f"-DTKT_{name}={value}" for name, value in {**TILE, "WEIGHT_LAYOUT": 0}.items()]

x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of another architecture")


def compiled(tmp_path: Path, source: str, *flags: str) -> Path:
    program = tmp_path / "program"
    command = ["g++", "-std=c++20", "-pthread", "-Wall", "-Wextra", "-Werror", "-I", str(CSRC), *flags]
    done = subprocess.run(
        [*command, str(HERE / source), "-o", str(program)], capture_output=True, text=True, check=False
    )
    if done.returncode and "sanitize" in " ".join(flags) and "cannot find" in done.stderr:
        pytest.skip("this compiler has no such sanitizer")
    assert done.returncode == 0, done.stderr
    return program


def said(program: Path, *before: str) -> str:
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run(
        [*before, str(program)], capture_output=True, text=True, check=False, timeout=100, env=environment
    )
    return (done.stdout + done.stderr).strip()


@pytest.mark.parametrize(
    "arch", ["native", pytest.param("x86-64", marks=x86), pytest.param("x86-64-v3", marks=x86)]
)
def test_the_gemm_keeps_its_promises_to_the_hooks(tmp_path: Path, arch: str) -> None:
    assert said(compiled(tmp_path, "hooks.cpp", "-O2", f"-march={arch}")) == "kept"


def test_two_ranks_race_nowhere_under_the_thread_sanitizer(tmp_path: Path) -> None:
    program = compiled(tmp_path, "race.cpp", "-O1", "-g", "-march=native", "-fsanitize=thread", *DEFINES)
    output = said(program, "setarch", "-R")  # the sanitizer wants its addresses unshuffled
    if "Operation not permitted" in output:
        pytest.skip("personality() is not allowed here")
    assert output == "right"


def test_two_ranks_stay_within_their_memory(tmp_path: Path) -> None:
    flags = ("-O0", "-g", "-fsanitize=address,undefined")
    assert said(compiled(tmp_path, "race.cpp", *flags, *DEFINES)) == "right"
