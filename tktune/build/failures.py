"""Reading a failed compile: whose fault it was, and the one sentence a person needs."""

from __future__ import annotations

import errno
import re
from pathlib import Path

from tktune.core.errors import CacheError

_ERROR_LINE = re.compile(
    r"\b(?:fatal )?error\b\s*:|\bfatal\s*:|undefined reference|\berror\b *(?:#|\d)", re.IGNORECASE
)
_OUT_OF_MEMORY = re.compile(
    r"killed signal|died due to signal 9|signal 9|out of memory allocating|virtual memory exhausted"
    r"|cannot allocate memory|std::bad_alloc",
    re.IGNORECASE,
)
_DISK_FULL = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)
FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


def first_error(log: str) -> str:
    """The first line that states an error, with folders of file names removed; else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    chosen = next((line for line in lines if _ERROR_LINE.search(line)), lines[-1] if lines else "")
    return re.sub(r"(?:/[^\s/:()]+)+/(?=[^\s/:()]+)", "", chosen)[:300]


def for_want_of_memory(code: int, log: str) -> bool:
    """Whether the compiler, or a process below it, was killed by signal 9 or could not allocate."""
    return code == -9 or (code != 0 and bool(_OUT_OF_MEMORY.search(log)))


def for_want_of_disk(log: str) -> bool:
    return bool(_DISK_FULL.search(log))


def failure_sentence(name: str, code: int, log: str) -> str:
    if code < 0:
        return f"{name} does not compile: the compiler died of signal {-code}."
    return (
        f"{name} does not compile: {first_error(log) or f'the compiler exited with {code} and said nothing'}"
    )


def disk_full(root: Path) -> CacheError:
    return CacheError(
        f"The disk that holds the artifact cache {root} is full; nothing unfinished was kept.",
        "Free space there, run `tktune cache gc`, or set TKTUNE_CACHE_DIR to a folder on another disk.",
    )


def not_writable(root: Path, error: OSError) -> CacheError:
    """What an `OSError` in the cache's folder means for a person."""
    if error.errno in FULL_ERRNOS:
        return disk_full(root)
    return CacheError(
        f"The artifact cache {root} cannot be written ({error.strerror}).",
        "Set TKTUNE_CACHE_DIR to a folder of your own.",
    )


def memory_exhausted(name: str, jobs: int) -> CacheError:
    return CacheError(
        f"The compiler of {name} was killed for want of memory twice, the second time with {jobs} at once.",
        "Free memory on this machine, or ask for fewer jobs.",
    )
