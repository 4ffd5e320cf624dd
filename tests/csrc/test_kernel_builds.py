"""Without a GPU: the kernels compile for each target, spill nothing, fit the shared memory of their class, and hold
no call into the driver (the .shared::cluster form of a TMA load becomes one on sm_120a)."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KERNEL = ROOT / "csrc" / "kernels" / "grouped_gemm.cu"
PROBE = ROOT / "tests" / "csrc" / "hook_probe.cu"
TILE = ROOT / "tests" / "csrc" / "tile_probe.cu"
SMALL_SMEM, LARGE_SMEM = 101376, 232448  # opt-in bytes of a block: sm_120a, sm_90a

pytestmark = pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="nvcc is not on PATH: nothing to compile with"
)

WGMMA = [
    "",
    "TKT_WEIGHT_LAYOUT=0 TKT_DRAW=1",
    "TKT_CLUSTER=2",
    "TKT_ROW_BLOCK=256 TKT_COL_BLOCK=192 TKT_STAGES=3 TKT_WEIGHT_LAYOUT=0",
    "TKT_ROW_BLOCK=192 TKT_COL_BLOCK=192 TKT_OUT_SLOTS=1 TKT_CONSUMER_WARPS=12",
    "TKT_MAIN_LOOP=2 TKT_COL_BLOCK=192 TKT_STAGES=5 TKT_OUT_SLOTS=3 TKT_MMA_DEPTH=1",
]
MMA = [
    "TKT_MAIN_LOOP=0",
    "TKT_MAIN_LOOP=0 TKT_WARP_M=64 TKT_WARP_N=32 TKT_WEIGHT_LAYOUT=0",
    "TKT_MAIN_LOOP=0 TKT_WARP_M=32 TKT_WARP_N=64 TKT_DRAW=1",
    "TKT_MAIN_LOOP=0 TKT_PRODUCER_WARPS=0 TKT_WARP_M=64 TKT_WARP_N=64 TKT_COL_BLOCK=256 TKT_RED_BLOCK=32 TKT_STAGES=4",
    "TKT_MAIN_LOOP=0 TKT_PRODUCER_WARPS=0 TKT_WARP_M=64 TKT_WARP_N=64 TKT_ROW_BLOCK=256 TKT_RED_BLOCK=32 TKT_STAGES=4"
    " TKT_WEIGHT_LAYOUT=0 TKT_DRAW=1",
    "TKT_MAIN_LOOP=0 TKT_PRODUCER_WARPS=0 TKT_WARP_M=64 TKT_WARP_N=48 TKT_COL_BLOCK=192 TKT_RED_BLOCK=32 TKT_STAGES=4"
    " TKT_WEIGHT_LAYOUT=0 TKT_DRAW=1",
]
FED_BY_A_CONSUMER = MMA[3]


def compile_cubin(source: Path, arch: str, defines: str, folder: Path) -> tuple[bytes, str]:
    cubin = folder / "variant.cubin"
    command = [
        "nvcc",
        "-cubin",
        "-gencode",
        f"arch=compute_{arch},code=sm_{arch}",
        "-std=c++20",
        "-Xptxas",
        "-v",
    ]
    command += [f"-D{define}" for define in defines.split()]
    done = subprocess.run([*command, str(source), "-o", str(cubin)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return cubin.read_bytes(), done.stderr


def symbol_words(cubin: bytes, name: bytes, count: int) -> tuple[int, ...]:
    """The int32 initial values of a device variable, found through the ELF symbol table."""
    import struct

    (sections_at,) = struct.unpack_from("<Q", cubin, 0x28)
    entry, sections, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, sections_at + i * entry) for i in range(sections)]
    assert names < sections
    for header in headers:
        if header[1] != 2:  # SHT_SYMTAB
            continue
        strings = headers[header[6]][4]
        for at in range(header[4], header[4] + header[5], 24):
            text, _, _, section, value, _ = struct.unpack_from("<IBBHQQ", cubin, at)
            if cubin[strings + text :].split(b"\0", 1)[0] == name:
                return struct.unpack_from(f"<{count}i", cubin, headers[section][4] + value)
    raise AssertionError(f"no symbol {name!r}")


def inspect(source: Path, arch: str, defines: str, folder: Path, smem_cap: int) -> None:
    cubin, log = compile_cubin(source, arch, defines, folder)
    assert sum(int(n) for n in re.findall(r"(\d+) bytes spill", log)) == 0, log
    assert "C75" not in log, log  # ptxas: wgmma serialised, or setmaxnreg ignored
    assert b"__cuda_syscall" not in cubin
    smem_bytes, threads, globals_bytes, _ = symbol_words(cubin, b"tktune_grouped_gemm_facts", 4)
    assert smem_bytes <= smem_cap
    assert threads % 32 == 0 and globals_bytes % 64 == 0


@pytest.mark.parametrize("defines", WGMMA)
def test_wgmma_variants_build_clean_for_sm_90a(defines: str, tmp_path: Path) -> None:
    inspect(KERNEL, "90a", defines, tmp_path, LARGE_SMEM)


@pytest.mark.parametrize("arch", ["120a", "90"])
@pytest.mark.parametrize("defines", MMA)
def test_mma_sync_variants_build_clean_within_99_kb(defines: str, arch: str, tmp_path: Path) -> None:
    inspect(KERNEL, arch, defines, tmp_path, SMALL_SMEM)


@pytest.mark.parametrize(
    ("arch", "defines"), [("90a", WGMMA[0]), ("120a", MMA[0]), ("120a", FED_BY_A_CONSUMER)]
)
def test_a_kernel_with_hooks_builds_clean(arch: str, defines: str, tmp_path: Path) -> None:
    inspect(PROBE, arch, defines, tmp_path, LARGE_SMEM if arch == "90a" else SMALL_SMEM)


@pytest.mark.skipif(shutil.which("cuobjdump") is None, reason="cuobjdump is not on PATH: SASS cannot be read")
@pytest.mark.parametrize(("arch", "defines"), [*(("90a", d) for d in WGMMA), *(("120a", d) for d in MMA)])
def test_no_tma_instruction_is_predicated(arch: str, defines: str, tmp_path: Path) -> None:
    """ptxas 13.0 may set the coordinate of a predicated load under a predicate that is not computed yet."""
    (tmp_path / "variant.cubin").write_bytes(compile_cubin(KERNEL, arch, defines, tmp_path)[0])
    dump = ["cuobjdump", "-sass", str(tmp_path / "variant.cubin")]
    sass = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    assert "UTMALDG" in sass
    assert not re.findall(r"@!?U?P\d+ UTMA(?:LDG|STG)\S*", sass)


@pytest.mark.parametrize("arch", ["90a", "120a"])
def test_the_rest_of_the_tile_layer_builds_without_driver_calls(arch: str, tmp_path: Path) -> None:
    cubin, log = compile_cubin(TILE, arch, "", tmp_path)
    assert b"__cuda_syscall" not in cubin
    assert "0 bytes spill stores" in log


def test_a_variant_that_cannot_work_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="the warps' tiles cover the block's"):
        compile_cubin(KERNEL, "90a", "TKT_MAIN_LOOP=0 TKT_COL_BLOCK=256 TKT_WARP_N=64", tmp_path)


@pytest.mark.skipif(shutil.which("cuobjdump") is None, reason="cuobjdump is not on PATH: SASS cannot be read")
@pytest.mark.parametrize("arch", ["90", "120a"])
def test_a_consumer_that_feeds_never_stops_for_a_load_or_an_answer(arch: str, tmp_path: Path) -> None:
    """Between two steps: no loop over the lanes around a TMA load, and the dispenser's answer is not shuffled at once."""
    defines = f"{FED_BY_A_CONSUMER} TKT_DRAW=1 TKT_WEIGHT_LAYOUT=0"
    (tmp_path / "variant.cubin").write_bytes(compile_cubin(KERNEL, arch, defines, tmp_path)[0])
    dump = ["cuobjdump", "-sass", str(tmp_path / "variant.cubin")]
    sass = subprocess.run(dump, capture_output=True, text=True, check=True).stdout
    instructions = re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;]+);", sass)
    assert any("ATOMG.E.INC" in text for text in instructions)
    for place, text in enumerate(instructions):
        if "UTMALDG" in text:
            assert not any("BRA.U.ANY" in after for after in instructions[place : place + 3]), text
        if "ATOMG.E.INC" in text:
            assert not any("SHFL" in after for after in instructions[place : place + 16]), text
