"""Device classes that a device rehearses for another one: the kernels of a class that is not here, tuned on what is.

A rehearsal is a class of its own, so nothing measured in it is ever served, compared or merged as the other's, nor as
the host's. Asked for by name wherever a device class is: `device = "sm_120a-rehearsed"`, `--device sm_120a-rehearsed`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tktune.core.device import PRESETS, DeviceClass
from tktune.core.errors import DeviceAbsent

SUFFIX = "-rehearsed"
# What may be rehearsed, and the arch of the devices that rehearse it: they run the same instructions.
HOSTS = {"sm_120a": "sm_90a"}
NAMES = tuple(f"{preset}{SUFFIX}" for preset in HOSTS)


def rehearsal(host: DeviceClass, preset: str) -> DeviceClass | None:
    """The class under which `host` rehearses `preset`; None where it cannot.

    What limits a kernel is the preset's: instructions (no arch-specific ones of the host), SMs, opt-in shared memory,
    remote atomics. What a device cannot take off stays the host's: L2, memory and link.
    """
    wanted = PRESETS[preset]
    able = (
        host.backend == wanted.backend
        and host.arch == HOSTS.get(preset)
        and host.sm_count >= wanted.sm_count
        and host.smem_optin_bytes >= wanted.smem_optin_bytes
        and host.registers_per_sm >= wanted.registers_per_sm
    )
    if not able:
        return None
    return dataclasses.replace(
        host,
        arch=host.arch.removesuffix("a"),
        sm_count=wanted.sm_count,
        smem_optin_bytes=wanted.smem_optin_bytes,
        registers_per_sm=wanted.registers_per_sm,
        remote_atomics=wanted.remote_atomics and host.remote_atomics,
        display_name=f"{host}, rehearsing {preset}",
    )


def rehearsed(name: str, here: Sequence[DeviceClass]) -> DeviceClass:
    """The class called `name` (one of `NAMES`): of the first device of `here` that rehearses it; of the preset of such
    devices where `here` is empty, for dry runs. Raises `DeviceAbsent` where no device of `here` can.
    """
    preset = name.removesuffix(SUFFIX)
    for host in here or [PRESETS[HOSTS[preset]]]:
        found = rehearsal(host, preset)
        if found is not None:
            return found
    raise DeviceAbsent(
        f"No device of this host rehearses {preset}: that takes one of {HOSTS[preset]} with at least "
        f"{PRESETS[preset].sm_count} SMs, and here is {here[0]}.",
        f"Use --device cuda, or {preset} with --dry-run to see its space.",
    )


def serves(host: DeviceClass, wanted: DeviceClass) -> bool:
    """Whether measurements on `host` are measurements of the class `wanted`: its own, or one that it rehearses."""
    return host == wanted or any(rehearsal(host, preset) == wanted for preset in HOSTS)


def rehearsal_name(device: DeviceClass) -> str | None:
    """The name under which `device` is asked for, if it is a rehearsal."""
    for preset, arch in HOSTS.items():
        wanted = PRESETS[preset]
        limits = (wanted.sm_count, wanted.smem_optin_bytes, wanted.registers_per_sm)
        mine = (device.sm_count, device.smem_optin_bytes, device.registers_per_sm)
        if device.backend == wanted.backend and device.arch == arch.removesuffix("a") and mine == limits:
            return f"{preset}{SUFFIX}"
    return None
