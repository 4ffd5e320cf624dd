"""Where ranks of GPU tests sit: each at a GPU of its own, or, on a host that has one, all of them at that one in turn.

On one GPU tests of several ranks share it (`tktune.core.sharing`) unless TKTUNE_SHARE_GPU=0; those whose subject is time,
or both ranks running at once, are skipped and say what was not run. Rank programs import this too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from tktune.build.cache import ArtifactCache
from tktune.core.device_cuda import cuda_device_classes
from tktune.core.sharing import VARIABLE

GPUS = len(cuda_device_classes())
SHARED = GPUS == 1 and os.environ.get(VARIABLE, "1") == "1"

One = TypeVar("One")


def needs_gpus(ranks: int) -> pytest.MarkDecorator:
    """For a test of so many ranks, each at a GPU of its own or sharing."""
    may = SHARED or (GPUS > 0 and os.environ.get(VARIABLE) == "1")
    return pytest.mark.skipif(
        ranks > GPUS and not may,
        reason=f"its {ranks} ranks were not run: they need a GPU each, or {VARIABLE}=1 to share",
    )


needs_two = needs_gpus(2)


def needs_a_gpu_each(subject: str) -> pytest.MarkDecorator:
    """For a test whose subject cannot be seen when ranks take turns."""
    return pytest.mark.skipif(GPUS < 2, reason=f"fewer than two GPUs, so this was not run: {subject}")


def few(times: int, in_turn: int) -> int:
    """How often something is repeated: fewer times where each meeting of ranks waits for their turns."""
    return in_turn if SHARED else times


def some(in_turn: bool, number: int, values: Sequence[One]) -> Sequence[One]:
    """All of `values`, or where ranks take turns two of them, others for each `number`: over numbers they all come."""
    if not in_turn:
        return values
    return [values[(number + skip) % len(values)] for skip in (0, len(values) // 2)]


def gpu_of(rank: int) -> int:
    """The GPU of a rank that sets its own."""
    return rank % GPUS


def kept_cache(folder: Path) -> ArtifactCache:
    """Artifacts in `TKTUNE_CACHE_DIR` where it is set, so that another run finds them, else in the test's `folder`."""
    return ArtifactCache(Path(os.environ.get("TKTUNE_CACHE_DIR") or folder))
