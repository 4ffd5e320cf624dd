"""How long ranks may take for a command, and how many loads a gang serves before it is replaced."""

from __future__ import annotations

from dataclasses import dataclass

from tktune.core.device import DeviceClass

RENEW_AFTER_LOADS = 200
RENEW_AFTER_LOADS_CUDA = 2000  # ranks with a GPU unload what they have not used for long


@dataclass(frozen=True)
class Deadlines:
    """Seconds within which all ranks must have replied to a command.

    A `time` command has `time_s` and `iteration_s` more for each iteration. After the abort word is set, ranks
    have the spin limit and `grace_s` to come back; killed ones must be gone within `kill_s`.
    """

    prepare_s: float = 60.0
    load_s: float = 30.0
    gate_s: float = 60.0
    time_s: float = 30.0
    iteration_s: float = 2.0
    report_s: float = 10.0
    leave_s: float = 30.0
    grace_s: float = 1.0
    kill_s: float = 20.0


def renewal(device: DeviceClass) -> int:
    """Loads after which a gang is replaced by a fresh one, so that nothing that loads leave behind adds up."""
    return RENEW_AFTER_LOADS_CUDA if device.backend == "cuda" else RENEW_AFTER_LOADS
