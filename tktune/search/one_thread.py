"""Linear algebra in one thread while the search thinks: its matrices are small, and threads that wait for each other
cost more than they save, above all beside compilers and rank processes that use the other cores.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

# OpenBLAS as distributions and as numpy's wheels name it.
_NAMES = ("openblas_{}", "openblas_{}64_", "scipy_openblas_{}", "scipy_openblas_{}64_")
_lock = threading.RLock()
_depth = 0
_usual = 0


@contextmanager
def one_thread() -> Iterator[None]:
    """OpenBLAS uses one thread inside, and as many as before outside. Does nothing where numpy has another library."""
    global _depth, _usual
    found = _threads()
    if found is None:
        yield
        return
    get, put = found
    with _lock:
        if _depth == 0:
            _usual = get()
            put(1)
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                put(_usual)


@cache
def _threads() -> tuple[Callable[[], int], Callable[[int], None]] | None:
    """How to ask and how to set the number of threads of the OpenBLAS that is loaded."""
    import numpy as np  # noqa: F401  the library is loaded with it

    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    for path in sorted({line.split()[-1] for line in lines if "openblas" in line.lower()}):
        library = ctypes.CDLL(path)
        for name in _NAMES:
            get = getattr(library, name.format("get_num_threads"), None)
            put = getattr(library, name.format("set_num_threads"), None)
            if get is not None and put is not None:
                put.argtypes, put.restype = [ctypes.c_int], None
                return get, put
    return None
