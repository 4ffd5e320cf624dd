"""Python's garbage collector kept out of the way: a full collection looks at every config of every space, which takes
tenths of a second in which no thread of the driver goes on and ranks wait.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

_lock = threading.Lock()
_depth = 0
_usual = True


@contextlib.contextmanager
def laid_aside() -> Iterator[None]:
    """Nothing is collected inside, by whichever thread; what is there at the end is not looked at by later collections,
    until `all_looked_at`."""
    global _depth, _usual
    with _lock:
        if _depth == 0:
            _usual = gc.isenabled()
            gc.disable()
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                gc.freeze()
                if _usual:
                    gc.enable()


@contextlib.contextmanager
def all_looked_at() -> Iterator[None]:
    """After this, collections look at everything again."""
    try:
        yield
    finally:
        gc.unfreeze()
