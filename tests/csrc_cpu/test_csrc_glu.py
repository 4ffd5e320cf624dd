"""SwiGLU of the CPU backend by itself, for every vector width."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parent.parent / "csrc"
x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of another architecture")


@pytest.mark.parametrize(
    "arch", ["native", pytest.param("x86-64", marks=x86), pytest.param("x86-64-v3", marks=x86)]
)
@pytest.mark.parametrize("level", ["-O0", "-O3"])
def test_swiglu_is_exact_to_a_few_units_of_the_last_place(tmp_path: Path, arch: str, level: str) -> None:
    program = tmp_path / "program"
    command = ["g++", "-std=c++20", "-Wall", "-Wextra", "-Werror", "-I", str(CSRC), level, f"-march={arch}"]
    built = subprocess.run(
        [*command, str(HERE / "glu.cpp"), "-o", str(program)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "kept"
