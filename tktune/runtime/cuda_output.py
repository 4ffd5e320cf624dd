"""Outputs of a fixed shape, made as quickly as torch can make a tensor on a GPU; each belongs to whoever gets it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo import guards

_Strided = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]

# The allocation that compiled code makes: no argument parsing, always on the current device. Not part of torch's
# public interface, so it may be missing.
_QUICK: _Strided | None = getattr(guards, "_empty_strided_cuda", None)


class OutputMaker:
    """Calling it makes a new (rows, cols) tensor on device `index`, contiguous and undefined.

    The memory comes from torch's caching allocator, also while a graph is captured.
    """

    __slots__ = ("_device", "_dtype", "_index", "_shape", "_stride")

    def __init__(self, shape: tuple[int, int], index: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self._shape, self._stride, self._dtype, self._index = shape, (shape[1], 1), dtype, index
        self._device = torch.device("cuda", index)

    def __call__(self) -> torch.Tensor:
        if _QUICK is not None:
            made = _QUICK(self._shape, self._stride, self._dtype)
            if made.get_device() == self._index:
                return made
        keywords: dict[str, Any] = {"dtype": self._dtype, "device": self._device}
        return torch.empty_strided(self._shape, self._stride, **keywords)
