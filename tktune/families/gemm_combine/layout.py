"""Where everything lies in a rank's symmetric buffer of gemm_combine, as byte offsets. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from tktune.core.problem import Problem
from tktune.families.formulas import round_up

PAGE = 4096
LEAST_GUARD_ROWS = 128  # behind the last expert's rows, which nobody may write
MOST_GROUPS = 4  # runs of columns that a pad block may be announced in


@dataclass(frozen=True)
class SymmetricLayout:
    """Byte offsets, page-aligned. What comes before `start` belongs to others; `bytes` is the whole.

    - `watermarks`: (world, MOST_GROUPS) uint64, row d written by rank d only; on the CPU one word a rank;
    - `landed`: (world, `landed_stride`) uint64, row d written by rank d only; its last MOST_GROUPS words are for runs of
      columns that have landed whole;
    - `rows`: (`num_rows`, cols) bf16, the expert rows of any routing and guard rows;
    - `staging`: (world, tokens, cols) bf16, plane d written by rank d only.
    """

    watermarks: int
    landed: int
    landed_stride: int
    rows: int
    num_rows: int
    staging: int
    bytes: int

    @classmethod
    def of(cls, problem: Problem, start: int = PAGE, capacity: int | None = None) -> SymmetricLayout:
        """`capacity`: expert rows of this rank's plans, whole pad blocks; that of any routing when not given."""
        row_bytes = 2 * problem.cols
        capacity = problem.capacity_rows if capacity is None else capacity
        num_rows = capacity + max(problem.pad, LEAST_GUARD_ROWS)
        stride = (capacity // problem.pad + 1) * MOST_GROUPS
        watermarks = start
        landed = watermarks + PAGE
        rows = landed + round_up(problem.world * stride * 8, PAGE)
        staging = rows + round_up(num_rows * row_bytes, PAGE)
        end = staging + round_up(problem.world * problem.tokens * row_bytes, PAGE)
        return cls(watermarks, landed, stride, rows, num_rows, staging, end)
