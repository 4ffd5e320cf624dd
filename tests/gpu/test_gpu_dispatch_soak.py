"""Every row of every rank is right, round after round, whoever is late: in each form of the space, under all kinds of
routing, with one rank a hundred times slower than the other, and through ten thousand replays of a graph (fewer of
everything where ranks share a GPU).
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from dispatch_forms import form_name, forms
from dispatch_pair import Pair, build_all, dispatch_problem
from gpu_places import GPUS, SHARED, few, kept_cache, needs_two

from tktune.build.cache import ArtifactCache
from tktune.core.config import Config
from tktune.core.device_cuda import cuda_device_classes
from tktune.core.problem import Problem
from tktune.core.routing import parse_routing
from tktune.core.space import Space
from tktune.families.base import family

pytestmark = [pytest.mark.gpu, needs_two, pytest.mark.timeout(100)]

ROUNDS, SLOW_ROUNDS = few(100, 20), few(12, 4)
REPLAYS, JUDGED_EVERY = few(10_000, 200), few(1000, 20)
LATE_US = 20_000.0  # of a rank that shares its GPU: a launch there has no time of its own to be a hundred times slower than
MANY = dispatch_problem(tokens=233)
ONE = dispatch_problem(experts=4, top_k=1, tokens=57)
ROUTINGS = {
    # uniform, skewed, hot, an expert without rows, a rank without rows
    MANY: ("uniform", "zipf:1.2", "hot:0.9@3", "empty:0", "empty:0,1,2,3,4,5,6,7"),
    # with one expert a token: everything to one expert, so that the other rank has no rows
    ONE: ("one:3", "uniform", "empty:2,3", "hot:0.9@0"),
}
IN_TIME = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
DEVICES = cuda_device_classes()


@functools.cache
def space_of(problem: Problem) -> Space:
    return family(problem.family).space(problem, DEVICES[0])


FORMS = forms(space_of(MANY)) if GPUS > 1 or SHARED else []
NAMES = [form_name(space_of(MANY), form) for form in FORMS]


class Soak:
    """A pair for each problem, and what it runs: a form is loaded when it is first asked for."""

    def __init__(self, cache: ArtifactCache) -> None:
        wanted = [(MANY, DEVICES[0], form) for form in FORMS]  # the same artifacts serve both problems
        self._artifacts = dict(zip(FORMS, build_all(cache, wanted), strict=True))
        self.pairs = {problem: Pair(problem, DEVICES[0], script="soak_rank.py") for problem in ROUTINGS}
        self._sequence = itertools.count(1, 100_000)
        self._broken = ""
        for pair in self.pairs.values():
            for rank in range(2):
                pair.ask(rank, "seat_workbench")
        for pair in self.pairs.values():
            assert all("ok" in reply for reply in (pair.reply(rank) for rank in range(2)))

    def load(self, problem: Problem, form: Config) -> None:
        artifact, part = self._artifacts[form]
        words = {"artifact": str(artifact.path), "sha256": artifact.sha256, "build_part": dict(part)}
        self._both(problem, "load", **words)

    def _both(self, problem: Problem, do: str, within_s: float = 20.0, **words: Any) -> list[Any]:
        """As `Pair.both`; after a failure nothing is asked any more, since the ranks are out of step."""
        if self._broken:
            pytest.fail(f"The ranks are out of step since {self._broken}.")
        try:
            return self.pairs[problem].both(do, within_s, **words)
        except AssertionError:
            self._broken = f"{do} of {words.get('config', words)}"
            self.pairs[problem].page.abort()
            raise

    def number(self) -> int:
        return next(self._sequence)

    def round(
        self, problem: Problem, config: Config, routing: str, seed: int, late: list[list[float]]
    ) -> None:
        words = {"routing": routing, "seed": seed, "sequence": self.number(), "late": late}
        said = self._both(problem, "round", config=dict(config), **words)
        told = f"{routing}, seed {seed}, late {late}, {config}"
        for rank, one in enumerate(said):
            assert one["passed"], f"rank {rank}: {one['sentence']} ({one['error']:.3g}); {told}"
        assert [one["rows"] for one in said] == rows_of(problem, routing, seed), told

    def replays(self, problem: Problem, config: Config, routing: str, slow: int) -> None:
        said = self._both(
            problem,
            "replays",
            within_s=30.0,
            config=dict(config),
            routing=routing,
            seed=1,
            sequence=self.number(),
            count=REPLAYS,
            every=JUDGED_EVERY,
            slow=slow,
        )
        assert [one["judged"] for one in said] == [REPLAYS // JUDGED_EVERY] * 2
        assert [one["wrong"] for one in said] == ["", ""], config
        assert [one["rows"] for one in said] == rows_of(problem, routing, 1)

    def fused_us(self, problem: Problem, config: Config) -> float:
        """Of the slowest rank, in the middle."""
        words = {"config": dict(config), "mode": "fused", "iterations": 15, "sequence": self.number()}
        said = self._both(problem, "time", **words)
        return sorted(map(max, *(one["us"] for one in said)))[7]

    def close(self) -> None:
        for pair in self.pairs.values():
            pair.__exit__()


def rows_of(problem: Problem, routing: str, seed: int) -> list[int]:
    """How many rows each rank's experts have, counted from the drawn ids alone."""
    owner = parse_routing(routing).draw(problem, seed) // problem.local_experts
    return [int((owner == rank).sum()) for rank in range(problem.world)]


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Soak]:
    made = Soak(kept_cache(tmp_path_factory.mktemp("soak")))
    yield made
    made.close()


def on(problem: Problem, form: Config, **changes: int) -> Config | None:
    """`form` for `problem`, None where its space refuses it (one expert a token has no slot order)."""
    space, config = space_of(problem), form.replace(**changes)
    return config if space.canonical(config) == config and space.is_feasible(config) else None


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
@pytest.mark.parametrize("problem", ROUTINGS, ids=["many", "one"])
def test_a_hundred_rounds_are_right_whoever_is_late(soak, problem, form):
    if on(problem, form) is None:
        pytest.skip("this form is no other than one that is run")
    soak.load(problem, form)
    chance = random.Random(NAMES[FORMS.index(form)])
    splits = next(p.values for p in space_of(problem).parameters if p.name == "num_comm_sms")
    for number in range(ROUNDS):
        config = on(problem, form, num_comm_sms=chance.choice(splits)) or form
        routings = ROUTINGS[problem]
        soak.round(problem, config, routings[number % len(routings)], 1000 + number, lateness(chance))


def lateness(chance: random.Random) -> list[list[float]]:
    """For each rank: host seconds, device µs before a meeting, device µs after it; often nothing."""
    return [
        [
            chance.choice((0.0, 0.0, chance.uniform(0.0, 0.004))),
            chance.choice((0.0, chance.uniform(0.0, 2000.0))),
            chance.choice((0.0, chance.uniform(0.0, 2000.0))),
        ]
        for _ in range(2)
    ]


@pytest.mark.parametrize("slow", [0, 1])
@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_a_rank_may_be_a_hundred_times_slower_than_the_other(soak, form, slow):
    soak.load(MANY, form)
    late_us = LATE_US if SHARED else 100 * soak.fused_us(MANY, form)
    late = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    for number in range(SLOW_ROUNDS):
        late[slow] = [0.0, late_us, 0.0] if number % 2 else [0.0, 0.0, late_us]
        soak.round(MANY, form, ROUTINGS[MANY][number % 5], 5000 + number, late)


@pytest.mark.parametrize("form", FORMS, ids=NAMES)
def test_thousands_of_replays_are_right(soak, form):
    soak.load(MANY, form)
    soak.replays(MANY, form, "uniform", slow=FORMS.index(form) % 2)


@pytest.mark.parametrize("form", FORMS[:1], ids=NAMES[:1])
def test_a_rank_that_does_not_wait_for_its_slow_reader_is_noticed(soak, form):
    """What the rounds above would see if ranks did not meet at the end: rows of the next round instead of this one's."""
    soak.load(MANY, form)
    pair, late = soak.pairs[MANY], [[0.0, 0.0, 0.0], [0.0, 0.0, 300_000.0]]

    def ask(rank: int, seed: int, late: list[list[float]], sequence: int, waits: bool) -> None:
        words = {"config": dict(form), "routing": "uniform", "seed": seed, "sequence": sequence}
        pair.ask(rank, "round", late=late, waits=waits, **words)

    first, second = soak.number(), soak.number()
    ask(0, 1, late, first, False)
    ask(1, 1, late, first, True)
    assert pair.reply(0)["ok"]["passed"]
    ask(0, 2, IN_TIME, second, True)  # overwrites its rows, which its peer has not fetched yet
    slow = pair.reply(1)["ok"]
    ask(1, 2, IN_TIME, second, True)
    assert all(pair.reply(rank)["ok"]["passed"] for rank in range(2))
    assert not slow["passed"] and "rows differ" in slow["sentence"], slow
