"""Device classes of the GPUs of this host, from driver attributes alone: no context, no torch."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from tktune.core.device import DeviceClass
from tktune.core.rehearsal import serves
from tktune.core.sharing import in_turn, may_share

# CUdevice_attribute and CUdevice_P2PAttribute numbers of the driver API.
_SM_COUNT, _SMEM_OPTIN, _L2_BYTES, _REGISTERS = 16, 97, 38, 82
_MAJOR, _MINOR = 75, 76
_P2P_ACCESS, _P2P_NATIVE_ATOMICS, _P2P_RANK = 2, 3, 1

Driver = Any


def load_driver() -> Driver | None:
    """libcuda, initialised; None when there is no driver or no device answers."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if driver.cuInit(0) == 0 else None


def cuda_device_classes(load: Callable[[], Driver | None] = load_driver) -> list[DeviceClass]:
    """One device class for each GPU, in driver order; [] when there is no driver."""
    driver = load()
    if driver is None:
        return []
    count = ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    return [_device_class(driver, ordinal, count.value) for ordinal in range(count.value)]


def gpus_for(device: DeviceClass) -> list[int]:
    """Ordinals of this host's GPUs on which `device` is measured: those of that class, or that rehearse it."""
    return [ordinal for ordinal, found in enumerate(cuda_device_classes()) if serves(found, device)]


def gpus_of_ranks(world: int, device: DeviceClass) -> tuple[int, ...]:
    """Ordinals of the GPUs at which ranks sit that are told none: each at that of its own number. Where they may share
    (`tktune.core.sharing`) they take turns on those of `device`, or on all there are where none is of it.
    """
    gpus: Sequence[int] = ()
    if device.backend == "cuda" and may_share():
        gpus = gpus_for(device) or range(len(cuda_device_classes()))
    return in_turn(world, gpus or range(world))


def pci_bus_id(ordinal: int, load: Callable[[], Driver | None] = load_driver) -> str | None:
    """The PCI address of GPU `ordinal` in driver order, by which NVML knows it too; None when there is none."""
    driver = load()
    if driver is None:
        return None
    handle = ctypes.c_int()
    buffer = ctypes.create_string_buffer(32)
    if driver.cuDeviceGet(ctypes.byref(handle), ordinal) != 0:
        return None
    if driver.cuDeviceGetPCIBusId(buffer, len(buffer), handle) != 0:
        return None
    return buffer.value.decode()


def _device_class(driver: Driver, ordinal: int, count: int) -> DeviceClass:
    handle = ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(handle), ordinal)
    major, minor = _attribute(driver, handle, _MAJOR), _attribute(driver, handle, _MINOR)
    interconnect, atomics = _interconnect(driver, ordinal, count)
    # Archs from 9.0 on have the arch-specific instructions that the kernels use.
    suffix = "a" if major >= 9 else ""
    return DeviceClass(
        backend="cuda",
        arch=f"sm_{major}{minor}{suffix}",
        sm_count=_attribute(driver, handle, _SM_COUNT),
        smem_optin_bytes=_attribute(driver, handle, _SMEM_OPTIN),
        l2_bytes=_attribute(driver, handle, _L2_BYTES),
        interconnect=interconnect,
        registers_per_sm=_attribute(driver, handle, _REGISTERS),
        remote_atomics=atomics,
        display_name=_name(driver, handle),
    )


def _attribute(driver: Driver, handle: ctypes.c_int, attribute: int) -> int:
    value = ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle)
    return value.value


def _name(driver: Driver, handle: ctypes.c_int) -> str:
    buffer = ctypes.create_string_buffer(96)
    driver.cuDeviceGetName(buffer, len(buffer), handle)
    return buffer.value.decode(errors="replace")


def _interconnect(driver: Driver, ordinal: int, count: int) -> tuple[str, bool]:
    """The link class to the other devices, and whether atomics cross it natively: the weakest pair decides."""
    if count < 2:
        return "none", True
    access = atomics = 1
    handles = []
    for number in (ordinal, *(n for n in range(count) if n != ordinal)):
        handle = ctypes.c_int()
        driver.cuDeviceGet(ctypes.byref(handle), number)
        handles.append(handle)
    for peer in handles[1:]:
        for attribute in (_P2P_ACCESS, _P2P_NATIVE_ATOMICS):
            value = ctypes.c_int()
            driver.cuDeviceGetP2PAttribute(ctypes.byref(value), attribute, handles[0], peer)
            if attribute == _P2P_ACCESS:
                access = min(access, value.value)
            else:
                atomics = min(atomics, value.value)
    if not access:
        return "host", False
    # Native atomics between devices are what NVLink gives and PCIe does not.
    return ("nvlink", True) if atomics else ("pcie", False)
