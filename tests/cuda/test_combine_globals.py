"""The Python mirror of the combine kernel's arguments, against the compiler and itself; and what a plan on a device means,
computed on the CPU.
"""

from __future__ import annotations

import dataclasses
import math
import struct
import subprocess

import pytest
import torch
from cuda_artifacts import device_words

from tktune.build.toolchain import detect, nvcc_present
from tktune.core.config import Config
from tktune.core.paths import csrc_root
from tktune.core.problem import Problem
from tktune.families.cuda.gemm_globals import GLOBALS_BYTES, GemmGlobals, Guard, View
from tktune.families.gemm_combine import debug_cuda, plan_cuda
from tktune.families.gemm_combine import globals_cuda as mirror
from tktune.families.gemm_combine.globals_cuda import CombineGlobals
from tktune.families.gemm_combine.inputs import combine_tolerance

FIELDS = (
    *("plan", "block_expert", "experts", "jobs", "pull_tokens", "slots", "owners", "topk_weights"),
    *(
        "push_expected",
        "recv_from",
        "final_contrib",
        "y",
        "finished",
        "queue",
        "sequence",
        "roles",
        "num_comp_blocks",
    ),
    *(
        "num_reduce_blocks",
        "form",
        "groups",
        "top_k",
        "tokens",
        "warp_slots",
        "landed_stride",
        "piece_vectors",
    ),
    *("rows", "staging", "watermarks", "landed"),
)
LAYOUT = """
#include "comm/combine.cuh"
#include "gemm/build_config.cuh"
using G = tkt::combine_globals<tkt::build_config, RANKS>;
extern "C" __device__ int32_t globals_layout[] = {{{}, sizeof(G)}};
extern "C" __device__ int32_t constants[] = {{tkt::kCombineQueueWords, tkt::kMostCombineSlots, tkt::kMostCombineTopK}};
""".format(", ".join(f"static_cast<int32_t>(__builtin_offsetof(G, {field}))" for field in FIELDS))


@pytest.mark.skipif(not nvcc_present(), reason="no nvcc on PATH, in CUDA_HOME or among the wheels")
@pytest.mark.parametrize("world", [1, 2, 5, 8])
def test_the_compiler_lays_out_what_the_mirror_packs(tmp_path, world):
    source, cubin = tmp_path / "layout.cu", tmp_path / "layout.cubin"
    source.write_text(LAYOUT)
    nvcc = detect("nvcc", "sm_90a")
    command = [
        str(nvcc.path),
        "-cubin",
        "-std=c++20",
        *nvcc.flags,
        "-I",
        str(csrc_root()),
        f"-DRANKS={world}",
    ]
    done = subprocess.run([*command, str(source), "-o", str(cubin)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *offsets, size = device_words(cubin, "globals_layout")
    at = dict(zip(FIELDS, offsets, strict=True))
    assert size == mirror.globals_bytes(world)
    assert [at[field] for field in FIELDS[:15]] == list(range(mirror.PLAN, mirror.ROLES, 8))
    assert [at[field] for field in FIELDS[15:25]] == list(range(mirror.ROLES, mirror.ROWS, 4))
    assert (at["queue"], at["landed_stride"]) == (mirror.QUEUE, mirror.LANDED_STRIDE)
    rows = mirror.ROWS
    assert [at[field] for field in FIELDS[25:]] == [
        rows,
        rows + 16 * world,
        rows + 32 * world,
        rows + 40 * world,
    ]
    queue_words, slots, top_k = device_words(cubin, "constants")
    assert (queue_words, slots, top_k) == (mirror.QUEUE_WORDS, 8, 32)


def test_each_field_is_packed_where_the_layout_says():
    views = [View(bytes([i] * 128), 0x1000 * i, 10 * i, 64 * i) for i in (1, 2, 3)]
    gemm = GemmGlobals(*views, 0xCC00, 0xDD00, Guard(2.0, rank=1), 32, 4096, 3072, 128)
    numbers = dict(zip(FIELDS[:25], range(1, 26), strict=True))
    packed = CombineGlobals(
        gemm=gemm, **numbers, rows=(0xA0, 0xA1), staging=(0xB0, 0xB1), watermarks=(0xC0, 0xC1), landed=(0xD0, 0xD1),
        capacity=640,
    ).packed()  # fmt: skip
    assert len(packed) == mirror.globals_bytes(2)
    assert packed[:GLOBALS_BYTES] == gemm.packed()
    assert struct.unpack_from("<15Q10i", packed, mirror.PLAN) == tuple(range(1, 26))
    assert struct.unpack_from("<QiiQii", packed, mirror.ROWS) == (0xA0, 640, 3072, 0xA1, 640, 3072)
    tokens = numbers["tokens"]
    staging = struct.unpack_from("<QiiQii", packed, mirror.ROWS + 32)
    assert staging == (0xB0, 2 * tokens, 3072, 0xB1, 2 * tokens, 3072)
    assert struct.unpack_from("<4Q", packed, mirror.ROWS + 64) == (0xC0, 0xC1, 0xD0, 0xD1)


class TestAPlan:
    """On the CPU: the same torch code that runs on a device."""

    problem = Problem("gemm_combine", 64, 96, 8, 3, 30, world=2, pad=16, weight_layout="enk")
    host = torch.device("cpu")

    @pytest.fixture
    def left(self):
        """A plan with what a perfect launch leaves: result, expert rows, partial rows."""
        weights = plan_cuda.draw_weights(self.problem, 1, self.host)
        plan = plan_cuda.make_plan(self.problem, weights, 1, "uniform", 5)
        y = torch.full((38, 96), math.nan, dtype=torch.bfloat16)
        y[:30] = plan.reference.to(torch.bfloat16)
        rows = torch.full((len(plan.activations), 96), math.nan, dtype=torch.bfloat16)
        rows[: plan.rows] = 0
        staging = torch.full((2, 30, 96), math.nan, dtype=torch.bfloat16)
        staging[plan.tables["final_contrib"].T == 1] = 0
        return plan, y, rows, staging

    def check(self, left, pulls=False):
        plan, y, rows, staging = left
        return plan_cuda.check_combined(self.problem, plan, y, rows, staging, pulls)

    def test_the_reference_is_the_weighted_sum_of_packed_rows(self, left):
        """Through the tables, which the reference does not use: rows in slots times weights, over both ranks."""
        plan = left[0]
        total = torch.zeros_like(plan.reference)
        for owner in range(2):
            weights = plan_cuda.draw_weights(self.problem, owner, self.host)
            theirs = plan_cuda.make_plan(self.problem, weights, owner, "uniform", 5)
            for slot in torch.nonzero(~theirs.padding).flatten().tolist():
                source, token = theirs.schedule.pull_indices[slot].tolist()
                if source != 1:
                    continue
                x = theirs.schedule.slots[1, token].tolist().index(slot)
                expert = int(theirs.schedule.block_expert[slot // self.problem.pad])
                row = theirs.activations[slot].float() @ weights[expert].T.float()
                total[token] += plan.topk_weights[1, token, x] * row
        torch.testing.assert_close(total, plan.reference, rtol=1e-4, atol=1e-4)
        assert bool(torch.isnan(plan.activations[plan.padding]).all())
        assert plan.experts.tolist() == torch.stack([plan.schedule.base, plan.schedule.counts], 1).tolist()

    def test_a_right_result_passes_and_wrong_ones_are_named(self, left):
        plan, y, rows, staging = left
        verdict = self.check(left)
        assert verdict.passed and 0 < verdict.worst_error < verdict.tolerance == combine_tolerance(64)
        assert not self.check(left, pulls=True).passed  # a pull writes no partial row
        for change, said in (
            ((y, (3, 0), math.nan), "1 of 30 tokens differ: token 3 by nan"),
            ((y, (4, slice(0, 48)), 9.0), "token 4 by"),
            ((y, (30, 0), 0.0), "behind the last token"),
            ((rows, (plan.rows, 0), 0.0), "behind the last expert"),
        ):
            buffer, at, value = change
            kept = buffer[at].clone()
            buffer[at] = value
            verdict = self.check(left)
            assert not verdict.passed and said in verdict.sentence
            buffer[at] = kept
        unowed = torch.nonzero(plan.tables["final_contrib"].T == 0)
        staging[tuple(unowed[0])] = 0
        assert "owed by nobody" in self.check(left).sentence

    def test_tables_of_a_config_are_kept_and_tell_their_length(self, left):
        plan = left[0]
        config = Config(form="pull", order="ready", signal_groups=2, walk="experts", COL_BLOCK=48)
        found = plan.tables_of(config, self.problem)
        jobs, words = plan.kept[0], plan.kept[1]
        assert words.tolist() == [plan.blocks, 60] and sorted(jobs.tolist()) == list(range(60))
        assert plan.tables_of(config, self.problem) is found and len(plan.kept) == 3
        pushes = plan.tables_of(config.replace(form="prereduce", signal_groups=1), self.problem)
        assert plan.kept[4].tolist() == [plan.blocks, len(plan.schedule.pull_tokens)]
        assert pushes.slots == plan.tables["pull_slots"].data_ptr() != found.slots

    def test_a_walk_over_columns_names_each_run_of_every_expert(self, left):
        config = Config(form="pull", order="ready", signal_groups=2, walk="columns", COL_BLOCK=16)
        entries = left[0].walk_of(config, self.problem)
        once = left[0].walk_of(config.replace(walk="experts"), self.problem)
        assert entries[:4, :3].tolist() == entries[4:, :3].tolist() == once[:, :3].tolist()
        assert entries[:4, 3].tolist() == [3] * 4 and entries[4:, 3].tolist() == [3 << 16 | 3] * 4
        assert once[:, 3].tolist() == [0] * 4

    def test_a_debug_run_names_the_first_buffer_that_is_wrong(self, left, monkeypatch):
        plan, y, rows, staging = left
        problem, everyones = self.problem, []
        for rank in range(2):
            weights = plan_cuda.draw_weights(problem, rank, self.host)
            theirs = plan_cuda.make_plan(problem, weights, rank, "uniform", 5)
            blocks = theirs.schedule.block_expert.repeat_interleave(problem.pad)
            for slot in torch.nonzero(~theirs.padding).flatten().tolist():
                product = theirs.activations[slot].float() @ weights[int(blocks[slot])].T.float()
                everyones.append((rank, slot, product.bfloat16()))
                if rank == 1:
                    rows[slot] = product.bfloat16()
        products = {(rank, slot): row.float() for rank, slot, row in everyones}
        own = plan.combine
        for token in range(30):
            for owner in range(2):
                held = [x for x in range(3) if own.owners[token, x] == owner]
                if held:
                    terms = [
                        plan.topk_weights[1, token, x] * products[owner, int(own.owner_slots[token, x])]
                        for x in held
                    ]
                    staging[owner, token] = sum(terms).bfloat16()
        owed = plan.tables["final_contrib"].T == 1
        y[:30] = torch.where(owed[..., None], staging.float(), 0.0).sum(0).bfloat16()
        weights = plan_cuda.draw_weights(problem, 1, self.host)

        def said(pulls=False):
            return debug_cuda.first_wrong_buffer(problem, plan, weights, 1, y, rows, staging, pulls)

        assert said() == "" and self.check(left).passed
        for buffer, at, words in (
            (y, (7, 3), "result of token 7"),
            (staging, tuple(torch.nonzero(owed)[0].tolist()), "partial row of token"),
            (rows, (int(torch.nonzero(~plan.padding)[4]), 5), "Expert row"),
        ):
            buffer[at] += 3
            assert words in said()
        assert "Expert row" in said(pulls=True)
        assert not debug_cuda.asked()
        monkeypatch.setenv("TKTUNE_DEBUG", "buffers")
        assert debug_cuda.asked()

    def test_inputs_depend_on_the_seed_alone(self, left):
        plan = left[0]
        weights = plan_cuda.draw_weights(self.problem, 1, self.host)
        again = plan_cuda.make_plan(self.problem, weights, 1, "uniform", 5)
        other = plan_cuda.make_plan(self.problem, weights, 1, "uniform", 6)
        assert torch.equal(again.reference, plan.reference) and not torch.equal(
            other.reference, plan.reference
        )
        assert 0.05 < (plan.topk_weights == 0).float().mean() < 0.25
        assert dataclasses.replace(plan).bytes > 0
