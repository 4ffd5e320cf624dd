"""The GEMM template with rows by index compiles without a GPU for every main loop: no spills, copies of 16 bytes past
L1, and no more registers in a role than it was given."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROBE = ROOT / "bench" / "gemm_probe" / "indexed.cu"
SHARED = "TKT_PRODUCER_REGISTERS=56 TKT_CONSUMER_REGISTERS=224"
FORMS = [
    SHARED,
    f"TKT_WEIGHT_LAYOUT=0 TKT_DRAW=1 {SHARED}",
    f"TKT_ROW_BLOCK=256 TKT_COL_BLOCK=192 TKT_STAGES=3 TKT_MMA_DEPTH=0 TKT_DRAW=1 {SHARED}",
    f"TKT_MAIN_LOOP=2 TKT_COL_BLOCK=192 TKT_STAGES=5 TKT_OUT_SLOTS=3 TKT_WEIGHT_LAYOUT=0 {SHARED}",
    "TKT_ROW_BLOCK=192 TKT_COL_BLOCK=192 TKT_OUT_SLOTS=1 TKT_CONSUMER_WARPS=12",
    "TKT_ROW_BLOCK=64 TKT_CONSUMER_WARPS=4 TKT_PRODUCER_REGISTERS=56 TKT_CONSUMER_REGISTERS=232",
]
pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")


def compiled(defines: str, folder: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
    cubin = folder / "indexed.cubin"
    command = ["nvcc", "-cubin", "-gencode", "arch=compute_90a,code=sm_90a", "-std=c++20", "-Xptxas", "-v"]
    command += ["-DTKT_ACTIVATIONS=1", *(f"-D{define}" for define in defines.split())]
    done = subprocess.run([*command, str(PROBE), "-o", str(cubin)], capture_output=True, text=True)
    return cubin, done


@pytest.mark.parametrize("defines", FORMS)
def test_rows_by_index_build_clean(defines: str, tmp_path: Path) -> None:
    cubin, done = compiled(defines, tmp_path)
    assert done.returncode == 0, done.stderr
    assert sum(int(n) for n in re.findall(r"(\d+) bytes (?:spill|stack)", done.stderr)) == 0, done.stderr
    assert "C75" not in done.stderr, done.stderr  # setmaxnreg ignored, or wgmma serialised
    if shutil.which("cuobjdump") is None:
        return
    dump = ["cuobjdump", "-sass", str(cubin)]
    sass = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    copies = re.findall(r"LDGSTS\S*", sass)
    assert copies and set(copies) == {"LDGSTS.E.BYPASS.LTC128B.128"}
    assert not re.findall(r"@!?U?P\d+ UTMA(?:LDG|STG)\S*", sass)
    given = re.search(r"USETMAXREG\.DEALLOC\.CTAPOOL 0x([0-9a-f]+)", sass)
    assert given is not None
    loaders = sass[sass.index("LDGSTS") : sass.rindex("LDGSTS")]
    used = 1 + max(int(n) for n in re.findall(r"\bR(\d+)\b", loaders))
    assert used <= int(given[1], 16)


@pytest.mark.parametrize(
    ("defines", "sentence"),
    [
        ("TKT_CLUSTER=2", "indexed rows"),
        ("TKT_MAIN_LOOP=0", "indexed rows"),
        ("TKT_STAGES=3 TKT_COL_BLOCK=128 TKT_MMA_DEPTH=2", "asked for"),
    ],
)
def test_what_cannot_work_is_refused_in_words(defines: str, sentence: str, tmp_path: Path) -> None:
    _, done = compiled(defines, tmp_path)
    assert done.returncode != 0 and sentence in done.stderr, done.stderr
