"""The trivial sampler: a seeded random order without repeats, against which the others are judged."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tktune.core.config import Config
from tktune.search.sampler import UnseenRows


class RandomSampler:
    """Rows in a seeded random order.

    >>> rows = [Config(A=a) for a in range(3)]
    >>> sorted(row["A"] for row in RandomSampler(rows, seed=1).ask(5))
    [0, 1, 2]
    """

    name = "random"

    def __init__(self, rows: Sequence[Config], seed: int) -> None:
        self._unseen = UnseenRows(rows)
        order = list(rows)
        random.Random(seed).shuffle(order)
        self._order = iter(order)

    def ask(self, count: int) -> list[Config]:
        found: list[Config] = []
        while len(found) < count:
            row = next(self._order, None)
            if row is None:
                break
            if row in self._unseen:
                self._unseen.take(row)
                found.append(row)
        return found

    def tell(self, row: Config, cost_us: float | None) -> None:
        self._unseen.tell(row)
