"""The second launch of a dispatch on GPUs whose SwiGLU is separate: from the GEMM's packed outputs to silu(gate) · up."""

from __future__ import annotations

import struct
from typing import Any

import torch

from tktune.families.cuda.driver import Handle
from tktune.families.cuda.launch import Launch

_ARGUMENTS = struct.Struct("<4Q2i")  # glu_pass_globals (csrc/gemm/glu_pass.cuh)
ARGUMENT_BYTES = _ARGUMENTS.size
_THREADS, _BLOCKS_OF_SM = 256, 8


def glu_pass(
    function: Handle,
    sm_count: int,
    packed: torch.Tensor,
    out: torch.Tensor,
    words: int,
    pull_indices: int,
    kept: tuple[Any, ...] = (),
) -> Launch:
    """From `packed` (rows, 2F) to `out` (rows, F), both bf16, for the rows that hold tokens.

    `words` and `pull_indices` are addresses of a plan's tables on the device: the first word counts the rows in use.
    """
    arguments = _ARGUMENTS.pack(packed.data_ptr(), out.data_ptr(), words, pull_indices, out.shape[1], 0)
    return Launch(function, sm_count * _BLOCKS_OF_SM, _THREADS, 0, arguments, (packed, out, *kept))
