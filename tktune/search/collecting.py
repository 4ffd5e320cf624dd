"""Python's garbage collector kept out of the way: a full collection looks at every config of every space, which takes
tenths of a second in which no thread of the driver goes on and ranks wait.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from tktune.search.together import Together


def _off() -> bool:
    usual = gc.isenabled()
    gc.disable()
    return usual


def _lay_aside(usual: bool) -> None:
    gc.freeze()
    if usual:
        gc.enable()


_aside = Together(_off, _lay_aside)


def laid_aside() -> contextlib.AbstractContextManager[None]:
    """Nothing is collected inside, by whichever thread; what is there at the end is not looked at by later collections,
    until `all_looked_at`."""
    return _aside.inside()


@contextlib.contextmanager
def all_looked_at() -> Iterator[None]:
    """After this, collections look at everything again."""
    try:
        yield
    finally:
        gc.unfreeze()
