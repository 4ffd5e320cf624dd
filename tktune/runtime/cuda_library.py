"""Operators as `torch.library` forms, for torch.compile: they go by numbers, since compiled code may only hold tensors and
numbers. A form writes what it is given and returns nothing: one that returned a buffer it owns would be broken by graphs.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch

from tktune.core.errors import ProblemError

T = TypeVar("T")
_LIBRARY = torch.library.Library("tktune", "FRAGMENT")  # type: ignore[no-untyped-call]


class Numbered(Generic[T]):
    """Operators by the numbers under which compiled code calls them; none is kept alive."""

    def __init__(self) -> None:
        self._operators: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()
        self._numbers = itertools.count(1)

    def enter(self, operator: T) -> int:
        """The number of `operator`."""
        number = next(self._numbers)
        self._operators[number] = operator
        return number

    def leave(self, number: int) -> None:
        self._operators.pop(number, None)

    def get(self, number: int) -> T:
        """Raises `ProblemError` when operator `number` was closed."""
        operator = self._operators.get(number)
        if operator is None:
            raise ProblemError(
                f"Operator {number} was closed.", "Keep it open as long as compiled code calls it."
            )
        return operator


def define(schema: str, call: Callable[..., None], on: Sequence[str] = ("CUDA",)) -> None:
    """`torch.ops.tktune.<name of the schema>`, which calls `call` where tensors are `on` one of these."""
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]
    for key in on:
        _LIBRARY.impl(name, call, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"tktune::{name}", _infers_nothing, lib=_LIBRARY)


def _infers_nothing(*_: Any) -> None:
    """Arguments are written, nothing is returned: there is no shape to infer."""
