"""A config: one value for every parameter, immutable, hashable, with one digest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from tktune.core.canonical import canonical_json, digest

Value = int | str


class Config(Mapping[str, Value]):
    """One value for every parameter.

    >>> config = Config(ROW_BLOCK=64, STAGES=3)
    >>> config["STAGES"], config.replace(STAGES=4)["STAGES"]
    (3, 4)
    """

    __slots__ = ("_digest", "_hash", "_values")

    def __init__(
        self, values: Mapping[str, Value] | Iterable[tuple[str, Value]] = (), **named: Value
    ) -> None:
        merged = dict(values, **named)
        _check(merged)
        self._values: dict[str, Value] = dict(sorted(merged.items()))
        self._digest: str | None = None
        self._hash: int | None = None

    @classmethod
    def of_sorted(cls, values: dict[str, Value]) -> Config:
        """A config that takes `values` as they are: already sorted by name and checked (for enumeration)."""
        config = cls.__new__(cls)
        config._values = values
        config._digest = config._hash = None
        return config

    def __reduce__(self) -> tuple[Any, ...]:
        """Hashes of words differ from process to process, so they do not travel."""
        return Config.of_sorted, (self._values,)

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash(tuple(self._values.items()))
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Config) and self._values == other._values

    def __repr__(self) -> str:
        return f"Config({self})"

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self._values.items())

    def number(self, name: str) -> int:
        """The value of a parameter that is a number (TypeError when it is a word)."""
        value = self._values[name]
        if not isinstance(value, int):
            raise TypeError(f"{name} = {value!r} is not a number")
        return value

    def replace(self, **changes: Value) -> Config:
        if not changes.keys() <= self._values.keys():
            return Config({**self._values, **changes})
        _check(changes)
        return Config.of_sorted({**self._values, **changes})

    def only(self, names: Iterable[str]) -> Config:
        """The part of the config that names these parameters (the build part, the launch part)."""
        wanted = set(names)
        return Config.of_sorted({name: value for name, value in self._values.items() if name in wanted})

    @property
    def digest(self) -> str:
        if self._digest is None:
            self._digest = digest(self._values)
        return self._digest

    @property
    def json(self) -> str:
        return canonical_json(self._values)


def columns(configs: Sequence[Config]) -> dict[str, tuple[Value, ...]]:
    """The values of configs that all name the same parameters, by name: for spaces too large to go through one by one."""
    names = list(configs[0]) if configs else []
    listed = zip(*(config._values.values() for config in configs), strict=True)
    return dict(zip(names, listed, strict=True))


def _check(values: Mapping[str, Value]) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise TypeError(f"{name} = {value!r}: a parameter's value is an int or a str")
