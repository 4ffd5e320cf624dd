"""What a rehearsal of sm_120a runs has nothing of its host: no warpgroup instruction, no multicast, no atomic beyond its
own device. Judged on the PTX, of the class itself too.
"""

from __future__ import annotations

import re
import subprocess

import pytest

from tktune.build import commands, toolchain
from tktune.core.device import device_class
from tktune.core.problem import Problem
from tktune.families.base import family

pytestmark = pytest.mark.skipif(
    not toolchain.nvcc_present(), reason="no nvcc on PATH, in CUDA_HOME or among the wheels"
)
PROBLEM = Problem("dispatch_gemm", 2048, 768, 128, 8, 2048, world=2, weight_layout="enk")
FORBIDDEN = r"wgmma|setmaxnreg|multimem|multicast|\b(?:atom|red)\.\S*\bsys\b\S*|\b(?:atom|red)\.async\S*"


def ptx_of(spec, tmp_path):
    found = toolchain.detect("nvcc", spec.arch)
    argv = [word for word in commands.compile_argv(spec, found, tmp_path / "out.ptx") if word != "-cubin"]
    argv = [
        word.replace(f"code={spec.arch}", f"code={spec.arch.replace('sm_', 'compute_')}") for word in argv
    ]
    done = subprocess.run([*argv, "-ptx"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return (tmp_path / "out.ptx").read_text()


@pytest.mark.parametrize("name", ["sm_120a-rehearsed", "sm_120a"])
def test_nothing_of_the_host_is_in_the_fused_kernel_and_its_plan(name, tmp_path):
    device, bench = device_class(name), family("dispatch_gemm")
    space = bench.space(PROBLEM, device)
    part = space.build_part(space.default_config())
    assert part["CONSUMER_WARPS"] == 8
    ptx = ptx_of(bench.build_spec(part, PROBLEM, device), tmp_path)
    assert re.search(rf"^\.target {device.arch}\s*$", ptx, re.MULTILINE), ptx[:400]
    assert all(f".entry tktune_dispatch_{entry}" in ptx for entry in ("gemm(", "gemm_meet(", "plan("))
    assert re.findall(FORBIDDEN, ptx) == []
    assert re.search(r"\b(atom|red)\.\S*gpu", ptx)  # atomics of its own device are there


def test_the_pattern_sees_what_it_forbids():
    for line in (
        "wgmma.mma_async.sync",
        "atom.acq_rel.sys.global.add.u64",
        "red.relaxed.sys.global.add",
        "multimem.red",
    ):
        assert re.findall(FORBIDDEN, line), line
    assert not re.findall(FORBIDDEN, "red.release.gpu.global.add.s32 [%rd1], 1;  st.release.sys.global.u64")
