"""The finish and the stores out of registers, run on the CPU lane by lane: every output column comes from its own gate and
up, stores stay within the matrix, and tiles of 8, 16 and 24 columns beyond the last 32 are written as well.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tktune.core.paths import csrc_root

LANES = Path(__file__).with_name("glu_lanes")
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH")
STAND_IN = "    return gate + up / 1024;\n"  # linear, so that a result tells its gate and its up


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The kernel's own sources beside the stand-in for the ground; only the two special-function calls are replaced."""
    shutil.copytree(LANES, tmp_path, dirs_exist_ok=True)
    (tmp_path / "gemm").mkdir()
    for name in ("rt.cuh", "st.cuh", "mma.cuh"):
        shutil.copy(csrc_root() / "tile" / name, tmp_path / "tile" / name)
    text = (csrc_root() / "gemm" / "glu.cuh").read_text()
    body = re.search(r"(float silu_times\(float gate, float up\) \{\n)(.*?)(\n\})", text, re.DOTALL)
    assert body is not None and body[2].count("asm(") == 2
    text = text.replace(body[2] + "\n", STAND_IN, 1)
    (tmp_path / "gemm" / "glu.cuh").write_text(text)
    return tmp_path


def said(folder: Path) -> str:
    program = folder / "program"
    command = ["g++", "-std=c++20", "-O1", "-pthread", "-Wno-unknown-pragmas", "-I", str(folder)]
    built = subprocess.run(
        [*command, str(folder / "main.cpp"), "-o", str(program)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    return subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=60).stdout


def test_every_lane_writes_what_its_gates_and_ups_make(folder: Path) -> None:
    assert said(folder) == "right\n"


@pytest.mark.parametrize(
    ("file", "was", "planted"),
    [
        ("gemm/glu.cuh", "acc.v[r][2 * c + 1][i]", "acc.v[r][2 * c][i ^ 1]"),
        ("gemm/glu.cuh", "acc.v[r][2 * c][i]", "acc.v[r][c][i]"),
        ("tile/mma.cuh", "quad < 2 ? col + 8 * kLast : cols", "col + 8 * kLast"),
        ("tile/mma.cuh", "put(top + 8 * (quad % 2), quad", "put(top + 8 * (quad / 2), quad"),
    ],
)
def test_a_planted_mistake_is_seen(folder: Path, file: str, was: str, planted: str) -> None:
    text = (folder / file).read_text()
    assert text.count(was) == 1
    (folder / file).write_text(text.replace(was, planted))
    assert said(folder).endswith("wrong\n")
