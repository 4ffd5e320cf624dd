"""The layout of weights whose columns are gate and up: packed once, so that a kernel finds a gate and its up side by side.

Sixteen packed columns are eight gates and the eight ups of the same output columns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tktune.core.errors import ProblemError
from tktune.core.problem import GLU_COLS, WEIGHT_LAYOUTS

if TYPE_CHECKING:
    import torch


def pack_glu(weights: torch.Tensor, weight_layout: str = "ekn") -> torch.Tensor:
    """Weights [gate | up] in the order that a finish of "swiglu" takes; a new contiguous tensor of the same shape.

    `weights` is (.., K, 2F) for "ekn" and (.., 2F, K) for "enk", the F columns of gate before those of up; any dtype and
    device. Column 16 g + j of the result is gate 8 g + j, column 16 g + 8 + j is up 8 g + j. Raises `ProblemError`
    where 8 does not divide F.

    >>> packed = tktune.pack_glu(torch.cat([gate, up], dim=-1))                    # doctest: +SKIP
    """
    at = _columns(weights, weight_layout)
    return _regrouped(weights, at, (2, weights.shape[at] // (2 * GLU_COLS), GLU_COLS))


def unpack_glu(weights: torch.Tensor, weight_layout: str = "ekn") -> torch.Tensor:
    """[gate | up] again: the inverse of `pack_glu`."""
    at = _columns(weights, weight_layout)
    return _regrouped(weights, at, (weights.shape[at] // (2 * GLU_COLS), 2, GLU_COLS))


def _regrouped(weights: torch.Tensor, at: int, groups: tuple[int, int, int]) -> torch.Tensor:
    """The columns seen as `groups`, with the outer two exchanged."""
    shape = weights.shape
    seen = weights.reshape(*shape[:at], *groups, *shape[at + 1 :])
    return seen.transpose(at, at + 1).reshape(shape).contiguous()


def _columns(weights: torch.Tensor, weight_layout: str) -> int:
    """The dimension of the columns, counted from the front."""
    if weight_layout not in WEIGHT_LAYOUTS:
        raise ProblemError(f"weight_layout = {weight_layout!r} is not known.", "Use 'ekn' or 'enk'.")
    if weights.dim() < 2:
        raise ProblemError(
            f"Weights of shape {tuple(weights.shape)} are no matrices.",
            "Pass (experts, K, 2F) or (experts, 2F, K).",
        )
    at = weights.dim() - (1 if weight_layout == "ekn" else 2)
    if weights.shape[at] % (2 * GLU_COLS):
        raise ProblemError(
            f"Weights of shape {tuple(weights.shape)} have {weights.shape[at]} columns of gate and up ({weight_layout}), "
            f"and {2 * GLU_COLS} does not divide that.",
            "Pass [gate | up] with a multiple of 8 columns each, and their weight_layout.",
        )
    return at
