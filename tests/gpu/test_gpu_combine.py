"""The combine fusion on GPUs: the reference for every main loop, form, order, granularity, split and routing, launch after
launch; every mode is timed; a wait whose word never rises is told by name.
"""

from __future__ import annotations

from typing import Any

import pytest
from dispatch_pair import REHEARSAL
from gpu_places import kept_cache, needs_two, some

from tktune.build.cache import ArtifactCache
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.device_cuda import cuda_device_classes
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.families.base import family
from tktune.families.gemm_combine import space_cuda
from tktune.gang.gang import Gang

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

BENCH = family("gemm_combine")
WORLDS = [1, pytest.param(2, marks=needs_two)]
PROBLEMS: dict[str, dict[str, Any]] = {
    "small": {},
    "ragged": {"hidden": 320, "cols": 328, "experts": 6, "top_k": 3, "tokens": 77, "weight_layout": "ekn"},
    "one_expert": {"experts": 4, "top_k": 1, "tokens": 50},  # a rank may hold nothing at all
    "long_rows": {"hidden": 256, "cols": 7168, "experts": 64, "top_k": 8, "tokens": 64},
}
WGMMA: list[dict[str, Any]] = [
    {},
    {"MAIN_LOOP": "wgmma_pingpong", "COL_BLOCK": 128, "DRAW": "dispenser"},
    {"ROW_BLOCK": 192, "COL_BLOCK": 192, "OUT_SLOTS": 1, "CONSUMER_WARPS": 12},
    {"CLUSTER": 2, "MMA_DEPTH": 0},
    {"ROW_BLOCK": 64, "CONSUMER_WARPS": 4, "DRAW": "dispenser"},
]
SQUARE = {"ROW_BLOCK": 128, "COL_BLOCK": 128, "RED_BLOCK": 32, "WARP_M": 64, "CONSUMER_WARPS": 8}
MMA_SYNC: list[dict[str, Any]] = [{}, {**SQUARE, "PRODUCER_WARPS": 1, "STAGES": 5}]
LAUNCHES: list[dict[str, Any]] = [  # runs of columns: as many as asked for, or fewer where those do not fit
    {"num_comm_sms": 16, "signal_groups": 1},
    {"num_comm_sms": 4, "num_reduce_sms": 1, "order": "remote", "rows_in_flight": 2, "signal_groups": 2},
    {"num_comm_sms": 32, "walk": "columns", "num_reduce_sms": 96, "signal_groups": 4},
    {"num_comm_sms": 16, "form": "pull", "signal_groups": 1},
    {"num_comm_sms": 8, "form": "pull", "order": "remote", "walk": "columns", "signal_groups": 2},
]
ROUTINGS = ("uniform", "empty:0", "hot:0.9@3", "one:3", "zipf:1.2")


def combine_problem(world: int, **changes: Any) -> Problem:
    fields = {"hidden": 512, "cols": 1536, "experts": 16, "top_k": 4, "tokens": 200, "weight_layout": "enk"}
    return Problem("gemm_combine", **{**fields, **changes}, world=world)


def configured(problem: Problem, device: DeviceClass, **changes: Any) -> tuple[Config, Config]:
    """The default with `changes`, feasible, and its build part."""
    space = space_cuda.space(problem, device, BENCH.roles)
    ways = [space.default_config().replace(signal_groups=groups, **changes) for groups in (1, 2)]
    config = next((way for way in ways if not space.broken(way)), None)
    assert config is not None, space.broken(ways[0])
    return config, space.build_part(config)


def launched(problem: Problem, device: DeviceClass, config: Config, number: int) -> Config:
    """The config launched in the `number`-th way."""
    space = space_cuda.space(problem, device, BENCH.roles)
    launch = LAUNCHES[number]
    ways = [config.replace(**{**launch, "signal_groups": n}) for n in (launch["signal_groups"], 2)]
    ways.append(config.replace(**{**launch, "signal_groups": 1, "walk": "experts"}))
    found = next((way for way in ways if not space.broken(way)), None)
    assert found is not None, space.broken(ways[-1])
    return found


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> ArtifactCache:
    return kept_cache(tmp_path_factory.mktemp("combine"))


def built(cache: ArtifactCache, problem: Problem, device: DeviceClass, parts: list[Config]) -> list[Any]:
    outcomes = cache.build([BENCH.build_spec(part, problem, device) for part in parts])
    for outcome in outcomes:
        assert outcome.artifact is not None, outcome.error_sentence
    return [outcome.artifact for outcome in outcomes]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("path", ["wgmma", "mma_sync"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_result_is_the_reference(cache: ArtifactCache, name: str, path: str, world: int) -> None:
    """And so is every buffer on the way to it."""
    problem = combine_problem(world, **PROBLEMS[name])
    device = REHEARSAL if path == "mma_sync" else cuda_device_classes()[0]
    made = [configured(problem, device, **changes) for changes in (MMA_SYNC if path == "mma_sync" else WGMMA)]
    artifacts = built(cache, problem, device, [part for _, part in made])
    seed = 0
    with Gang(problem, device, Policy(), ranks_env={"TKTUNE_DEBUG": "buffers"}) as gang:
        for at, ((config, part), artifact) in enumerate(zip(made, artifacts, strict=True)):
            loaded = gang.load(artifact.path, artifact.sha256, part)
            assert loaded.ok and loaded.sentence == "", loaded
            for number in range(len(LAUNCHES)):
                chosen = launched(problem, device, config, number)
                for routing in some(gang.takes_turns, at + number, ROUTINGS):
                    seed += 1
                    outcome = gang.gate(chosen, routing, seed)
                    assert outcome.ok, f"{dict(chosen)} {routing}: {outcome.sentence}"


@pytest.mark.parametrize("world", WORLDS)
def test_a_hundred_rounds_with_fresh_inputs_are_right(cache: ArtifactCache, world: int) -> None:
    problem, device = combine_problem(world, tokens=333, cols=1024), cuda_device_classes()[0]
    config, part = configured(problem, device)
    (artifact,) = built(cache, problem, device, [part])
    with Gang(problem, device, Policy()) as gang:
        assert gang.load(artifact.path, artifact.sha256, part).ok
        for seed in range(100):
            chosen = launched(problem, device, config, seed % len(LAUNCHES))
            outcome = gang.gate(chosen, ROUTINGS[seed % 3], 1000 + seed)
            assert outcome.ok, f"round {seed}: {outcome.sentence}"


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("launch_mode", ["graph", "direct"])
def test_every_mode_is_timed_and_replays_are_right(
    cache: ArtifactCache, launch_mode: str, world: int
) -> None:
    problem = combine_problem(world, hidden=1536, cols=4096, experts=64, top_k=8, tokens=1024, pad=128)
    device = cuda_device_classes()[0]
    config, part = configured(problem, device)
    (artifact,) = built(cache, problem, device, [part])
    with Gang(problem, device, Policy(launch_mode=launch_mode)) as gang:
        assert gang.load(artifact.path, artifact.sha256, part).ok
        for form in ("prereduce", "pull"):
            chosen = config.replace(form=form)
            for mode in ("fused", "comp", "comm", "serial", "peer"):
                outcome = gang.time(chosen, mode, 0, 20)
                assert outcome.ok, f"{form} {mode}: {outcome.sentence}"
                assert len(outcome.worst_us) == 20
                assert gang.takes_turns or 3 < min(outcome.worst_us) < 20_000
                print(f"{launch_mode} world {world} {form:9} {mode:6} {sorted(outcome.worst_us)[10]:8.1f} us")
            count = 3000 if launch_mode == "graph" else 100
            replays = gang.time(chosen, "fused", 0, min(count, 200) if gang.takes_turns else count)
            assert replays.ok, replays.sentence
            assert gang.gate(chosen, "uniform", 5).ok


def test_sums_without_a_gemm_end_by_the_spin_limit_and_the_next_gang_works(cache: ArtifactCache) -> None:
    problem, device = combine_problem(1), cuda_device_classes()[0]
    config, part = configured(problem, device)
    (artifact,) = built(cache, problem, device, [part])
    with Gang(problem, device, Policy(), spin_limit_s=0.5) as gang:
        assert gang.load(artifact.path, artifact.sha256, part).ok
        starved = gang.gate(config.replace(num_comm_sms=device.sm_count), "uniform", 0)
        assert starved.status == "fault:spin_limit", starved
        assert "combine" in starved.sentence and "landed[" in starved.sentence, starved.sentence
        assert gang.load(artifact.path, artifact.sha256, part).ok
        assert gang.gate(config, "uniform", 0).ok
