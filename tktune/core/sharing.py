"""Ranks that take turns on one GPU, where a host has fewer GPUs than ranks: to check that results are right, never how fast
they come. Asked for in the environment, so that nobody shares a GPU unawares. Knows no driver.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from tktune.core.device import DeviceClass
from tktune.core.errors import WordsError

VARIABLE = "TKTUNE_SHARE_GPU"


def may_share() -> bool:
    """Whether ranks may share a GPU: `TKTUNE_SHARE_GPU` is 1. Raises `WordsError` when it is neither 1, 0 nor empty."""
    word = os.environ.get(VARIABLE, "")
    if word not in ("", "0", "1"):
        raise WordsError(f"{VARIABLE} is {word!r}.", "Set it to 1 to let ranks share a GPU, or unset it.")
    return word == "1"


def in_turn(world: int, gpus: Sequence[int]) -> tuple[int, ...]:
    """The GPU of each of `world` ranks: rank r takes the (r mod GPUs)-th of `gpus`, of which there is one at least."""
    return tuple(gpus[rank % len(gpus)] for rank in range(world))


def refuse_timing(device: DeviceClass, what: str) -> None:
    """Raise `WordsError` where ranks may share GPUs of `device`; `what` begins the sentence: "A run", "The link"."""
    if device.backend == "cuda" and may_share():
        raise WordsError(
            f"{what} measures how long things take, and with {VARIABLE}=1 ranks wait for their turn on a GPU.",
            f"Unset {VARIABLE} and use a GPU for each rank.",
        )
