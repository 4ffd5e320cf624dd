"""A model that learns beside the driver's thread: what was learnt before answers meanwhile, and what comes is the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tktune.core.config import Config
from tktune.search.feasible_sampler import ModelSampler

VALUES = {
    "A": (16, 32, 48, 64, 96, 128),
    "B": (1, 2, 3, 4),
    "ORDER": ("slot", "token"),
    "LANES": (1, 2, 3, 4, 5),
}
ROWS = [Config(zip(VALUES, values, strict=True)) for values in itertools.product(*VALUES.values())]


def cost(row: Config) -> float:
    us = 100 * (1 + abs(row.number("A") - 64) / 64 + 0.2 * abs(row.number("B") - 2))
    return us * (1 + 0.3 * (row["ORDER"] == "slot") + 0.1 * abs(row.number("LANES") - 4))


def breaks(row: Config) -> bool:
    return row.number("A") * row.number("B") > 300


class OnceAsked(Executor):
    """Does what it was given when the test says so."""

    def __init__(self) -> None:
        self.given: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, work: Callable[..., Any], /, *words: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.given.append((future, lambda: work(*words, **named)))
        return future

    def do(self) -> int:
        done, self.given = self.given, []
        for future, work in done:
            try:
                future.set_result(work())
            except ZeroDivisionError as error:
                future.set_exception(error)
        return len(done)


def tell(sampler: ModelSampler, rows: list[Config]) -> None:
    sampler.tell_many((row, None if breaks(row) else cost(row)) for row in rows)


@pytest.fixture
def order() -> list[Config]:
    return [ROWS[i] for i in np.random.default_rng(5).permutation(len(ROWS))]


def test_the_last_fit_answers_until_the_next_one_is_there_and_then_nothing_is_missing(order):
    aside = OnceAsked()
    beside, alone = ModelSampler(ROWS, 0, None, aside), ModelSampler(ROWS, 0)
    for sampler in (beside, alone):
        tell(sampler, order[:60])
        sampler.gains()  # the first fit is made at once
    assert not aside.given
    for row in order[60:75]:
        for sampler in (beside, alone):
            tell(sampler, [row])
            sampler.gains()
    assert aside.given
    open_ = order[75:78]
    for sampler in (beside, alone):
        for row in open_:
            sampler.take(row)
    left = order[78:]
    waiting = beside.gains(left)
    assert np.isfinite(waiting).all() and waiting.max() > 0
    assert not beside.gains(order[:78]).any()
    while aside.do():
        beside.gains()
    (mean, deviation), (alone_mean, alone_deviation) = beside.predict(left), alone.predict(left)
    assert np.abs(mean - alone_mean).mean() < 0.03 and deviation == pytest.approx(alone_deviation, abs=0.05)
    assert np.corrcoef(beside.gains(left), alone.gains(left))[0, 1] > 0.9


def test_what_is_measured_while_it_learns_is_known_afterwards(order):
    aside = OnceAsked()
    sampler = ModelSampler(ROWS, 0, None, aside)
    tell(sampler, order[:60])
    sampler.gains()
    tell(sampler, order[60:75])
    sampler.gains()
    assert aside.given
    meanwhile = [row for row in order[75:100] if not breaks(row)]
    tell(sampler, meanwhile)
    while aside.do():
        sampler.gains()
    mean, _ = sampler.predict(meanwhile)
    assert mean == pytest.approx(np.log([cost(row) for row in meanwhile]), abs=0.05)


def test_a_mistake_while_learning_reaches_who_asks(order, monkeypatch):
    from tktune.search.outlook import Outlook

    aside = OnceAsked()
    sampler = ModelSampler(ROWS, 0, None, aside)
    tell(sampler, order[:60])
    sampler.gains()

    def mistaken(*words: Any) -> None:
        raise ZeroDivisionError("a mistake of ours")

    monkeypatch.setattr(Outlook, "_fitted", mistaken)
    tell(sampler, order[60:90])
    with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
        for row in order[90:98]:
            sampler.gains()
            aside.do()
            tell(sampler, [row])


def test_with_a_thread_of_its_own_it_finds_what_it_finds_alone_and_never_repeats():
    best = min(cost(row) for row in ROWS if not breaks(row))
    with ThreadPoolExecutor(1) as aside:
        sampler = ModelSampler(ROWS, 0, None, aside)
        seen: list[Config] = []
        open_: list[Config] = []
        for _ in range(110):
            (row,) = sampler.ask(1)
            seen.append(row)
            open_.append(row)
            if len(open_) > 2:
                tell(sampler, [open_.pop(0)])
    assert len(set(seen)) == len(seen)
    assert min(cost(row) for row in seen if not breaks(row)) == best
