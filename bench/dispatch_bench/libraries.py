"""What the fused kernel is compared with: library GEMMs on the same rows, our own grouped GEMM, and the serial path of
all-gather, index_select and a library GEMM. Each is checked against the fp32 reference before it is timed.
"""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from two_gpus.rank import Call

from tktune.core.config import Config
from tktune.core.problem import Problem
from tktune.families.bf16 import gemm_tolerance
from tktune.families.cuda.driver import current_stream, synchronize
from tktune.families.cuda.gemm_inputs import GUARD_ROWS, Case, check_output
from tktune.families.cuda.launch import Graph, Work
from tktune.families.cuda.module import Module, verified
from tktune.families.dispatch_gemm.launch_cuda import CudaDispatchWorkbench
from tktune.families.dispatch_gemm.plan_cuda import Plan
from tktune.families.grouped_gemm.launch_cuda import gemm_launch


def deep_gemm() -> Any:
    """The module, or None where it cannot be imported."""
    try:
        return importlib.import_module("deep_gemm")
    except (ImportError, OSError, AssertionError):  # it looks for a compiler when it is imported
        return None


class Libraries:
    """The calls of one plan on one rank, by name. `steps[name]` are run one after the other."""

    def __init__(self, problem: Problem, weights: torch.Tensor, plan: Plan) -> None:
        self.problem, self.case, self.plan = problem, plan.case, plan
        self._weights = weights
        self._matrices = weights if problem.weight_layout == "ekn" else weights.transpose(1, 2)
        case, there = plan.case, weights.device
        slot_token = case.slot_token.to(there)
        self._everyone = torch.empty(
            problem.expert_ranks * problem.tokens, problem.hidden, dtype=torch.bfloat16, device=there
        )
        # With the padding rows, which any row may fill, and without them.
        real = slot_token[case.slots]
        counts = case.walks["index"][:, 2]
        self._rows = {
            "": (slot_token.clamp(min=0), case.offsets),
            ", real rows": (real, counts.cumsum(0).to(torch.int32)),
        }
        self._gathered = {
            name: torch.empty(len(index), problem.hidden, dtype=torch.bfloat16, device=there)
            for name, (index, _) in self._rows.items()
        }
        self.steps: dict[str, list[Call]] = {"all-gather": [self._all_gather]}
        for name in self._rows:
            gather, multiply = self._gather_of(name), self._multiply_of(name)
            self.steps |= {
                f"gather{name}": [gather],
                f"torch._grouped_mm{name}": [multiply],
                f"serial{name}": [self._all_gather, gather, multiply],
            }
        deep = deep_gemm()
        if deep is not None and problem.weight_layout == "enk":
            self.steps["DeepGEMM"] = [self._deep_of(deep)]

    def _all_gather(self) -> Any:
        return dist.all_gather_into_tensor(self._everyone, self.plan.x)

    def _gather_of(self, name: str) -> Call:
        index, out = self._rows[name][0], self._gathered[name]
        return lambda: torch.index_select(self._everyone, 0, index, out=out)

    def _multiply_of(self, name: str) -> Call:
        rows, ends = self._gathered[name], self._rows[name][1]
        return lambda: torch._grouped_mm(rows, self._matrices, offs=ends)

    def _deep_of(self, deep: Any) -> Call:
        rows, case = self._gathered[""], self.case
        slots = torch.arange(case.rows, device=rows.device)
        group = torch.searchsorted(case.offsets.long(), slots, right=True).int()
        out = torch.empty(case.rows, self.problem.cols, dtype=torch.bfloat16, device=rows.device)

        def multiply() -> torch.Tensor:
            deep.m_grouped_bf16_gemm_nt_contiguous(rows, self._weights, out, group)
            return out

        return multiply

    def check(self) -> dict[str, str]:
        """Run every call once, which also loads its kernels; what is wrong, by name (empty texts: right).

        Serial comes first, so that the rows are there for what only multiplies.
        """
        found = {}
        for name in sorted(self.steps, key=lambda name: not name.startswith("serial")):
            for step in self.steps[name]:
                out = step()
            torch.cuda.synchronize()
            if name.startswith(("serial", "torch", "Deep")):
                found[name] = self._wrong(out, padded="real rows" not in name)
        return found

    def _wrong(self, out: torch.Tensor, padded: bool) -> str:
        case = self.case
        if not case.real_rows:
            return ""
        got = (out[case.slots] if padded else out).float()
        by_row = (got - case.reference).norm(dim=1) / case.reference.norm(dim=1)
        tolerance = gemm_tolerance(case.problem.hidden)
        bad = int((~(by_row <= tolerance)).sum())
        return f"{bad} of {case.real_rows} rows differ by more than {tolerance:.3g}" if bad else ""


class OwnGemm:
    """Our grouped GEMM of one artifact on the rows of a plan. Raises what loading an artifact raises."""

    def __init__(self, bench: CudaDispatchWorkbench, artifact: Path, sha256: str, config: Config) -> None:
        self._bench, self._config = bench, config
        self._module = Module(verified(artifact, sha256), "grouped_gemm", bench.seat.device.sm_count)
        self._dispenser = torch.zeros(2, dtype=torch.int32, device=bench._device)

    def work(self, case: Case, graph: bool) -> tuple[Work, str]:
        """The launch, and what is wrong with its output (an empty text: nothing)."""
        bench, problem = self._bench, self._bench.problem
        out = torch.full(
            (case.rows + GUARD_ROWS, problem.cols), math.nan, dtype=torch.bfloat16, device=bench._device
        )
        launch = gemm_launch(
            self._module,
            self._config,
            problem.weight_layout,
            problem.pad,
            bench._maps,
            bench._control.guard,
            bench.seat.device.sm_count,
            case.activations,
            bench._weights,
            out,
            case.walks[str(self._config["walk"])],
            self._dispenser,
        )
        stream = current_stream(bench.seat.device_index)
        with bench._control.launching():
            launch(stream)
            synchronize(stream)
        verdict = check_output(case, out)
        wrong = "" if verdict.passed else verdict.sentence or f"it differs by {verdict.worst_error:.3g}"
        return (Graph(launch) if graph else launch), wrong
