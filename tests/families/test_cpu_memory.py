"""bf16 in numpy, symmetric memory over memfds and over a process group, and the ABI's mirror."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tktune.core.errors import ArtifactError
from tktune.families import abi, bf16
from tktune.families.parallel_tensor import ParallelTensor


def test_rounding_to_bf16_is_torchs() -> None:
    stream = np.random.default_rng(0)
    bits = stream.integers(0, 1 << 32, 200_000, dtype=np.uint32)
    ties = (bits & 0xFFFF0000) | 0x8000
    special = np.array([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 1, 0x007FFFFF], np.uint32)
    values = np.concatenate([bits, ties, special]).view(np.float32)
    values = values[~np.isnan(values)]
    ours = bf16.from_float(values)
    theirs = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(ours, theirs)
    assert np.array_equal(
        bf16.to_float(ours), torch.from_numpy(ours.view(np.int16)).view(torch.bfloat16).float()
    )


def test_nan_stays_nan_whatever_its_bits() -> None:
    nans = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00000], np.uint32).view(np.float32)
    assert (bf16.from_float(nans) == bf16.NAN).all()


def test_the_tolerance_covers_rounding_and_grows_with_the_terms() -> None:
    assert 2**-8 < bf16.gemm_tolerance(1024) < bf16.gemm_tolerance(8192) < 0.01


def test_a_peer_sees_what_a_rank_writes() -> None:
    fds = ParallelTensor.create_fds(2)
    ranks = [ParallelTensor.attach(fds, rank, 8192) for rank in range(2)]
    ranks[0].array(0, "int32", (2, 3), offset=4096)[:] = 5
    assert (ranks[1].array(0, "int32", (6,), offset=4096) == 5).all()
    assert (ranks[1].array(1, "int32", (6,), offset=4096) == 0).all()
    assert ranks[0].local == ranks[0].peer(0) != ranks[0].peer(1)
    assert ranks[0].bytes == 8192
    for memory in ranks:
        memory.close()
    for fd in fds:
        os.close(fd)


def test_a_view_outlives_the_mapping() -> None:
    fds = ParallelTensor.create_fds(1, 4096)
    memory = ParallelTensor.attach(fds, 0)
    view = memory.array(0, "uint8", (4096,))
    memory.close()
    os.close(fds[0])
    view[:] = 1
    assert view.sum() == 4096


GROUP_PROGRAM = """
import sys, torch, torch.distributed as dist
from tktune.families.parallel_tensor import ParallelTensor
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
memory = ParallelTensor.from_group(dist.group.WORLD, 4096)
torch.frombuffer(memory.buffer(rank), dtype=torch.int32)[:4] = 10 + rank
dist.barrier()
print(int(memory.array(1 - rank, "int32", (4,))[3]), memory.bytes)
dist.barrier()
"""


def test_ranks_of_a_process_group_share_memory_and_leave_nothing_behind(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").glob("tktune-*"))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", GROUP_PROGRAM, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for rank in range(2)
    ]
    answers = [process.communicate(timeout=90)[0].split() for process in processes]
    assert answers == [["11", "4096"], ["10", "4096"]]
    assert set(Path("/dev/shm").glob("tktune-*")) <= before


def test_the_mirror_has_the_size_of_the_c_structs(tmp_path: Path) -> None:
    from tktune.core.paths import csrc_root

    names = ["tkt_globals", "tkt_machine", "tkt_result", "tkt_spin_report", "tkt_facts"]
    source = tmp_path / "sizes.cpp"
    prints = " ".join(f'printf("%zu ", sizeof({name}));' for name in names)
    source.write_text(f'#include <cstdio>\n#include "abi.h"\nint main() {{ {prints} }}\n')
    program = tmp_path / "sizes"
    subprocess.run(["g++", "-I", str(csrc_root()), str(source), "-o", str(program)], check=True)
    sizes = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.split()
    import ctypes

    mirrors = [abi.Globals, abi.Machine, abi.Result, abi.SpinReportStruct, abi._FactsStruct]
    assert [int(size) for size in sizes] == [ctypes.sizeof(mirror) for mirror in mirrors]


def test_a_library_of_another_abi_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "other.cpp"
    source.write_text(
        'extern "C" { static int facts[40] = {99}; int* tkt_describe() { return facts; } '
        "int tkt_launch() { return 0; } int tkt_barrier() { return 0; } void tkt_close() {} }"
    )
    library = tmp_path / "other.so"
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    with pytest.raises(ArtifactError, match="abi_version = 99"):
        abi.CpuKernel(library)
    source.write_text("int nothing;")
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(tmp_path / "none.so")], check=True)
    with pytest.raises(ArtifactError, match="cannot be loaded"):
        abi.CpuKernel(tmp_path / "none.so")
