"""Programs that run a kernel's own source on the CPU lane by lane: the real headers beside stand-ins for what a GPU gives, with
a mistake planted where a test wants to see it caught.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tktune.core.paths import csrc_root

HERE = Path(__file__).parent


def laid_out(folder: Path, stand_ins: Iterable[str], real: Iterable[str]) -> None:
    """The stand-ins of these folders, later ones over earlier ones, and the real headers, named from csrc."""
    for name in stand_ins:
        shutil.copytree(HERE / name, folder, dirs_exist_ok=True)
    for name in real:
        shutil.copy(csrc_root() / name, folder / name)


def plant(folder: Path, real: Iterable[str], text: str, instead: str) -> None:
    """Write `instead` for `text`, which stands once in all of these headers."""
    places = {name: (folder / name).read_text().count(text) for name in real}
    assert sum(places.values()) == 1, (text, places)
    source = folder / max(places, key=lambda name: places[name])
    source.write_text(source.read_text().replace(text, instead))


def compiled(folder: Path, *options: str) -> Path:
    """The program of the folder's main.cpp."""
    program = folder / "main"
    command = ["g++", "-std=c++20", "-Wall", "-Wno-unknown-pragmas", "-I", str(folder), *options]
    done = subprocess.run(
        [*command, str(folder / "main.cpp"), "-o", str(program)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return program


def ran(program: Path, *words: Any, within_s: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), *map(str, words)], capture_output=True, text=True, timeout=within_s)


def int32_file(path: Path, arrays: Sequence[Any]) -> Path:
    """Each array behind its length."""
    flat = [np.asarray(array, np.int32).reshape(-1) for array in arrays]
    path.write_bytes(b"".join(struct.pack("<i", len(one)) + one.tobytes() for one in flat))
    return path
