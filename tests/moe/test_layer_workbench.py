"""A layer's workbench on the CPU backend: both kernels in one seat, judged against the fp32 reference of the whole layer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from layer_world import Benches, built, default_of, layer_of

from tktune.build.cache import ArtifactCache
from tktune.core.config import Config
from tktune.core.errors import ArtifactError, ConstraintRefused
from tktune.families.bf16 import from_float, to_float


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> ArtifactCache:
    return ArtifactCache(tmp_path_factory.mktemp("pairs") / "cache")


@pytest.fixture
def benches(cache: ArtifactCache, tmp_path: Path) -> Iterator[Benches]:
    layer = layer_of()
    _, part = default_of(layer)
    made = Benches(layer, cache.root, built(cache, layer, part), part, tmp_path)
    yield made
    made.close()


def launches() -> list[Config]:
    config, _ = default_of(layer_of())
    return [
        config,
        config.replace(**{"dispatch.order": "slot", "combine.form": "pull", "combine.order": "token"}),
        config.replace(
            **{"combine.order": "remote", "combine.rows_in_flight": 4, "dispatch.num_comm_sms": 2}
        ),
    ]


def test_every_form_of_the_pair_matches_the_reference_of_the_layer(benches: Benches) -> None:
    for number, config in enumerate(launches()):
        for routing in ("uniform", "empty:3", "hot:0.9@0", "one:7"):
            for verdict in benches.gate(config, routing, number):
                assert verdict.passed, (config, routing, verdict.sentence)
                assert 0 < verdict.worst_error <= verdict.tolerance


def test_every_launch_gives_the_same_bits(benches: Benches) -> None:
    results = []
    for config in launches() * 2:
        benches.gate(config, "zipf:1.0", 5)
        results.append([bench.buffers()[1].copy() for bench in benches.ranks])
    for one in results[1:]:
        for mine, first in zip(one, results[0], strict=True):
            np.testing.assert_array_equal(mine, first)


def test_a_wrong_activation_or_a_wrong_weight_does_not_pass(benches: Benches) -> None:
    config = launches()[0]
    second = benches.ranks[0]._second
    benches.gate(config, "uniform", 0)
    weights = second._need_weights()
    kept = weights.copy()
    weights[0] = from_float(to_float(kept[0]) * np.float32(1.05))
    verdicts = benches.gate(config, "uniform", 0)
    weights[:] = kept
    assert not all(verdict.passed for verdict in verdicts)
    first = benches.ranks[1]._first._need_weights()
    kept = first.copy()
    swapped = first.reshape(*first.shape[:-1], -1, 2, 8)[..., ::-1, :].reshape(first.shape)  # up for gate
    first[:] = swapped
    verdicts = benches.gate(config, "uniform", 0)
    first[:] = kept
    assert not all(verdict.passed for verdict in verdicts)
    assert all(verdict.passed for verdict in benches.gate(config, "uniform", 0))


def test_modes_are_timed_and_those_that_a_layer_lacks_are_refused(benches: Benches) -> None:
    config = launches()[0]
    times = {mode: benches.time(config, mode) for mode in ("fused", "comp", "serial")}
    assert all(len(rank) == 2 and min(rank) > 0 for ranks in times.values() for rank in ranks)
    for mode in ("comm", "peer"):
        with pytest.raises(ConstraintRefused):
            benches.time(config, mode)


def test_a_pair_that_was_altered_is_not_loaded(benches: Benches, cache: ArtifactCache) -> None:
    layer = layer_of()
    _, part = default_of(layer)
    artifact = built(cache, layer, part)
    copy = benches.ranks[0]
    with pytest.raises(ArtifactError, match="not what was made"):
        copy.load(artifact.path, "0" * 64, part)
    named = json.loads(artifact.path.read_text())["parts"]
    assert [len(one["digest"]) for one in named] == [64, 64]
