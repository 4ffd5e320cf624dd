"""First of all: copies through a peer's memory bring and push what they should, all four ways; then the self-test."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from dispatch_pair import Pair, build_all, configured, dispatch_problem
from gpu_places import kept_cache, needs_two

from tktune.build.toolchain import detect
from tktune.core.device_cuda import cuda_device_classes
from tktune.core.paths import csrc_root

pytestmark = [pytest.mark.gpu, needs_two]


def test_tensor_and_bulk_copies_go_through_a_peers_memory(tmp_path):
    nvcc = detect("nvcc", "sm_90a")
    cubin = tmp_path / "p2p.cubin"
    source = Path(__file__).with_name("dispatch_p2p.cu")
    command = [str(nvcc.path), "-cubin", "-std=c++20", *nvcc.flags, "-I", str(csrc_root()), str(source)]
    subprocess.run([*command, "-o", str(cubin)], check=True)
    with Pair(dispatch_problem(), cuda_device_classes()[0]) as pair:
        for said in pair.both("p2p", cubin=str(cubin)):
            assert said["wrong"] == dict.fromkeys(said["wrong"], 0)


def test_a_pair_trusts_its_memory_and_one_launch_is_right(tmp_path):
    problem, device = dispatch_problem(), cuda_device_classes()[0]
    config = configured(problem, device)
    ((artifact, part),) = build_all(kept_cache(tmp_path), [(problem, device, config)])
    with Pair(problem, device) as pair:
        pair.both("seat_workbench")
        pair.load(artifact, part)  # runs the self-test of all pairs
        for said in pair.both("gate", config=dict(config), routing="uniform", seed=1, sequence=10):
            assert said["passed"], said
