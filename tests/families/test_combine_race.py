"""The C++ of gemm_combine under sanitizers: two ranks, both forms, no race and no step out of their memory."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parent.parent / "csrc"
TILE = {"WORLD": 2, "ROW_BLOCK": 16, "COL_BLOCK": 32, "RED_BLOCK": 32, "STAGES": 2, "CONSUMER_WARPS": 2}
DEFINES = [f"-DTKT_{name}={value}" for name, value in {**TILE, "WEIGHT_LAYOUT": 0}.items()]


def said(tmp_path: Path, *flags: str, before: tuple[str, ...] = ()) -> str:
    program = tmp_path / "program"
    command = [
        "g++",
        "-std=c++20",
        "-pthread",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-I",
        str(CSRC),
        *DEFINES,
        *flags,
    ]
    done = subprocess.run(
        [*command, str(HERE / "combine_race.cpp"), "-o", str(program)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and "cannot find" in done.stderr:
        pytest.skip("this compiler has no such sanitizer")
    assert done.returncode == 0, done.stderr
    environment = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "halt_on_error=1"}
    done = subprocess.run(
        [*before, str(program)], capture_output=True, text=True, check=False, timeout=100, env=environment
    )
    return (done.stdout + done.stderr).strip()


@pytest.mark.parametrize("delays", [(), ("-DTKT_DELAYS",)], ids=["at once", "with delays"])
def test_two_ranks_race_nowhere_under_the_thread_sanitizer(tmp_path: Path, delays: tuple[str, ...]) -> None:
    flags = ("-O1", "-g", "-march=native", "-fsanitize=thread", *delays)
    output = said(tmp_path, *flags, before=("setarch", "-R"))  # the sanitizer wants its addresses unshuffled
    if "Operation not permitted" in output:
        pytest.skip("personality() is not allowed here")
    assert output == "right"


def test_two_ranks_stay_within_their_memory(tmp_path: Path) -> None:
    assert said(tmp_path, "-O0", "-g", "-fsanitize=address,undefined") == "right"
