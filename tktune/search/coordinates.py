"""Feasible rows as numbers: value indices, and for each parameter the ways in which two of its values are near or far.

Knows nothing of costs, models or Optuna.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tktune.core.config import Config, Value, columns

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Values 0, 1, 2, ... up to this many may be the numbers of choices; beyond it they are a quantity only.
_MOST_CHOICES = 6


@dataclass(frozen=True)
class Feature:
    """One way in which values of a parameter differ: `gap[i, j]` >= 0 between its values i and j.

    `kind` is "position" (where a value stands on its scale, 0 to 1), "alignment" (how many twos divide it, scaled
    to 0..1) or "choice" (0 equal, 1 different).
    """

    parameter: int
    kind: str
    gap: Floats


class FeasibleRows:
    """A feasible set as value indices, without the parameters that have one value only.

    `codes` (rows, parameters) int16 holds value indices; parameter p has `sizes[p]` values. Row r of `codes` is
    row r of the set, and rows are known by that number.
    """

    def __init__(self, values: Sequence[Sequence[Value]], codes: NDArray[Any]) -> None:
        """`codes` (rows, parameters) are indices into `values`, which are in rising order where they are numbers."""
        kept: list[tuple[Value, ...]] = []
        columns: list[NDArray[Any]] = []
        for p, listed in enumerate(values):
            present, column = np.unique(codes[:, p], return_inverse=True)
            if len(present) > 1:
                kept.append(tuple(listed[i] for i in present))
                columns.append(column.astype(np.int16))
        self.values = tuple(kept)
        self.codes: NDArray[np.int16] = (
            np.stack(columns, axis=1) if columns else np.zeros((len(codes), 0), np.int16)
        )
        self.sizes = tuple(len(v) for v in self.values)
        self.features = [f for p, v in enumerate(self.values) for f in _features(p, v)]

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Value]]) -> FeasibleRows:
        """From configs that all name the same parameters."""
        return cls.of_columns(list(columns_of(rows).values()), len(rows))

    @classmethod
    def of_columns(cls, by_parameter: Sequence[Sequence[Value]], count: int) -> FeasibleRows:
        """From the values of `count` rows, parameter by parameter."""
        values = [in_order(column) for column in by_parameter]
        codes = np.empty((count, len(values)), np.int16)
        for p, (listed, column) in enumerate(zip(values, by_parameter, strict=True)):
            place = {value: i for i, value in enumerate(listed)}
            codes[:, p] = np.fromiter(map(place.__getitem__, column), np.int16, count)
        return cls(values, codes)

    def __len__(self) -> int:
        return len(self.codes)

    @cached_property
    def offsets(self) -> Ints:
        """Where each parameter's values start in the concatenation of all values, and its length."""
        return np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)

    def block(self, parameter: int) -> slice:
        """The values of a parameter in the concatenation of all values."""
        return slice(int(self.offsets[parameter]), int(self.offsets[parameter + 1]))

    def one_hot(self, rows: Ints | list[int], dtype: type = np.float64) -> NDArray[Any]:
        """(rows, all values): 1 at each row's values."""
        codes = self.codes[rows]
        hot: NDArray[Any] = np.zeros((len(codes), int(self.offsets[-1])), dtype)
        np.put_along_axis(hot, codes + self.offsets[:-1], 1, axis=1)
        return hot

    def positions(self, rows: Ints | list[int]) -> Floats:
        """(rows, parameters): each value's position, 0 to 1; choices stand in their listed order."""
        codes = self.codes[rows]
        found = np.empty(codes.shape)
        for p, scale in enumerate(self._scales):
            found[:, p] = scale[codes[:, p]]
        return found

    def neighbours(self, row: int) -> Ints:
        """The rows that differ from `row` in exactly one parameter."""
        here = self.codes[row]
        found = [np.zeros((0, len(here)), np.int16)]
        for p, size in enumerate(self.sizes):
            others = np.repeat(here[None], size - 1, axis=0)
            others[:, p] = np.delete(np.arange(size), here[p])
            found.append(others)
        return self._find(np.concatenate(found))

    def lines(self) -> Iterator[Ints]:
        """For each parameter, groups (rows,) from 0 on: rows of a group differ in that parameter alone."""
        keys = self._keys(self.codes)
        for p in range(len(self.sizes)):
            _, groups = np.unique(keys ^ self._words[self.block(p)][self.codes[:, p]], return_inverse=True)
            yield groups

    def _find(self, codes: NDArray[np.int16]) -> Ints:
        """The rows with these value indices; those outside the set are left out."""
        keys, order = self._sorted_keys
        wanted = self._keys(codes)
        rows = order[np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)]
        found: Ints = rows[(self.codes[rows] == codes).all(axis=1)]
        return found

    def _keys(self, codes: NDArray[np.int16]) -> NDArray[np.uint64]:
        """A random 64-bit word for each value, combined by exclusive or (Zobrist, 1970)."""
        keys = np.zeros(len(codes), np.uint64)
        for p in range(codes.shape[1]):
            keys ^= self._words[self.block(p)][codes[:, p]]
        return keys

    @cached_property
    def _words(self) -> NDArray[np.uint64]:
        return np.random.default_rng(0).integers(2**64, size=int(self.offsets[-1]), dtype=np.uint64)

    @cached_property
    def _sorted_keys(self) -> tuple[NDArray[np.uint64], Ints]:
        keys = self._keys(self.codes)
        order = np.argsort(keys, kind="stable")
        return keys[order], order

    @cached_property
    def _scales(self) -> list[Floats]:
        return [_position(listed) for listed in self.values]


def columns_of(rows: Sequence[Mapping[str, Value]]) -> dict[str, tuple[Value, ...]]:
    """The values of rows that all name the same parameters, by name, in the order of the first row's."""
    configs = [row for row in rows if isinstance(row, Config)]
    if configs and len(configs) == len(rows):
        return columns(configs)
    return {name: tuple([row[name] for row in rows]) for name in (rows[0] if rows else ())}


def in_order(values: Any) -> list[Value]:
    """Distinct values, numbers before words, each in order: a set of values gets one spelling."""
    return sorted(set(values), key=lambda value: (isinstance(value, str), value))


def _features(parameter: int, values: Sequence[Value]) -> list[Feature]:
    count = len(values)
    choice = Feature(parameter, "choice", 1.0 - np.eye(count))
    if count == 2 or any(isinstance(value, str) for value in values):
        return [choice]
    position = Feature(parameter, "position", _gaps(_position(values)))
    if list(values) == list(range(count)) and count <= _MOST_CHOICES:
        return [position, choice]
    twos = _twos([int(value) for value in values])
    return [position] if twos is None else [position, Feature(parameter, "alignment", _gaps(twos))]


def _position(values: Sequence[Value]) -> Floats:
    """Where values stand, 0 to 1: halfway between their index and, for positive numbers, their logarithm.

    The logarithm says what a size does; the index says where whoever listed the values expects changes.
    """
    index = np.arange(len(values)) / (len(values) - 1)
    numbers = [value for value in values if not isinstance(value, str)]
    if len(numbers) < len(values) or min(numbers) <= 0:
        return index
    logs = np.log(np.array(numbers, float))
    between: Floats = (index + (logs - logs[0]) / (logs[-1] - logs[0])) / 2
    return between


def _twos(values: Sequence[int]) -> Floats | None:
    """How many twos divide each value, scaled to 0..1; None where that says no more than the value itself."""
    if min(values) <= 0 or all(value & (value - 1) == 0 for value in values):
        return None
    twos = np.array([(value & -value).bit_length() - 1 for value in values], float)
    span = float(np.ptp(twos))
    scaled: Floats = (twos - twos.min()) / max(span, 1.0)
    return scaled if span else None


def _gaps(scale: Floats) -> Floats:
    return np.abs(scale[:, None] - scale[None])
