"""One run measures at a time with one cache: two that timed kernels side by side would spoil each other's numbers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tktune.build.folder import CacheFolder
from tktune.search.budget import StopSignal
from tktune.search.events import Listener, Note

_LOOK_S = 0.2


@contextlib.contextmanager
def measuring_turn(
    root: Path, listener: Listener, stop: StopSignal, sleep: Callable[[float], None] = time.sleep
) -> Iterator[bool]:
    """Wait until no other run that uses the cache at `root` is measuring; False when `stop` came first.

    The turn is an flock, so a run that is killed gives it back.
    """
    folder = CacheFolder(root)
    folder.create()
    with folder.lock("measuring") as lock:
        told = False
        while not (mine := lock.try_acquire()) and not stop.requested:
            if not told:
                listener.on_event(
                    Note("Another run is measuring on this machine; this one starts when it ends.")
                )
                told = True
            sleep(_LOOK_S)
        yield mine
