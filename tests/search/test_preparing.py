"""What a search needs, made ready beside the problem before: the same as when it is made at its turn, and early enough."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fakes import GPU, FakeCache, FakeFamily, FakeGang, World, study
from fakes import PROBLEM as FAKE_PROBLEM

from tktune.core.device import device_class
from tktune.core.problem import Problem
from tktune.families.base import family
from tktune.search.aside import Aside
from tktune.search.driver import tune
from tktune.search.events import Event, SpaceReady, Tee, TrialDone
from tktune.search.gains import GainChooser
from tktune.search.preparing import Preparation
from tktune.search.results import Rooms
from tktune.store.results import Store

PROBLEM = Problem("dispatch_gemm", hidden=4096, cols=3072, experts=64, top_k=8, tokens=512, world=2)
PINS = {"ROW_BLOCK": (128,), "COL_BLOCK": (128, 256), "STAGES": (3, 4), "RED_BLOCK": (64,)}


@pytest.fixture
def make():
    device = device_class("sm_90a")
    asked = study(family="dispatch_gemm", device="sm_90a", problems=(PROBLEM,), pins=PINS)
    with Store.open("sqlite://") as store:
        key = store.key(PROBLEM, device, asked.policy(device), store.toolchain_id("nvcc", "13", "x", {}))
        cache = SimpleNamespace(holds=lambda digest: digest.endswith("7"))

        def preparation(aside: Aside | None) -> Preparation:
            space = family("dispatch_gemm").space(PROBLEM, device).restrict(PINS)
            return Preparation(
                *(asked, space, family("dispatch_gemm"), store, cache, Rooms()),  # type: ignore[arg-type]
                *(lambda spec: str(sorted(spec.defines.items())), lambda: key, aside),
            )

        yield preparation


def test_what_is_made_ready_aside_is_what_is_made_at_its_turn(make):
    alone = make(None)
    alone.make_ready()  # there is nobody to do it: nothing happens
    alone.choose(16)
    costs, chooser = alone.chooser(16)
    with Aside.begun() as aside:
        beside = make(aside)
        beside.make_ready()
        beside.choose(16)
        beside.wait()
        others, other = beside.chooser(16)
        assert beside.chooser(16)[1] is other  # made once
        assert beside.estimates_us.tobytes() == alone.estimates_us.tobytes()
        assert list(beside.places) == list(alone.places) and len(alone.places) > 50
        assert costs.jobs == others.jobs == 16
        assert isinstance(chooser, GainChooser) and isinstance(other, GainChooser)
        first, second = chooser.build(8, 0.0), other.build(8, 0.0)
        assert first == second and len({alone._space.build_part(config) for config in first}) == 8
        beside.forget()
        assert "places" not in vars(beside)


def test_only_beside_ranks_at_work_does_the_time_of_a_look_count(make):
    with Aside.begun() as aside:
        for one, choices in ((make(None), {1}), (make(aside), {2, 3})):
            with one.pace.look():
                sum(range(10_000))
            assert one.pace.choices(trial_s=1e-6) in choices


def test_one_that_is_forgotten_while_it_is_made_ready_leaves_nothing_behind(make):
    with Aside.begun() as aside:
        beside = make(aside)
        beside.begin()
        under_way = beside._estimating
        assert under_way is not None
        beside.forget()
        assert under_way._process.poll() is not None and beside._estimating is None


@pytest.mark.parametrize(("stalls", "ruled"), [(True, True), (False, True), (True, False)])
def test_the_next_chooser_is_made_before_a_search_is_ended_that_stands_still(url, monkeypatch, stalls, ruled):
    """With a budget so large that no share of it is used up."""
    chosen: list[int] = []
    done: list[int] = []
    ready: list[SpaceReady] = []

    def heard(event: Event) -> None:
        if isinstance(event, TrialDone) and len(ready) == 1:
            done.append(event.number)
        elif isinstance(event, SpaceReady):
            ready.append(event)

    monkeypatch.setattr(Preparation, "choose", lambda self, jobs: chosen.append(len(done)))
    world = World()
    if not stalls:  # every config is faster than all before
        seen: dict[object, float] = {}
        world.truth = lambda config: seen.setdefault(config, 1000.0 * 0.97 ** len(seen))
    rooms = Rooms(
        make_gang=lambda problem, device, policy, **_: FakeGang(world, problem, device, policy),  # type: ignore[arg-type,return-value]
        family=lambda name: FakeFamily(),
        clock=lambda: world.now,
        overlap=False,
    )
    problems = (FAKE_PROBLEM, FAKE_PROBLEM.replace(tokens=32))
    asked = study(trials=1000, problems=problems, stop_early=ruled)
    tune(asked, url, FakeCache(world), listener=Tee(heard), rooms=rooms, device=GPU)  # type: ignore[arg-type]
    assert len(done) >= 60
    assert (48 <= chosen[0] < len(done)) is (stalls and ruled)
