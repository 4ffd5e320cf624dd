"""A loaded cubin: its entry, what it states of itself, and how many of its blocks the device seats at once."""

from __future__ import annotations

import ctypes
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from cuda.bindings import driver as cu

from tktune.core.errors import ArtifactError, DeviceError
from tktune.families.cuda.driver import Handle, check

MOST_MODULES = 128  # that a rank keeps loaded


@dataclass(frozen=True)
class ModuleFacts:
    """The int32 words of the symbol `tktune_<family>_facts`, in their order in the kernel file."""

    smem_bytes: int
    threads: int
    globals_bytes: int
    cluster: int


def verified(artifact: Path, sha256: str) -> bytes:
    """The bytes of an artifact, read once, that have the recorded SHA-256. Raises `ArtifactError`."""
    try:
        content = artifact.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{artifact} cannot be read: {error.strerror}.", "Build it again.") from error
    found = hashlib.sha256(content).hexdigest()
    if found != sha256:
        raise ArtifactError(
            f"{artifact} is not what was built: its SHA-256 is {found}, recorded is {sha256}.",
            "Run `tktune cache verify`, then build it again.",
        )
    return content


class Module:
    """One artifact in the current context, loaded whole, with its shared-memory limit raised.

    `resident_blocks`: blocks that all SMs together seat at once, whole clusters. Close it only when no graph that
    launches it lives.
    """

    def __init__(self, content: bytes, family: str, sm_count: int) -> None:
        self._handle: Handle | None = None
        entry = f"tktune_{family}"
        try:
            self._handle = check(cu.cuModuleLoadData(content))
            self.function: Handle = check(cu.cuModuleGetFunction(self._handle, entry.encode()))
            self.facts = ModuleFacts(*self._words(f"{entry}_facts", 4))
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(cu.cuFuncSetAttribute(self.function, attribute, self.facts.smem_bytes))
        except DeviceError as error:
            self.close()
            raise ArtifactError(
                f"The artifact is no {family} kernel that this device loads. {error.sentence}",
                "Build it again.",
            ) from error
        self.resident_blocks = self._resident(sm_count)

    def entry(self, name: str, smem_bytes: int = 0) -> Handle:
        """Another kernel of the artifact, allowed `smem_bytes` of dynamic shared memory. Raises `DeviceError`."""
        found: Handle = check(cu.cuModuleGetFunction(self._handle, name.encode()))
        if smem_bytes:
            attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(cu.cuFuncSetAttribute(found, attribute, smem_bytes))
        return found

    def words(self, symbol: str, count: int) -> list[int]:
        """`count` int32 words of a device symbol. Raises `DeviceError`, `ArtifactError`."""
        return self._words(symbol, count)

    def _words(self, symbol: str, count: int) -> list[int]:
        address, nbytes = check(cu.cuModuleGetGlobal(self._handle, symbol.encode()))
        if nbytes != 4 * count:
            raise ArtifactError(f"{symbol} has {nbytes} bytes, {4 * count} are expected.", "Build it again.")
        words = (ctypes.c_int32 * count)()
        check(cu.cuMemcpyDtoH(ctypes.addressof(words), address, nbytes))
        return list(words)

    def _resident(self, sm_count: int) -> int:
        facts = self.facts
        if facts.cluster == 1:
            occupancy = cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                self.function, facts.threads, facts.smem_bytes
            )
            return sm_count * int(check(occupancy))
        # Fewer than the SMs hold where a processing cluster has an odd number of them.
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = sm_count // facts.cluster * facts.cluster, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = facts.threads, 1, 1
        config.sharedMemBytes = facts.smem_bytes
        return facts.cluster * int(check(cu.cuOccupancyMaxActiveClusters(self.function, config)))

    def close(self) -> None:
        if self._handle is not None:
            cu.cuModuleUnload(self._handle)
            self._handle = None


Loaded = TypeVar("Loaded", bound=Module)


class Modules(Generic[Loaded]):
    """Artifacts that stay loaded, by their SHA-256: those used last, `most` of them; the others are unloaded."""

    def __init__(self, most: int = MOST_MODULES) -> None:
        self._most = most
        self._loaded: OrderedDict[str, Loaded] = OrderedDict()

    def get(self, sha256: str, load: Callable[[], Loaded]) -> Loaded:
        """The module of this SHA-256; `load` makes it where it is not there. No graph may live that launches another one."""
        module = self._loaded.pop(sha256, None) or load()
        self._loaded[sha256] = module
        while len(self._loaded) > self._most:
            self._loaded.popitem(last=False)[1].close()
        return module

    def close(self) -> None:
        """Unload all of them. After a fault the context is gone, and they with it."""
        while self._loaded:
            self._loaded.popitem()[1].close()
