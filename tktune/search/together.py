"""A setting of the whole process that several threads want changed at the same time: the first one changes it, the last one
puts it back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

Usual = TypeVar("Usual")


class Together(Generic[Usual]):
    """`change` returns what was usual before, `restore` is given it.

    >>> quiet = Together(lambda: gc.disable(), lambda _: gc.enable())               # doctest: +SKIP
    >>> with quiet.inside(): ...                                                    # doctest: +SKIP
    """

    def __init__(self, change: Callable[[], Usual], restore: Callable[[Usual], None]) -> None:
        self._change, self._restore = change, restore
        self._lock = threading.RLock()
        self._usual: list[Usual] = []  # of the first one inside
        self._depth = 0

    @contextmanager
    def inside(self) -> Iterator[None]:
        """It is changed for as long as any thread is inside, however that thread leaves."""
        with self._lock:
            if self._depth == 0:
                self._usual.append(self._change())
            self._depth += 1
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if self._depth == 0:
                    self._restore(self._usual.pop())
