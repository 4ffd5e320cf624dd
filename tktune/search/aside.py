"""What works beside the driver's own thread, where ranks are not to wait for it. Knows nothing of what is done there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass


@dataclass(frozen=True)
class Aside:
    """`ready` makes the next problem ready, which may take seconds; `fits` learns models, which takes tenths of one."""

    ready: Executor
    fits: Executor

    @classmethod
    @contextlib.contextmanager
    def begun(cls) -> Iterator[Aside]:
        """Threads that end with what they are at."""
        with (
            ThreadPoolExecutor(1, thread_name_prefix="tktune-next") as ready,
            ThreadPoolExecutor(1, thread_name_prefix="tktune-fit") as fits,
        ):
            yield cls(ready, fits)
