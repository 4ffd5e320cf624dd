"""The link probe without a GPU: it compiles clean for each class, its arguments are laid out as the host packs them, its
copies are right on CPU lanes, and its gate notices when they are not.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
import types
from pathlib import Path

import pytest
from cuda_artifacts import device_words

from tktune.build.cache import ArtifactCache
from tktune.build.toolchain import detect, nvcc_present
from tktune.core.config import Config
from tktune.core.device import device_class
from tktune.core.paths import csrc_root
from tktune.families.cuda import probe_globals as mirror
from tktune.families.cuda.dispatch_globals import meeting_bytes
from tktune.families.cuda.gemm_globals import Guard
from tktune.families.cuda.probe_globals import ProbeGlobals, packed_echo
from tktune.families.link_model import WAYS
from tktune.families.link_probe import space

needs_nvcc = pytest.mark.skipif(
    not nvcc_present(), reason="no nvcc on PATH, in CUDA_HOME or among the wheels"
)
HERE = Path(__file__).parent

LAYOUT = """
#include "comm/probe.cuh"
using G = tkt::probe_globals;
using E = tkt::echo_globals;
#define AT(type, field) static_cast<int32_t>(__builtin_offsetof(type, field))
extern "C" __device__ int32_t probe_layout[] = {
    AT(G, from), AT(G, to), AT(G, guard), AT(G, way), AT(G, items), AT(G, fan), AT(G, stride), AT(G, from_mask),
    AT(G, to_mask), AT(G, row_bytes), AT(G, warps), AT(G, warp_slots), AT(G, pending), sizeof(G)};
extern "C" __device__ int32_t echo_layout[] = {
    AT(E, mine), AT(E, theirs), AT(E, sequence), AT(E, guard), AT(E, rounds), AT(E, opens), sizeof(E)};
extern "C" __device__ int32_t constants[] = {
    tkt::kProbeBulk, tkt::kProbePlain, tkt::kProbeThreads, tkt::kProbeMostUnroll, tkt::kProbeReserveBytes,
    tkt::kProbeMostPending};
"""


@needs_nvcc
def test_the_compiler_lays_out_what_the_host_packs(tmp_path):
    source, cubin = tmp_path / "layout.cu", tmp_path / "layout.cubin"
    source.write_text(LAYOUT)
    nvcc = detect("nvcc", "sm_90a")
    command = [str(nvcc.path), "-cubin", "-std=c++20", *nvcc.flags, "-I", str(csrc_root()), str(source)]
    subprocess.run([*command, "-o", str(cubin)], check=True, capture_output=True)
    after = [40 + 4 * number for number in range(10)]
    assert device_words(cubin, "probe_layout") == [0, 8, 16, *after, mirror.GLOBALS_BYTES]
    assert device_words(cubin, "echo_layout") == [0, 8, 16, 24, 48, 52, mirror.ECHO_BYTES]
    constants = [
        mirror.BULK,
        mirror.PLAIN,
        mirror.THREADS,
        mirror.MOST_UNROLL,
        mirror.RESERVE_BYTES,
        mirror.MOST_PENDING,
    ]
    assert device_words(cubin, "constants") == constants
    assert (space.RESERVE_BYTES, space.MOST_PENDING) == (mirror.RESERVE_BYTES, mirror.MOST_PENDING)
    assert space.THREAD_PIECES in (mirror.MOST_UNROLL // 2, mirror.MOST_UNROLL)
    assert space.PIECES_AT_ONCE == mirror.THREADS * space.THREAD_PIECES
    assert space.PIECE_BYTES == mirror.PIECE_BYTES


def test_arguments_are_packed_in_their_order():
    packed = ProbeGlobals(1, 2, Guard(1.0), 1, 3, 8, 16, 32, 5, 7, 4, 6, 2).packed()
    assert len(packed) == mirror.GLOBALS_BYTES and struct.unpack_from("<QQ", packed) == (1, 2)
    assert struct.unpack_from("<10i", packed, 40) == (1, 3, 5, 7, 7, 15, 32, 4, 6, 2)
    echo = packed_echo(1, 2, 3, Guard(1.0), 9, True)
    assert len(echo) == mirror.ECHO_BYTES and struct.unpack_from("<ii", echo, 48) == (9, 1)


@pytest.mark.parametrize(
    "wrong", [{"source_rows": 3}, {"target_rows": 0}, {"stride": 2}, {"row_bytes": 8}, {"fan": 1 << 31}]
)
def test_arguments_that_a_launch_cannot_take_are_refused(wrong):
    right = {"source_rows": 4, "target_rows": 4, "row_bytes": 16, "items": 1}
    with pytest.raises(ValueError):
        ProbeGlobals(0, 0, Guard(1.0), 0, **{**right, **wrong})


@needs_nvcc
@pytest.mark.parametrize("world", [1, 2, 8])
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_the_probe_compiles_without_spills_or_driver_calls(tmp_path, arch, world):
    problem, device = space.probe_problem(world), device_class(arch)
    spec = space.FAMILY.build_spec(space.LINK_BUILD, problem, device)
    (outcome,) = ArtifactCache(tmp_path).build([spec])
    assert outcome.ok, outcome.error_sentence
    facts, path = outcome.artifact.facts, outcome.artifact.path
    assert facts["spill_store_bytes"] == facts["spill_load_bytes"] == facts["stack_bytes"] == 0
    assert facts["syscalls"] == [] and facts["registers"] <= 64
    assert set(facts["entries"]) == {f"tktune_link_probe{tail}" for tail in ("", "_meet", "_echo")}
    assert device_words(path, "tktune_link_probe_facts") == [
        *(mirror.RESERVE_BYTES, mirror.THREADS, mirror.GLOBALS_BYTES, 1)
    ]
    assert device_words(path, "tktune_link_probe_world") == [world, meeting_bytes(world), mirror.ECHO_BYTES]
    assert outcome.seconds < 20


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
def test_the_gemm_that_is_slowed_down_is_the_default_one(arch):
    problem, device = space.probe_problem(2), device_class(arch)
    spec = space.FAMILY.build_spec(space.gemm_build_part(problem, device), problem, device)
    assert spec.source.stem == "grouped_gemm" and spec.facts["smem_bytes"] <= device.smem_optin_bytes
    tiles = problem.tokens // 128 * (problem.cols // space.gemm_config(problem, device).number("COL_BLOCK"))
    waves = -(-tiles // device.sm_count)
    assert waves / (tiles / device.sm_count) < 1.02  # the last wave hardly counts


# On CPU lanes.


@pytest.fixture(scope="module")
def runner(tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("g++ is not on PATH")
    folder = tmp_path_factory.mktemp("lanes")
    shutil.copytree(HERE / "lanes", folder, dirs_exist_ok=True)
    shutil.copy(csrc_root() / "comm" / "probe_bulk.cuh", folder / "comm")
    program = folder / "probe"
    command = ["g++", "-std=c++20", "-O2", "-Wall", "-Wno-unknown-pragmas", "-I", str(folder)]
    command += ["-I", str(csrc_root()), str(HERE / "probe_lanes.cpp"), "-o", str(program)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return program


# items, fan, stride, source rows, target rows, bytes of a row, blocks, warps, slots of a warp, pending, seed
COPIES = [
    (37, 1, 1, 16, 64, 32, 2, 4, 7, 3, 1),
    (21, 3, 2654435769, 8, 64, 16, 3, 2, 4, 2, 5),
    (0, 1, 1, 8, 8, 16, 1, 1, 2, 1, 1),
    (5, 8, 2654435769, 4, 64, 16, 2, 4, 2, 1, 3),
    (200, 1, 1, 32, 256, 16, 1, 1, 1, 0, 9),
    (9, 1, 1, 16, 16, 16, 8, 4, 16, 8, 9),
]


def played(runner, words):
    return subprocess.run([str(runner), *map(str, words)], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("words", COPIES, ids=str)
def test_every_row_comes_where_it_belongs(runner, words):
    done = played(runner, words)
    assert done.returncode == 0, done.stderr


def test_the_check_would_notice_a_slot_that_is_reused_too_early(runner):
    assert played(runner, (60, 1, 1, 64, 64, 32, 1, 1, 2, 2, 1)).returncode == 1


# The workbench, with launches that torch plays on the CPU.


@pytest.fixture
def bench(monkeypatch):
    torch = pytest.importorskip("torch")
    pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed (the extra `cuda`)")
    from tktune.families.cuda import ranks_workbench
    from tktune.families.cuda.symmetric import HEADER_BYTES
    from tktune.families.link_probe import launch_cuda

    monkeypatch.setattr(space, "SOURCE_BYTES", 1 << 20)
    monkeypatch.setattr(space, "TARGET_BYTES", 1 << 21)
    monkeypatch.setattr(launch_cuda, "GATED_ROWS", 61)
    monkeypatch.setattr(launch_cuda, "GATED_PIECES", 2003)
    span = HEADER_BYTES + space.SOURCE_BYTES + space.TARGET_BYTES
    memories = [torch.zeros(span // 4, dtype=torch.int32) for _ in range(2)]  # rank r's lies at r * span
    made = launch_cuda.LinkWorkbench.__new__(launch_cuda.LinkWorkbench)
    made.seat = types.SimpleNamespace(rank=1, world=2, policy=types.SimpleNamespace(warmup=1))
    made._device, made._index = torch.device("cpu"), 0
    made._next = made._before = 0
    made._memory = types.SimpleNamespace(
        local=span,
        peer=lambda rank: rank * span,
        addresses=lambda at: (at, span + at),
        tensor=lambda dtype, shape, at: memories[1][at // 4 : at // 4 + shape[0]],
    )
    made._control = types.SimpleNamespace(guard=Guard(1.0), launching=Nothing)
    made._patient, made._sequence = Guard(1.0), torch.zeros(1, dtype=torch.int64)
    facts = types.SimpleNamespace(threads=512)
    made._link = types.SimpleNamespace(facts=facts, smem_bytes=232448, function="copy", meet="meet")
    made.launched = []
    made.spoil = lambda memories: None
    for rank, memory in enumerate(memories):
        memory[HEADER_BYTES // 4 :][: space.SOURCE_BYTES // 4] = made._pattern(rank)

    def copy(arguments, mirrored):
        """What the kernel does, and what the other rank's does, which mirrors it."""
        fields = struct.unpack_from("<QQ", arguments) + struct.unpack_from("<iiiIIIIiii", arguments, 40)
        source, target, _, items, fan, stride, from_mask, to_mask, row_bytes = fields[:9]
        words = row_bytes // 4
        if mirrored:
            source, target = (at - span if at >= span else at + span for at in (source, target))
        rank_from, rank_to = source // span, target // span
        rows = memories[rank_from][(source % span) // 4 :][: (from_mask + 1) * words].view(-1, words)
        into = memories[rank_to][(target % span) // 4 :][: (to_mask + 1) * words].view(-1, words)
        item = torch.arange(items * fan) // fan
        into[(torch.arange(items * fan) * stride) & to_mask] = rows[item & from_mask]

    class Played:
        def __init__(self, function, grid, threads, smem_bytes, arguments, kept=()):
            self.function, self.grid, self.arguments = function, grid, arguments

        def __call__(self, stream):
            made.launched.append((self.function, self.grid))
            if self.function == "copy":
                copy(self.arguments, False)
                copy(self.arguments, True)
                made.spoil(memories)

    for module in (launch_cuda, ranks_workbench):
        monkeypatch.setattr(module, "Launch", Played)
    monkeypatch.setattr(launch_cuda, "current_stream", lambda index: 0)
    monkeypatch.setattr(launch_cuda, "synchronize", lambda stream: None)
    made.target_at = (HEADER_BYTES + space.SOURCE_BYTES) // 4
    return made


class Nothing:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return False


def copying(way, fan=1, row_bytes=4096):
    return Config(way=way, sms=8, fan=fan, row_bytes=row_bytes)


@pytest.mark.parametrize("fan", [1, 4])
@pytest.mark.parametrize("way", WAYS)
def test_a_right_copy_passes_the_gate(bench, way, fan):
    fan = fan if way.startswith("scatter") else 1
    verdict = bench.gate(copying(way, fan, 14336), "uniform", 0, 40)
    assert verdict.passed, verdict
    assert bench.launched == [("meet", 1), ("copy", 8), ("meet", 1)] and int(bench._sequence) == 40


@pytest.mark.parametrize("way", WAYS)
def test_the_gate_notices_a_word_that_is_wrong_and_one_too_many(bench, way):
    def wrong(memories):
        memories[1][bench.target_at] += 1

    def too_many(memories):
        memories[1][-1] = 7

    for spoil in (wrong, too_many):
        bench.spoil = spoil
        verdict = bench.gate(copying(way), "uniform", 0, 1)
        assert not verdict.passed and way in verdict.sentence


def test_a_way_that_needs_a_peer_is_refused_alone(bench):
    from tktune.core.errors import ConstraintRefused

    bench.seat.world = 1
    for way in space.NEEDS_PEER:
        with pytest.raises(ConstraintRefused, match="needs a peer"):
            bench.time(copying(way), "comm", 0, 1, 1)


# The pure half.


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a"])
@pytest.mark.parametrize("world", [1, 2])
def test_every_config_of_the_space_does_whole_work(arch, world):
    problem, device = space.probe_problem(world), device_class(arch)
    feasible = space.FAMILY.space(problem, device).feasible
    ways = {config["way"] for config in feasible}
    assert ways >= {"own", "scatter_own", "gemm"} and ("pull" in ways) == (world > 1)
    for config in feasible:
        if config["way"] in WAYS:
            unit = space.PIECES_AT_ONCE if str(config["way"]).startswith("plain") else space.WARPS
            assert space.items_of(config) % (unit * config.number("sms")) == 0
            assert 0 < space.items_of(config) * config.number("fan") < 2**31
            assert space.row_slots(config.number("row_bytes"), device.smem_optin_bytes)[0] >= 2
            assert 10e6 < space.stored_bytes(config) < 3.5e9


def test_slots_fit_the_shared_memory_of_each_class():
    for arch in ("sm_90a", "sm_120a"):
        device = device_class(arch)
        for row_bytes in space.ROW_BYTES:
            of_warp, pending = space.row_slots(row_bytes, device.smem_optin_bytes)
            used = space.RESERVE_BYTES + space.WARPS * of_warp * row_bytes
            assert used <= device.smem_optin_bytes and pending <= max(0, of_warp - 1)
            assert space.WARPS * of_warp * 8 <= space.RESERVE_BYTES
    assert space.slots_of_block("pull", 8192, device_class("sm_90a")) == 28
    assert space.slots_of_block("plain_pull", 8192, device_class("sm_90a")) == 8
