"""Where single measurements cannot tell configs apart, heats find who is fast, and a change of the machine's pace makes nobody
seem so."""

from __future__ import annotations

import math
import random
from statistics import fmean
from types import SimpleNamespace

import pytest
from fakes import BOTTOM, World, of_kind, study, true_us, tune_in
from hypothesis import given
from hypothesis import strategies as st

from tktune.core import status
from tktune.core.config import Config
from tktune.gang.gang import Outcome
from tktune.search.events import Note, TrialDone
from tktune.search.finalists import Finalist, FinalsPlan
from tktune.search.finals import HEATS
from tktune.search.heats import WIDTH, entrants, run_heats
from tktune.store.results import Store

CONFIGS = [Config(N=number) for number in range(40)]


@given(
    st.lists(st.floats(50, 500), min_size=1, max_size=40),
    st.integers(1, 8),
    st.floats(0, 0.5),
    st.booleans(),
)
def test_entrants_are_the_fastest_and_all_that_the_noise_may_have_hidden(times, places, noise, moved):
    by = dict(zip(CONFIGS, sorted(times), strict=False))
    ranked = list(by)
    entered = entrants(ranked, by.__getitem__, places, noise, moved)
    assert entered == ranked[: len(entered)]
    assert min(places, len(ranked)) <= len(entered) <= WIDTH * places
    if noise <= 0.01 and not moved:
        assert len(entered) <= places
    left_out = ranked[len(entered) : WIDTH * places]
    if noise > 0.01:
        assert all(by[config] > by[ranked[0]] * (1 + 2 * noise) for config in left_out)
    if moved:
        assert not left_out


class NoisyGang:
    """`truth` times a lucky or unlucky hand, the same for all launches of one measurement."""

    def __init__(self, truth: dict[Config, float], sigma: float, seed: int) -> None:
        self.truth, self.sigma, self.random = truth, sigma, random.Random(seed)
        self.timed: list[Config] = []
        self.fails: set[Config] = set()

    def load(self, path, sha256, build) -> Outcome:
        return Outcome(status.OK)

    def time(self, config, mode, seed, iterations) -> Outcome:
        self.timed.append(config)
        if config in self.fails:
            return Outcome("fault:spin_limit", "It hangs.")
        hand = math.exp(self.random.gauss(0, self.sigma))
        return Outcome(status.OK, worst_us=[self.truth[config] * hand] * iterations)


def runners(configs: list[Config]) -> list[Finalist]:
    artifact = SimpleNamespace(path=None, sha256="", digest="", facts={})
    return [Finalist(config, config, artifact, "finalist", ()) for config in configs]  # type: ignore[arg-type]


PLAN = FinalsPlan((), (0, 1, 2), 5, lambda: False)


def test_the_fastest_of_many_come_through():
    """24 configs 1 % apart, single measurements differ by 6 %: the fastest of single ones is 5 % off on average."""
    lost, lucky = [], []
    for seed in range(30):
        truth = {config: 100.0 + number for number, config in enumerate(CONFIGS[:24])}
        gang = NoisyGang(truth, 0.06, seed)
        fastest, arms = run_heats(gang, runners(list(truth)), 4, PLAN, lambda: False)  # type: ignore[arg-type]
        assert len(fastest) == 4 and all(arm.ok for arm in arms)
        lost.append(min(truth[one.config] for one in fastest) - 100)
        single = NoisyGang(truth, 0.06, 1000 + seed)
        lucky.append(min(truth, key=lambda c: single.time(c, "fused", 0, 1).worst_us[0]))
    assert fmean(lost) < 1.5
    assert fmean(truth[config] for config in lucky) - 100 > 2 * fmean(lost)


def test_a_heat_ends_when_time_is_up_and_costs_two_rounds_a_halving():
    truth = dict.fromkeys(CONFIGS[:24], 100.0)
    gang = NoisyGang(truth, 0.01, 0)
    run_heats(gang, runners(CONFIGS[:24]), 4, PLAN, lambda: False)  # type: ignore[arg-type]
    assert len(gang.timed) == 2 * (24 + 12 + 6)
    gang.timed.clear()
    fastest, _ = run_heats(gang, runners(CONFIGS[:24]), 4, PLAN, lambda: bool(gang.timed))  # type: ignore[arg-type]
    assert len(gang.timed) == 48 and len(fastest) == 4


def test_who_fails_is_out_and_told():
    truth = {config: 100.0 + number for number, config in enumerate(CONFIGS[:8])}
    gang = NoisyGang(truth, 0.0, 0)
    gang.fails = {CONFIGS[0], CONFIGS[2]}
    fastest, arms = run_heats(gang, runners(CONFIGS[:8]), 2, PLAN, lambda: False)  # type: ignore[arg-type]
    assert [one.config for one in fastest] == [CONFIGS[1], CONFIGS[3]]
    assert {arm.finalist.config for arm in arms if not arm.ok} == gang.fails
    assert all(arm.end in ("ok", "fault:spin_limit") for arm in arms)
    gang.fails = set(truth)
    assert run_heats(gang, runners(CONFIGS[:8]), 2, PLAN, lambda: False)[0] == []  # type: ignore[arg-type]


class Jumpy(World):
    """Measurements have a hand each; for some trials everything takes twice as long."""

    sigma, slow = 0.08, range(0)

    def sample_us(self, config: Config, mode: str) -> float:
        hand = math.exp(random.Random(len(self.timed) * 7919 + self.seed).gauss(0, self.sigma))
        busy = 2.0 if len(of_kind(self, TrialDone)) in self.slow else 1.0
        return super().sample_us(config, mode) * hand * busy


def told(world: World) -> bool:
    return any("they run in heats" in note.sentence for note in of_kind(world, Note))


def test_a_tune_on_a_noisy_machine_ends_near_the_best(tmp_path):
    ends = []
    for seed in range(12):
        world = Jumpy(seed=seed)
        result = tune_in(world, f"sqlite:///{tmp_path}/{seed}.db", study(72, seed=seed))
        assert result.winner is not None and told(world)
        with Store.open(f"sqlite:///{tmp_path}/{seed}.db") as store:
            (kept,) = store.events(HEATS)
        assert len(kept.detail["measured"]) > 3 and all(one["samples_us"] for one in kept.detail["measured"])
        ends.append(true_us(result.winner) / true_us(BOTTOM))
    assert fmean(ends) < 1.02 and max(ends) <= 1.1


def test_a_quiet_machine_needs_no_heats(tmp_path):
    world = World(noise=0.002)
    tune_in(world, f"sqlite:///{tmp_path}/quiet.db", study(40))
    assert not told(world)


@pytest.mark.parametrize("slow", [range(30), range(15, 35), range(40, 60)])
def test_nobody_seems_fast_because_the_machine_became_so(tmp_path, slow):
    """The first config after a disturbance would lead by a factor of two; it is doubted at once, and the anchor looked at."""
    for seed in range(4):
        world = Jumpy(seed=seed)
        world.sigma, world.slow = 0.01, slow
        result = tune_in(world, f"sqlite:///{tmp_path}/{seed}.db", study(72, seed=seed))
        assert result.winner is not None
        assert true_us(result.winner) <= 1.06 * true_us(BOTTOM)
        best = [event.best_us for event in of_kind(world, TrialDone) if event.best_us]
        scale = 2.0 if 0 in slow else 1.0  # times are compared with the pace of the start
        assert min(best) >= 0.9 * scale * true_us(BOTTOM)
