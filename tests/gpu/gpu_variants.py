"""Variants of the grouped GEMM run in this process: how GPU tests build them and run cases with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tktune.build.artifact import Artifact
from tktune.build.cache import ArtifactCache
from tktune.core.build_spec import BuildSpec
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.families.base import family

# The class that rehearses sm_120a on a Hopper device: mma.sync, 99 KB.
REHEARSAL = DeviceClass("cuda", "sm_90", 110, 101376, 50331648, "none", remote_atomics=False)

WGMMA: dict[str, dict[str, Any]] = {
    "default": {},
    "cluster": {"CLUSTER": 2, "MMA_DEPTH": 0, "raster_rows": 2, "turn_back": 1},
    "narrow_cluster": {"CLUSTER": 2, "COL_BLOCK": 192, "STAGES": 5, "OUT_SLOTS": 1, "MMA_DEPTH": 1},
    "pingpong": {
        "MAIN_LOOP": "wgmma_pingpong",
        "COL_BLOCK": 192,
        "STAGES": 5,
        "OUT_SLOTS": 1,
        "MMA_DEPTH": 1,
        "turn_back": 1,
    },
    "low": {"ROW_BLOCK": 64, "CONSUMER_WARPS": 4, "DRAW": "dispenser", "walk": "shortest"},
    "tall": {"ROW_BLOCK": 256, "COL_BLOCK": 192, "STAGES": 3, "DRAW": "dispenser"},
    "three": {"ROW_BLOCK": 192, "COL_BLOCK": 192, "OUT_SLOTS": 1, "CONSUMER_WARPS": 12, "turn_back": 1},
    "narrow": {"COL_BLOCK": 192, "STAGES": 5, "OUT_SLOTS": 1, "raster_rows": 1},
}
MMA_SYNC: dict[str, dict[str, Any]] = {
    "default": {},
    "strips": {"WARP_M": 16, "DRAW": "stride"},
    "square": {"COL_BLOCK": 256, "RED_BLOCK": 32, "STAGES": 4, "PRODUCER_WARPS": 0},
    "tall": {
        "ROW_BLOCK": 256,
        "RED_BLOCK": 32,
        "STAGES": 4,
        "PRODUCER_WARPS": 0,
        "DRAW": "stride",
        "turn_back": 1,
    },
    "narrow": {"COL_BLOCK": 192, "STAGES": 2, "PRODUCER_WARPS": 0, "walk": "shortest"},
    "four_warps": {"CONSUMER_WARPS": 4, "raster_rows": 1},
    "low": {"ROW_BLOCK": 64, "CONSUMER_WARPS": 4, "STAGES": 4, "walk": "shortest"},
}


def prebuild(cache: ArtifactCache, device: DeviceClass) -> None:
    """Build every variant in both layouts at once, on all cores."""
    specs: list[BuildSpec] = []
    for variants, on in ((WGMMA, device), (MMA_SYNC, REHEARSAL)):
        for changes in variants.values():
            for layout in ("enk", "ekn"):
                problem = counted_problem((8,), 128, 128, layout)
                bench = family(problem.family)
                space = bench.space(problem, on)
                config = space.default.replace(**changes)
                if space.broken(config):
                    continue
                specs.append(bench.build_spec(space.build_part(config), problem, on))
    cache.build(specs)


def counted_problem(counts: Sequence[int], hidden: int, cols: int, layout: str) -> Problem:
    """A problem whose one rank can be given exactly `counts` rows an expert (`ids_of_counts`)."""
    tokens = max(1, sum(counts))
    return Problem(
        "grouped_gemm", hidden, cols, len(counts), 1, tokens, weight_layout=layout, pad=128, ep_world=1
    )


def build(cache: ArtifactCache, problem: Problem, device: DeviceClass, config: Config) -> Artifact:
    bench = family(problem.family)
    part = bench.space(problem, device).build_part(config)
    (outcome,) = cache.build([bench.build_spec(part, problem, device)])
    assert outcome.artifact is not None, outcome.error_sentence
    return outcome.artifact


@dataclass
class Variant:
    """A config on a device class, ready to run cases of any grouped GEMM problem in this process."""

    cache: ArtifactCache
    device: DeviceClass
    changes: dict[str, Any]

    def config(self, problem: Problem) -> Config:
        space = family(problem.family).space(problem, self.device)
        config = space.default.replace(**self.changes)
        for constraint, sentence in space.broken(config):
            pytest.skip(f"{constraint.name}: {sentence}")
        return config

    def run(self, problem: Problem, topk_ids: Any, seed: int = 0, times: int = 1) -> tuple[Any, Any]:
        """The case of rank 0 and the outputs of `times` launches on the same input, (times, rows, cols)."""
        import torch

        from tktune.families.control_page import ControlPage
        from tktune.families.cuda.control import Control
        from tktune.families.cuda.driver import attach, current_stream, synchronize
        from tktune.families.cuda.gemm_inputs import GUARD_ROWS, draw_weights, make_case
        from tktune.families.cuda.module import Module, verified
        from tktune.families.cuda.tensor_map import TensorMaps
        from tktune.families.grouped_gemm.launch_cuda import gemm_launch

        attach(0)
        there = torch.device("cuda", 0)
        config = self.config(problem)
        artifact = build(self.cache, problem, self.device, config)
        sms = torch.cuda.get_device_properties(0).multi_processor_count
        module = Module(verified(artifact.path, artifact.sha256), "grouped_gemm", sms)
        weights = draw_weights(problem, 0, there)
        case = make_case(problem, weights, 0, problem.routing, seed, topk_ids)
        page = ControlPage.create(1)
        control = Control(page, 0, 2.0)
        dispenser = torch.zeros(2, dtype=torch.int32, device=there)
        rows = case.rows + GUARD_ROWS
        outputs = torch.full((times, rows, problem.cols), math.nan, dtype=torch.bfloat16, device=there)
        maps = TensorMaps()
        try:
            for out in outputs:
                launch = gemm_launch(
                    module,
                    config,
                    problem.weight_layout,
                    problem.pad,
                    maps,
                    control.guard,
                    self.device.sm_count,
                    case.activations,
                    weights,
                    out,
                    case.walks[str(config["walk"])],
                    dispenser,
                )
                with control.launching():
                    launch(current_stream(0))
                    synchronize(current_stream(0))
            assert dispenser.tolist() == [0, 0]  # left as it was found
        finally:
            control.close()
            page.close()
            module.close()
        return case, outputs


def ids_of_counts(counts: Sequence[int]) -> Any:
    """Expert ids (1, tokens, 1) that give each expert exactly its count, in a mixed order."""
    import numpy as np

    ids = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    return np.random.default_rng(0).permutation(ids).reshape(1, -1, 1)
