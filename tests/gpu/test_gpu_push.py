"""Pushed rows on two GPUs: no flag is ahead of its rows; outputs are the reference for every tile, split and routing,
launch after launch; waits for who does not push end, and say for whom.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from dispatch_pair import (
    PROBLEMS,
    REHEARSAL,
    ROUTINGS,
    Pair,
    build_all,
    configured,
    dispatch_problem,
    gate_words,
    gated,
    gated_for_a_hundred_rounds,
    timed_in_every_mode,
)
from gpu_places import few, kept_cache, needs_a_gpu_each, needs_two

from tktune.build.toolchain import detect
from tktune.core.device_cuda import cuda_device_classes
from tktune.core.paths import csrc_root
from tktune.core.policy import Policy
from tktune.gang.gang import Gang

pytestmark = [pytest.mark.gpu, needs_two, pytest.mark.timeout(300)]

FORMS = pytest.mark.parametrize("form", ["indexed", "gathered"])
MMA_SYNC: list[dict[str, Any]] = [{}, {"WARP_M": 64, "DRAW": "dispenser"}]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"DRAW": "dispenser"},
    {"MAIN_LOOP": "wgmma_pingpong", "COL_BLOCK": 128, "DRAW": "dispenser"},
    {"ROW_BLOCK": 256, "COL_BLOCK": 192, "STAGES": 3, "MMA_DEPTH": 0, "DRAW": "dispenser"},
]
LAUNCHES: list[dict[str, Any]] = [
    {"num_comm_sms": 16},
    {"num_comm_sms": 2},
    {"num_comm_sms": 48, "raster_rows": 1},
    {"num_comm_sms": 8, "opening": 1, "wave": 1},
    {"num_comm_sms": 12, "push_sms": 12},
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return kept_cache(tmp_path_factory.mktemp("push"))


def pushing(problem, form, **changes):
    device = cuda_device_classes()[0]
    return configured(problem, device, ACTIVATIONS=form, TRANSPORT="push", **changes)


@needs_a_gpu_each("whether a flag overtakes its rows, for which both ranks must run at once")
def test_no_flag_is_ahead_of_its_rows(tmp_path):
    """A storing lane's own fence is what the role relies on; what happens without it is only told."""
    nvcc, source = detect("nvcc", "sm_90a"), Path(__file__).with_name("push_flags.cu")
    cubins = []
    for fence in (1, 0):
        cubins.append(str(tmp_path / f"flags{fence}.cubin"))
        command = [str(nvcc.path), "-cubin", "-std=c++20", *nvcc.flags, f"-DSTORER_FENCE={fence}"]
        subprocess.run([*command, "-I", str(csrc_root()), str(source), "-o", cubins[-1]], check=True)
    with Pair(dispatch_problem(), cuda_device_classes()[0], script="push_rank.py") as pair:
        said = pair.both("flags", cubins=cubins, rounds=3000)
    print(f"\nwith the storing lanes' fence and without: {said}", end="")
    assert all(rank["wrong"][0] == 0 for rank in said)


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("path", ["indexed", "gathered", "mma_sync"])
def test_the_output_is_the_reference(cache, name, path):
    problem = dispatch_problem(**PROBLEMS[name])
    device = REHEARSAL if path == "mma_sync" else cuda_device_classes()[0]
    if path == "mma_sync":
        configs = [configured(problem, device, TRANSPORT="push", **changes) for changes in MMA_SYNC]
    else:
        configs = [pushing(problem, path, **changes) for changes in VARIANTS]
    built = build_all(cache, [(problem, device, config) for config in configs])
    with Gang(problem, device, Policy()) as gang:
        gated(gang, configs, built, LAUNCHES, ROUTINGS)


@FORMS
def test_a_hundred_rounds_with_fresh_inputs_are_right(cache, form):
    problem, device = dispatch_problem(tokens=333), cuda_device_classes()[0]
    config = pushing(problem, form, DRAW="dispenser")
    ((artifact, part),) = build_all(cache, [(problem, device, config)])
    with Gang(problem, device, Policy()) as gang:
        assert gang.load(artifact.path, artifact.sha256, part).ok
        gated_for_a_hundred_rounds(gang, config, LAUNCHES, ROUTINGS)


@FORMS
@pytest.mark.parametrize("launch_mode", ["graph", "direct"])
def test_every_mode_is_timed_and_replays_count_on(cache, launch_mode, form):
    problem, device = dispatch_problem(), cuda_device_classes()[0]
    config = pushing(problem, form, DRAW="dispenser")
    ((artifact, part),) = build_all(cache, [(problem, device, config)])
    with Gang(problem, device, Policy(launch_mode=launch_mode)) as gang:
        assert gang.load(artifact.path, artifact.sha256, part).ok
        timed_in_every_mode(gang, config, 10_000 if launch_mode == "graph" else 200)


@pytest.fixture(scope="module", params=["indexed", "gathered"])
def ready(cache, request):
    problem, device, form = dispatch_problem(), cuda_device_classes()[0], request.param
    config = pushing(problem, form, DRAW="dispenser")
    ((artifact, part),) = build_all(cache, [(problem, device, config)])

    def seated(spin_limit_s=2.0):
        return Pair(problem, device, spin_limit_s, "push_rank.py").seated(artifact, part)

    return seated, dict(config)


def test_a_rank_that_never_pushes_is_named_by_who_waits_for_it(ready):
    """By index a gate waits for a flag of rank 1, the second of a pad block; gathered whoever scatters one of its
    tokens does, whose flags lie behind those of rank 0's."""
    seated, config = ready
    with seated(0.5) as pair:
        for said in pair.both("gate", **gate_words(config, 10)):
            assert said["passed"], said
        pair.ask(1, "never_push")
        assert "ok" in pair.reply(1)
        for rank in range(2):
            pair.ask(rank, "gate", **gate_words(config, 20))
        said = pair.reply(0, 20.0)
        assert said["failed"] == "spin_limit", said
        who, _, words = said["sentence"].partition(" gave up waiting for flag[")
        index, _, rest = words.partition("]: ")
        assert rest.startswith("21 was expected, 11 was there"), said  # last raised in the launch before
        if config["ACTIVATIONS"] == "indexed":
            assert who.startswith("Rank 0's gate in block ") and int(index) % 2 == 1, said
        else:
            assert who.startswith("Rank 0's communicate in block ") and 200 <= int(index) < 400, said
        pair.page.abort()  # rank 1 waits for rank 0 to be done with its rows, and may have given that up already
        assert pair.reply(1, 20.0)["failed"] in ("aborted", "spin_limit")


@FORMS
def test_a_rank_outlives_a_peer_that_is_killed_while_it_is_pushed_to(cache, form):
    """Launches of a quarter of a millisecond, so that those left after the kill, each of which hears of the abort
    within two, are not many."""
    problem, device = dispatch_problem(tokens=2048, hidden=4096), cuda_device_classes()[0]
    config = pushing(problem, form, DRAW="dispenser", num_comm_sms=2)
    ((artifact, part),) = build_all(cache, [(problem, device, config)])

    def seated():
        return Pair(problem, device).seated(artifact, part)

    with seated() as pair:
        for rank in range(2):
            pair.ask(rank, "time", config=dict(config), mode="comm", iterations=few(8000, 5000), sequence=100)
        time.sleep(1.2)
        pair.ranks[1].kill()
        pair.ranks[1].wait(10)
        time.sleep(0.2)
        pair.page.abort()
        said = pair.reply(0, few(30, 60))
        assert "failed" in said, said
    with seated() as pair:
        for said in pair.both("gate", **gate_words(dict(config), 10)):
            assert said["passed"], said
