"""An expert layer on two GPUs: every form of its kernels against the reference, rounds with delays, graphs, torch.compile,
plain torch over NCCL, and its workbench in a gang.
"""

from __future__ import annotations

from typing import Any

import pytest
from gpu_places import kept_cache, needs_a_gpu_each, needs_two
from moe_rank import specs
from rank_programs import played

from tktune.build.cache import ArtifactCache
from tktune.core import status
from tktune.core.device import DeviceClass
from tktune.core.policy import serving_policy
from tktune.core.problem import Problem
from tktune.core.routing import GATE_ROUTINGS
from tktune.families.base import family
from tktune.gang.gang import Gang
from tktune.gang.trial import TrialPlan, measure_trial
from tktune.search.layer_study import with_kernels

pytestmark = [pytest.mark.gpu, needs_two, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, device: DeviceClass) -> ArtifactCache:
    """A cache with every artifact that the scenes load, compiled at once."""
    made = kept_cache(tmp_path_factory.mktemp("cache"))
    for outcome in made.build(specs(device)):
        assert outcome.artifact is not None, outcome.error_sentence
    return made


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory, built: ArtifactCache) -> Any:
    folder = tmp_path_factory.mktemp("moe")
    environment = {"TKTUNE_DB": f"sqlite:///{folder}/none.db", "TKTUNE_CACHE_DIR": str(built.root)}

    def scene(name: str) -> list[dict[str, Any]]:
        return played("moe_rank.py", folder, name, environment=environment)

    return scene


def test_every_form_matches_the_reference_wherever_tokens_go(play: Any) -> None:
    for one in play("forms"):
        assert max(one["errors"].values()) <= one["tolerance"], one


def test_a_hundred_rounds_of_three_routings_with_random_delays(play: Any) -> None:
    for one in play("rounds"):
        assert one["worst"] <= one["tolerance"] and one["different"] == 0, one


def test_a_graph_follows_its_inputs_and_a_compiled_call_is_the_same(play: Any) -> None:
    for one in play("graphs"):
        assert one["worst"] <= one["tolerance"], one
        assert one["different"] == 0 and not one["compiled_differs"], one


@needs_a_gpu_each("plain torch over NCCL, which refuses two ranks at one GPU")
def test_plain_torch_over_nccl_matches_and_is_captured(play: Any) -> None:
    for one in play("serial"):
        assert max(one["errors"].values()) <= one["tolerance"] and one["different"] == 0, one


def test_the_workbench_is_gated_and_times_every_mode_in_a_gang(
    built: ArtifactCache, device: DeviceClass
) -> None:
    layer = Problem("moe_layer", 512, 256, 8, 2, 200, world=2, weight_layout="enk", pad=128)
    assert len(with_kernels([layer])) == 3
    owner = family("moe_layer")
    space = owner.space(layer, device)
    config = space.default_config()
    part = space.build_part(config)
    artifact = built.build([owner.build_spec(part, layer, device)])[0].artifact
    assert artifact is not None
    policy = serving_policy(device.backend, device.l2_bytes)
    with Gang(layer, device, policy) as gang:
        for launch in (config, config.replace(**{"combine.form": "pull", "dispatch.order": "slot"})):
            judged = space.canonical(launch)
            if gang.takes_turns:  # a trial would want times
                assert gang.load(artifact.path, artifact.sha256, part).ok
                for seed, routing in enumerate(GATE_ROUTINGS(layer)):
                    outcome = gang.gate(judged, routing, seed)
                    assert outcome.ok, f"{routing}: {outcome.sentence}"
                continue
            result = measure_trial(gang, judged, part, artifact, TrialPlan.of(layer, policy))
            assert result.status == status.OK, result.sentence
        for mode in ("fused", "comp", "serial"):
            outcome = gang.time(config, mode, seed=0, iterations=5)
            assert outcome.ok and min(outcome.worst_us) > 0, outcome.sentence
        assert gang.time(config, "comm", seed=0, iterations=1).status.startswith("refused:")
