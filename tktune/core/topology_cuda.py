"""Which GPUs of this host reach each other's memory, and over what: driver attributes and, where it answers, NVML. No
context is made.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tktune.core.device_cuda import Driver, load_driver, pci_bus_id

# CUdevice_P2PAttribute numbers of the driver API.
_P2P_RANK, _P2P_ACCESS, _P2P_NATIVE_ATOMICS = 1, 2, 3
_NVML_P2P_NVLINK, _NVML_P2P_OK = 2, 0  # NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK
_MOST_NVLINKS = 18


@dataclass(frozen=True)
class Pair:
    """What GPU `a` can do with the memory of GPU `b`, both in driver order.

    `rank` is the driver's performance rank (0 is best). `nvlinks`: links of `a` in use when the two are joined by
    NVLink, 0 when they are not, None when NVML does not tell.
    """

    a: int
    b: int
    access: bool
    native_atomics: bool
    rank: int
    nvlinks: int | None = None

    @property
    def over(self) -> str:
        """NVLink with its number of links, PCIe, or host memory. Native atomics are what NVLink gives."""
        if not self.access:
            return "host memory"
        if self.nvlinks:
            return f"NVLink ({self.nvlinks} links)"
        return "NVLink" if self.nvlinks is None and self.native_atomics else "PCIe"


@dataclass(frozen=True)
class Topology:
    """Every ordered pair of GPUs of this host, and the driver's version ("580.65.06", or "CUDA 13.0")."""

    gpus: int
    pairs: tuple[Pair, ...]
    driver: str

    def all_reach(self, gpus: Sequence[int]) -> bool:
        """Whether each of `gpus` can read and write the memory of every other."""
        wanted = set(gpus)
        return all(pair.access for pair in self.pairs if {pair.a, pair.b} <= wanted)


def topology(load: Callable[[], Driver | None] = load_driver, nvml: Any = None) -> Topology | None:
    """The topology of this host; None when there is no driver. `nvml` stands in for pynvml."""
    driver = load()
    if driver is None:
        return None
    count = ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return None
    links = _NvLinks(count.value, load, nvml)
    pairs = tuple(
        Pair(
            a,
            b,
            bool(_p2p(driver, _P2P_ACCESS, a, b)),
            bool(_p2p(driver, _P2P_NATIVE_ATOMICS, a, b)),
            _p2p(driver, _P2P_RANK, a, b),
            links.between(a, b),
        )
        for a in range(count.value)
        for b in range(count.value)
        if a != b
    )
    return Topology(count.value, pairs, links.driver or _cuda_version(driver))


def _p2p(driver: Driver, attribute: int, a: int, b: int) -> int:
    one, other, value = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(one), a)
    driver.cuDeviceGet(ctypes.byref(other), b)
    driver.cuDeviceGetP2PAttribute(ctypes.byref(value), attribute, one, other)
    return value.value


def _cuda_version(driver: Driver) -> str:
    version = ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    return f"CUDA {version.value // 1000}.{version.value % 1000 // 10}"


class _NvLinks:
    """What NVML says; nothing where it is not installed, does not answer, or does not know a GPU."""

    def __init__(self, gpus: int, load: Callable[[], Driver | None], nvml: Any) -> None:
        self.driver = ""
        self._nvml = nvml
        self._handles: list[Any] = []
        if self._nvml is None:
            try:
                import pynvml
            except ImportError:
                return
            self._nvml = pynvml
        addresses = [pci_bus_id(gpu, load) for gpu in range(gpus)]
        try:
            self._nvml.nvmlInit()
            version = self._nvml.nvmlSystemGetDriverVersion()
            self.driver = version.decode() if isinstance(version, bytes) else str(version)
            if None not in addresses:
                self._handles = [self._nvml.nvmlDeviceGetHandleByPciBusId(one) for one in addresses]
        except self._nvml.NVMLError:
            return

    def between(self, a: int, b: int) -> int | None:
        if not self._handles:
            return None
        try:
            one, other = self._handles[a], self._handles[b]
            if self._nvml.nvmlDeviceGetP2PStatus(one, other, _NVML_P2P_NVLINK) != _NVML_P2P_OK:
                return 0
            return sum(self._active(one, link) for link in range(_MOST_NVLINKS))
        except self._nvml.NVMLError:
            return None

    def _active(self, handle: Any, link: int) -> int:
        try:
            return int(bool(self._nvml.nvmlDeviceGetNvLinkState(handle, link)))
        except self._nvml.NVMLError:
            return 0  # this GPU has fewer links
