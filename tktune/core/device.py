"""The device class: what decides whether a measurement of one device speaks for another. Never a marketing name."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from tktune.core.canonical import digest
from tktune.core.errors import DeviceAbsent, WordsError


@dataclass(frozen=True)
class DeviceClass:
    """Backend, arch, SM count, opt-in shared memory, L2 and interconnect of a device.

    On the CPU backend `sm_count` is the number of seats of one rank, `smem_optin_bytes` the bytes one block's
    stage ring may take, `l2_bytes` the last-level cache, and `arch` names the instruction set and the cores
    ("x86-64-v3.2c"). `display_name` is only shown, never compared.
    """

    backend: str
    arch: str
    sm_count: int
    smem_optin_bytes: int
    l2_bytes: int
    interconnect: str
    registers_per_sm: int = 65536
    remote_atomics: bool = True
    display_name: str = field(default="", compare=False)

    @property
    def key(self) -> dict[str, Any]:
        key = dataclasses.asdict(self)
        del key["display_name"]
        return key

    @property
    def digest(self) -> str:
        return digest(self.key)

    def __str__(self) -> str:
        return self.display_name or f"{self.backend} {self.arch}, {self.sm_count} SMs"


PRESETS = {
    "sm_90a": DeviceClass(
        "cuda", "sm_90a", 132, 232448, 62914560, "nvlink", display_name="Hopper, 132 SMs, NVLink"
    ),
    "sm_120a": DeviceClass(
        "cuda",
        "sm_120a",
        110,
        101376,
        50331648,
        "pcie",
        remote_atomics=False,
        display_name="Blackwell, 110 SMs, PCIe",
    ),
}


def device_class(name: str) -> DeviceClass:
    """The device class called `name`: "cpu" (this machine), "cuda" (this host's first GPU), a rehearsal such as
    "sm_120a-rehearsed" (`core.rehearsal`), or a preset such as "sm_90a" for dry runs.

    Raises `WordsError` for an unknown name, `DeviceAbsent` where the host has no GPU, or none that rehearses.
    """
    if name == "cpu":
        from tktune.core.device_cpu import cpu_device_class

        return cpu_device_class()
    if name == "cuda":
        from tktune.core.device_cuda import cuda_device_classes

        found = cuda_device_classes()
        if not found:
            raise DeviceAbsent(
                "No CUDA driver or GPU answers on this host.",
                f"Use --device cpu, or a class for a dry run: {', '.join(PRESETS)}.",
            )
        return found[0]
    from tktune.core.rehearsal import NAMES, rehearsed

    if name in NAMES:
        from tktune.core.device_cuda import cuda_device_classes

        return rehearsed(name, cuda_device_classes())
    try:
        return PRESETS[name]
    except KeyError:
        known = ", ".join(["cpu", "cuda", *PRESETS, *NAMES])
        raise WordsError(f"There is no device class called {name!r}.", f"Use one of: {known}.") from None
