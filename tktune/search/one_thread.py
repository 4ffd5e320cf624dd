"""Linear algebra in one thread while the search thinks: its matrices are small, and threads that wait for each other
cost more than they save, above all beside compilers and rank processes that use the other cores.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tktune.search.together import Together

# OpenBLAS as distributions and as numpy's wheels name it.
_NAMES = ("openblas_{}", "openblas_{}64_", "scipy_openblas_{}", "scipy_openblas_{}64_")


def _one() -> int:
    found = _threads()
    if found is None:
        return 0
    get, put = found
    usual = get()
    put(1)
    return usual


def _as_before(usual: int) -> None:
    found = _threads()
    if found is not None:
        found[1](usual)


_single = Together(_one, _as_before)


@contextmanager
def one_thread() -> Iterator[None]:
    """OpenBLAS uses one thread inside, and as many as before outside. Does nothing where numpy has another library."""
    with _single.inside():
        yield


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
