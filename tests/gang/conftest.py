"""Gangs of the faulty family."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from gang_cases import GENEROUS, faulty_problem, gone, toy_device

from tktune.core.policy import Policy
from tktune.gang.gang import Gang


@pytest.fixture
def make_gang() -> Iterator[Callable[..., Gang]]:
    """Gangs of the faulty family with deadlines no loaded machine exceeds; all are closed, and leave no process."""
    made: list[Gang] = []

    def make(world: int = 2, backend: str = "cpu", **options: object) -> Gang:
        options = {"deadlines": GENEROUS, "spin_limit_s": 20.0, **options}
        gang = Gang(faulty_problem(world), toy_device(backend), Policy(), **options)  # type: ignore[arg-type]
        made.append(gang)
        return gang

    yield make
    for gang in made:
        pids = gang.pids
        gang.kill()
        assert all(map(gone, pids))
