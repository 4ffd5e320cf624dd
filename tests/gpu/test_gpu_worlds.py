"""Worlds of more than two ranks, on however many GPUs there are: every rank's output is the reference, whoever brings the
rows, and plans of the operators are the golden ones.
"""

from __future__ import annotations

from typing import Any

import pytest
from dispatch_pair import build_all, configured
from gpu_places import kept_cache, needs_gpus
from rank_programs import played

from tktune.core.device_cuda import cuda_device_classes
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.gang.gang import Gang

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

WORLDS = [pytest.param(world, marks=needs_gpus(world)) for world in (3, 4, 8)]
# Kernel and changes of its default: every way in which rows and sums cross.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "gathered": ("dispatch_gemm", {"ACTIVATIONS": "gathered"}),
    "indexed": ("dispatch_gemm", {"ACTIVATIONS": "indexed"}),
    "pushed": ("dispatch_gemm", {"TRANSPORT": "push", "ACTIVATIONS": "gathered"}),
    "pushed by index": ("dispatch_gemm", {"TRANSPORT": "push", "ACTIVATIONS": "indexed"}),
    "prereduced": ("gemm_combine", {}),
    "pulled": ("gemm_combine", {"form": "pull"}),
}
# With a rank to which nothing goes, and one to which all goes.
ROUTINGS = ("uniform", "empty:0,1,2,3", "hot:0.9@5", "one:9")
DISPATCH_TOLERANCE = 4e-3


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return kept_cache(tmp_path_factory.mktemp("worlds"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_of_a_world_gives_the_reference(cache, world, way):
    family, changes = WAYS[way]
    device = cuda_device_classes()[0]
    problem = Problem(family, 512, 768, 4 * world, 3, 130, world=world, weight_layout="enk")
    config = configured(problem, device, **changes)
    ((artifact, part),) = build_all(cache, [(problem, device, config)])
    with Gang(problem, device, Policy()) as gang:
        loaded = gang.load(artifact.path, artifact.sha256, part)
        assert loaded.ok and loaded.sentence == "", loaded
        for seed, routing in enumerate(ROUTINGS):
            outcome = gang.gate(config, routing, seed)
            assert outcome.ok and len(outcome.replies) == world, f"{routing}: {outcome.sentence}"


@pytest.mark.parametrize("world", [pytest.param(4, marks=needs_gpus(4))])
def test_the_dispatch_operator_of_a_world_plans_and_calls(tmp_path, world):
    found = played("dispatch_operator_rank.py", tmp_path, "calls", world=world)
    assert len(found) == world
    assert all(error < DISPATCH_TOLERANCE for one in found for error in one["errors"]), found


@pytest.mark.parametrize("world", [pytest.param(4, marks=needs_gpus(4))])
def test_the_combine_operator_of_a_world_plans_and_calls(tmp_path, world):
    said = played("combine_operator_rank.py", tmp_path, "forms", world=world)
    assert [scene for scene, _ in said] == ["forms"] * world
    for _, one in said:
        assert all(error <= 1 for error in one["errors"]), one
        assert set(one["tables"]) == {""} and all(one["same"]), one
