"""The launches of a layer on a GPU as far as they can be judged without one: in which order they come, and that the second
kernel reads what the first one and the tables write.
"""

from __future__ import annotations

import struct
import types
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed (the extra `cuda`)")

import itertools

from tktune.core.device import device_class
from tktune.core.errors import WordsError
from tktune.core.problem import Problem
from tktune.families.base import family
from tktune.families.cuda import dispatch_globals as wire
from tktune.families.cuda import push_globals
from tktune.families.cuda.gemm_globals import Guard, View
from tktune.families.dispatch_gemm import fused_launch as first_launch
from tktune.families.dispatch_gemm import glu_cuda
from tktune.families.dispatch_gemm import planner_cuda as schedules
from tktune.families.gemm_combine import fused_launch as second_launch
from tktune.families.gemm_combine import planner_cuda as sums
from tktune.moe import cases_cuda, launches_cuda
from tktune.moe.launches_cuda import LayerLaunches, LayerMemory

CPU = torch.device("cpu")
DEVICE = device_class("sm_90a")
LAYER = Problem("moe_layer", 128, 64, 8, 2, 40, world=2, weight_layout="enk", pad=128)


class Kept:
    """Stands for `Launch`: keeps its words and does nothing."""

    ran: ClassVar[list[str]] = []

    def __init__(
        self, function: str, grid: int, threads: int, smem_bytes: int, arguments: bytes, kept: Any = ()
    ) -> None:
        self.function, self.grid, self.arguments, self.kept = function, grid, arguments, kept

    def __call__(self, stream: int) -> None:
        Kept.ran.append(self.function)

    def address(self, at: int) -> int:
        found: int = struct.unpack_from("<Q", self.arguments, at)[0]
        return found


class Memory:
    """One rank's symmetric memory in ordinary memory; the peer's lies elsewhere."""

    def __init__(self, nbytes: int, rank: int, world: int, exchange: Any) -> None:
        self.bytes = torch.zeros(nbytes, dtype=torch.uint8)
        self.rank, self.world = rank, world

    def addresses(self, offset: int = 0) -> tuple[int, ...]:
        return tuple(
            (self.bytes.data_ptr() if r == self.rank else 1 << 40) + offset for r in range(self.world)
        )

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...], offset: int = 0) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        assert offset % 16 == 0 and offset + size <= len(self.bytes)
        return self.bytes[offset : offset + size].view(dtype).view(shape)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> LayerMemory:
    Kept.ran = []
    for module in (launches_cuda, first_launch, glu_cuda, schedules, sums):
        monkeypatch.setattr(module, "Launch", Kept)
    for module in (first_launch, second_launch):
        monkeypatch.setattr(
            module, "matrix_view", lambda maps, m, box: View(bytes(128), m.data_ptr(), *m.shape[-2:])
        )
    monkeypatch.setattr(launches_cuda, "SymmetricMemory", Memory)
    monkeypatch.setattr(launches_cuda, "plan_entry", lambda module, nbytes, pushes: "schedule")
    monkeypatch.setattr(launches_cuda, "combine_plan_entry", lambda module, problem: "sums")

    def by_torch(self: LayerLaunches, call: Any) -> Any:
        def work(stream: int) -> None:
            Kept.ran.append("torch")
            call()

        return work

    monkeypatch.setattr(LayerLaunches, "_by_torch", by_torch)
    return LayerMemory(LAYER, 1, None, Guard(1.0), CPU)  # type: ignore[arg-type]


def launches_of(memory: LayerMemory) -> LayerLaunches:
    facts = types.SimpleNamespace(cluster=1, threads=384, smem_bytes=205216)
    first = types.SimpleNamespace(
        facts=facts, smem_bytes=232448, function="first", meet="meet", glu_pass="glu"
    )
    second = types.SimpleNamespace(facts=facts, smem_bytes=232448, function="second", meet="meet")
    w13, w2 = cases_cuda.weights_of(LAYER, 1, CPU)
    case = cases_cuda.make_case(LAYER, 1, "uniform", 3, CPU)
    return LayerLaunches(
        memory, (first, second), DEVICE, None, w13, w2, case.ids, case.topk_weights, case.x  # type: ignore[arg-type]
    )  # fmt: skip


def config_of(**changes: Any) -> Any:
    space = family("moe_layer").space(LAYER, DEVICE)
    config = space.canonical(space.default.replace(**changes))
    assert space.is_feasible(config), space.broken(config)
    return config


def ran(works: Any) -> list[str]:
    Kept.ran = []
    for work in works:
        work(0)
    return Kept.ran


def test_a_call_brings_rows_before_tables_and_meets_once_between_the_kernels(memory: LayerMemory) -> None:
    launches = launches_of(memory)
    assert ran(launches.layer(config_of())) == ["torch", "schedule", "sums", "first", "meet", "second"]
    separate = config_of(**{"dispatch.GLU": "separate"})
    assert ran(launches.layer(separate)) == ["torch", "schedule", "sums", "first", "glu", "meet", "second"]
    assert ran(launches.computing(separate)) == ["first", "glu", "second"]
    assert ran(launches.serial(config_of())) == [
        "torch", "schedule", "sums", "first", "first", "meet", "second", "second",
    ]  # fmt: skip
    assert torch.equal(memory.x, launches._x) and memory.x.data_ptr() != launches._x.data_ptr()


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("indexed", [False, True])
def test_the_second_kernel_reads_what_the_first_one_leaves(
    memory: LayerMemory, separate: bool, indexed: bool
) -> None:
    launches = launches_of(memory)
    config = config_of(
        **{
            "dispatch.GLU": "separate" if separate else "fused",
            "dispatch.ACTIVATIONS": "indexed" if indexed else "gathered",
        }
    )
    first, *rest = launches.first(config)
    assert isinstance(first, Kept)
    inner = memory.inner.data_ptr().to_bytes(8, "little")
    packed = memory.packed().data_ptr().to_bytes(8, "little")
    assert (packed if separate else inner) in first.arguments
    assert (inner if separate else packed) not in first.arguments
    rows = memory.everyone if indexed else memory.gathered
    assert first.address(wire.GATHERED) == rows.data_ptr()
    assert first.address(wire.PLAN) == memory.schedule(config).at["words"]
    own = struct.unpack_from("<Q", first.arguments, wire.TOKENS + 16)[0]
    assert own == memory.x.data_ptr(), "rank 1 reads its own rows where they were brought"
    assert len(rest) == separate
    for launch in rest:
        assert isinstance(launch, Kept) and packed in launch.arguments and inner in launch.arguments
    second = launches.second(config)
    assert inner in second.arguments and memory.y.data_ptr().to_bytes(8, "little") in second.arguments
    tables = memory.sums(launches_cuda.part_config(config, "combine"))[1]
    assert tables.at["jobs"].to_bytes(8, "little") in second.arguments
    assert memory.schedule(config).at["pull_tokens"].to_bytes(8, "little") in second.arguments


def test_tables_of_configs_with_other_runs_of_columns_are_others_and_count_on(memory: LayerMemory) -> None:
    launches = launches_of(memory)
    memory.count_from(77)
    one, other = config_of(), config_of(**{"combine.signal_groups": 2, "combine.COL_BLOCK": 64})
    launches.sums(one)
    planner = memory.sums(launches_cuda.part_config(one, "combine"))[0]
    assert planner._state[0] == 77 and memory.planner._state[0] == 77
    launches.sums(other)
    assert memory.sums(launches_cuda.part_config(other, "combine"))[0] is planner
    assert len(memory._tables) == 2
    memory.count_from(1000)
    assert planner._state[0] == 1000 and int(memory.sequence) == 1000


@pytest.mark.parametrize("form", ["gathered", "indexed"])
def test_rows_of_a_layer_may_be_pushed(memory: LayerMemory, form: str) -> None:
    """Both kernels and both plans read tables that have pushes, and the layer's meeting numbers their flags."""
    launches = launches_of(memory)
    config = config_of(**{"dispatch.TRANSPORT": "push", "dispatch.ACTIVATIONS": form})
    pulls = memory.schedule(config_of())
    pushes = memory.schedule(config)
    assert pushes.pushes and not pulls.pushes and memory.schedule(config) is pushes
    assert ran(launches.layer(config)) == ["torch", "schedule", "sums", "first", "meet", "second"]
    (first,) = launches.first(config)
    assert isinstance(first, Kept) and len(first.arguments) == push_globals.globals_bytes(2)
    part = first.arguments[wire.globals_bytes(2) :]
    names = ("push_plan", "push_tokens", "push_blocks", "push_expected", "missing", "gate_sources")
    assert struct.unpack_from("<7Q", part) == (
        *(pushes.at[name] for name in names),
        memory.sequence.data_ptr(),
    )
    sections = struct.unpack_from("<QiiQii", part, push_globals.SECTIONS)
    assert sections[3:] == (memory.everyone.data_ptr(), 80, 128)
    flags = (
        memory.pushing.row_flags.data_ptr() if form == "gathered" else memory.pushing.block_flags.data_ptr()
    )
    assert struct.unpack_from("<Q", part, push_globals.SECTIONS + 40) == (flags,)
    for launch in (launches.schedule(config), launches.sums(config), launches.second(config)):
        assert isinstance(launch, Kept)
        assert pushes.at["pull_tokens"].to_bytes(8, "little") in launch.arguments
        assert pulls.at["pull_tokens"].to_bytes(8, "little") not in launch.arguments
    assert pushes.at["gate_sources"].to_bytes(8, "little") in launches.schedule(config).arguments
    roles = [
        struct.unpack_from("<i", one.arguments, wire.ROLES)[0]
        for one in launches.serial(config)
        if isinstance(one, Kept) and one.function == "first"
    ]
    gated = wire.GATED if form == "indexed" else 0
    assert roles == [wire.COMMUNICATE, wire.COMPUTE | gated]


def test_what_a_layer_cannot_do_is_refused(memory: LayerMemory) -> None:
    launches = launches_of(memory)
    with pytest.raises(WordsError, match="no mode"):
        launches.second(config_of(), "comm")


def test_everything_lies_apart_in_symmetric_memory(memory: LayerMemory) -> None:
    pushing = memory.pushing
    parts = [memory.everyone, memory.rows, memory.staging, pushing.block_flags, pushing.row_flags]
    spans = sorted((p.data_ptr(), p.data_ptr() + p.numel() * p.element_size()) for p in parts)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    layout, base = memory.layout, memory.memory.addresses()[1]
    plans = memory.planner._region[1]
    assert memory.everyone.data_ptr() + memory.everyone.nbytes <= plans
    assert plans + launches_cuda.plan_globals.region_bytes(memory.first) <= base + layout.watermarks
    assert base + layout.bytes <= memory.sums_region[1]
    assert memory.sums_region[1] + launches_cuda.sums_globals.region_bytes(memory.second) <= base + len(
        memory.memory.bytes
    )  # type: ignore[attr-defined]


@pytest.mark.parametrize("routing", ["uniform", "empty:1", "one:7"])
def test_the_check_knows_right_from_wrong(routing: str) -> None:
    case = cases_cuda.make_case(LAYER, 0, routing, 1, CPU)
    guard = torch.full((8, LAYER.hidden), float("nan"), dtype=torch.bfloat16)
    right = torch.cat([case.reference.bfloat16(), guard])
    assert cases_cuda.check_layer(LAYER, case, right).passed
    heaviest = int(case.size.argmax())
    for spoil in ("row", "nan", "swap", "guard"):
        wrong = right.clone()
        if spoil == "row":
            wrong[heaviest] *= 1.1
        elif spoil == "nan":
            wrong[3, 5] = float("nan")
        elif spoil == "swap":
            wrong[[0, 1]] = wrong[[1, 0]]
        else:
            wrong[LAYER.tokens] = 0
        assert not cases_cuda.check_layer(LAYER, case, wrong).passed, spoil
