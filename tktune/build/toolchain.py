"""Finding compilers and saying exactly what they are. Compiles nothing."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tktune.core.canonical import digest
from tktune.core.errors import ToolchainError

ToolchainKind = Literal["g++", "nvcc"]

_ANSWER_S = 60.0


@dataclass(frozen=True)
class Toolchain:
    """A compiler as found here.

    `version` is what it says of itself (for nvcc also its host compiler); `flags` are the arch flags with
    nothing left to the machine: `-march=native` is spelled out as the flags it stands for.
    """

    kind: ToolchainKind
    path: Path
    version: str
    flags: tuple[str, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of kind, version and resolved flags; the place on disk does not count."""
        return digest({"kind": self.kind, "version": self.version, "flags": list(self.flags)})


def detect(kind: ToolchainKind, arch: str) -> Toolchain:
    """The compiler of `kind` for `arch` ("native", a -march name, or "sm_90a" style for nvcc).

    g++ comes from PATH. nvcc comes from PATH, then CUDA_HOME or CUDA_PATH, then /usr/local/cuda, then the
    nvidia-cuda-nvcc wheel. Raises `ToolchainError` when there is none or it does not answer.
    """
    path = _find_gxx() if kind == "g++" else _find_nvcc()
    host = _find_gxx() if kind == "nvcc" else path
    return _describe(kind, arch, path, path.stat().st_mtime_ns, host)


def nvcc_present() -> bool:
    """Whether an nvcc can be found; says nothing about whether it works."""
    try:
        _find_nvcc()
    except ToolchainError:
        return False
    return True


def _find_gxx() -> Path:
    found = shutil.which("g++")
    if found is None:
        raise ToolchainError(
            "No g++ was found on PATH.", "Install it, for example with: apt-get install g++."
        )
    return Path(found)


def _find_nvcc() -> Path:
    candidates = [Path(found)] if (found := shutil.which("nvcc")) else []
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(variable):
            candidates.append(Path(os.environ[variable]) / "bin" / "nvcc")
    candidates.append(Path("/usr/local/cuda/bin/nvcc"))
    for entry in sys.path:
        nvidia = Path(entry or ".") / "nvidia"
        if nvidia.is_dir():
            candidates += sorted(nvidia.glob("*/bin/nvcc"), reverse=True)
    for candidate in candidates:
        if os.access(candidate, os.X_OK) and candidate.is_file():
            return candidate
    raise ToolchainError(
        "No nvcc was found on PATH, under CUDA_HOME or among the installed wheels.",
        "Install the CUDA toolkit, or: pip install nvidia-cuda-nvcc.",
    )


@functools.lru_cache(maxsize=64)
def _describe(kind: ToolchainKind, arch: str, path: Path, _mtime_ns: int, host: Path) -> Toolchain:
    if kind == "g++":
        return Toolchain("g++", path, _gxx_version(path), _gxx_arch_flags(path, arch))
    answer = _ask([str(path), "--version"])
    release = re.search(r"release .*", answer)
    version = f"nvcc {release.group(0) if release else answer.strip()}, host {_gxx_version(host)}"
    return Toolchain("nvcc", path, version, _nvcc_arch_flags(arch))


def _gxx_version(path: Path) -> str:
    first = _ask([str(path), "--version"]).partition("\n")[0].strip()
    return f"{first} {_ask([str(path), '-dumpmachine']).strip()}"


def _gxx_arch_flags(path: Path, arch: str) -> tuple[str, ...]:
    if arch != "native":
        return (f"-march={arch}",)
    listing = _ask([str(path), "-march=native", "-###", "-S", "-x", "c++", "/dev/null", "-o", "/dev/null"])
    for line in listing.splitlines():
        words = shlex.split(line) if "-march=" in line else []
        start = next((i for i, word in enumerate(words) if word.startswith("-march=")), None)
        if start is None or words[start] == "-march=native" or not words[0].endswith("cc1plus"):
            continue
        flags: list[str] = []
        for previous, word in zip(words[start - 1 :], words[start:], strict=False):
            if previous == "--param":
                flags += ["--param", word]
            elif word.startswith("-m"):
                flags.append(word)
        return tuple(flags)
    raise ToolchainError(
        f"{path} does not say what -march=native stands for here.", "Use a GNU g++ of version 10 or newer."
    )


def _nvcc_arch_flags(arch: str) -> tuple[str, ...]:
    match = re.fullmatch(r"sm_(\d+[af]?)", arch)
    if match is None:
        raise ToolchainError(f"nvcc has no arch called {arch!r}.", "Use one such as sm_90a or sm_120a.")
    return ("-gencode", f"arch=compute_{match.group(1)},code=sm_{match.group(1)}")


def _ask(argv: list[str]) -> str:
    environment = {**os.environ, "LC_ALL": "C"}
    try:
        answer = subprocess.run(
            argv, capture_output=True, text=True, timeout=_ANSWER_S, env=environment, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(f"{argv[0]} does not answer: {error}.", "Reinstall the compiler.") from error
    if answer.returncode:
        first = (answer.stderr.strip() or answer.stdout.strip()).partition("\n")[0]
        raise ToolchainError(
            f"{shlex.join(argv)} failed ({answer.returncode}): {first}.", "Reinstall the compiler."
        )
    return answer.stdout + answer.stderr
