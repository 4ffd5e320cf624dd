"""Which devices of this host gangs may sit on side by side. Asks the driver for device classes; starts nothing."""

from __future__ import annotations

from tktune.core.device import DeviceClass
from tktune.core.problem import Problem


def seats_of(problem: Problem, device: DeviceClass) -> list[tuple[int, ...]]:
    """Device indices of as many gangs as fit beside each other, each on devices of the class `device`.

    On the CPU backend there is one gang: timed kernels that share cores would spoil each other's numbers. The same
    holds where the host shows no device of that class (a recording, another executor).
    """
    one = [tuple(range(problem.world))]
    if device.backend != "cuda":
        return one
    from tktune.core.device_cuda import gpus_for

    like = gpus_for(device)
    starts = range(0, len(like) - problem.world + 1, problem.world)
    return [tuple(like[start : start + problem.world]) for start in starts] or one
