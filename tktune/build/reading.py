"""What many artifacts are named after alike, looked at once: sources and compilers, while one thread names thousands."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

Found = TypeVar("Found")

_inside = threading.local()  # .found: what this thread looked at already


@contextlib.contextmanager
def read_once() -> Iterator[None]:
    """Inside, this thread looks at each source and each compiler once; an edit meanwhile is not seen until it leaves."""
    before = getattr(_inside, "found", None)
    _inside.found = {} if before is None else before
    try:
        yield
    finally:
        _inside.found = before


def once(what: Hashable, look: Callable[[], Found]) -> Found:
    """What `look` finds, or found before inside the same `read_once`."""
    found: dict[Any, Any] | None = getattr(_inside, "found", None)
    if found is None:
        return look()
    if what not in found:
        found[what] = look()
    answer: Found = found[what]
    return answer
