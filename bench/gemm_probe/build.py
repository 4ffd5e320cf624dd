"""nvcc builds of many variants at once, each to a cubin, with what ptxas said of it."""

from __future__ import annotations

import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "csrc" / "kernels" / "grouped_gemm.cu"


@dataclass(frozen=True)
class Built:
    cubin: Path | None
    seconds: float
    registers: int
    spill_bytes: int
    log: str


def build(defines: dict[str, int], folder: Path, arch: str = "90a", source: Path = SOURCE) -> Built:
    name = "_".join(f"{key}{value}" for key, value in sorted(defines.items())) or "default"
    cubin = folder / f"{source.stem}_{arch}_{name}.cubin"
    command = ["nvcc", "-cubin", "-gencode", f"arch=compute_{arch},code=sm_{arch}", "-std=c++20", "-lineinfo"]
    command += ["-Xptxas", "-v", *(f"-DTKT_{key}={value}" for key, value in defines.items())]
    start = time.perf_counter()
    done = subprocess.run([*command, str(source), "-o", str(cubin)], capture_output=True, text=True)
    seconds = time.perf_counter() - start
    registers = re.search(r"Used (\d+) registers", done.stderr)
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", done.stderr))
    return Built(
        cubin if done.returncode == 0 else None,
        seconds,
        int(registers.group(1)) if registers else 0,
        spills,
        done.stderr,
    )


def build_all(
    all_defines: list[dict[str, int]], folder: Path, jobs: int, source: Path = SOURCE
) -> list[Built]:
    """In the order asked; equal defines are built once."""
    folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        once: dict[str, object] = {}
        for defines in all_defines:
            key = repr(sorted(defines.items()))
            if key not in once:
                once[key] = pool.submit(build, defines, folder, "90a", source)
        return [once[repr(sorted(defines.items()))].result() for defines in all_defines]  # type: ignore[attr-defined]
