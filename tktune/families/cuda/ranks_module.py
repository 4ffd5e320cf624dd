"""A loaded cubin whose launches meet those of other ranks."""

from __future__ import annotations

from pathlib import Path

from cuda.bindings import driver as cu

from tktune.core.errors import ArtifactError
from tktune.families.cuda.driver import Handle, check
from tktune.families.cuda.module import Module


class RanksModule(Module):
    """The entry of a family's launch, allowed `smem_bytes`, the meeting of ranks and, where there is one, the self-test.

    `world`: the ranks it was built for. A subclass reads its words, then calls `_complete`.
    """

    world: int
    meet: Handle
    self_test: Handle
    smem_bytes: int

    def __init__(self, content: bytes, family: str, sm_count: int) -> None:
        super().__init__(content, family, sm_count)
        self._family = family

    def _complete(self, smem_bytes: int, found: list[int], made: list[int]) -> None:
        """Ask for `smem_bytes`, the device's whole opt-in size, so that every block has an SM of its own.

        `found`, `made`: bytes of the arguments that the artifact takes and that this version makes. Raises
        `ArtifactError`.
        """
        if found != made:
            self.close()
            raise ArtifactError(
                f"The artifact takes launch arguments of {found} bytes, and {made} are made.",
                "Build it with the sources of this version.",
            )
        self.smem_bytes = max(smem_bytes, self.facts.smem_bytes)
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(cu.cuFuncSetAttribute(self.function, attribute, self.smem_bytes))
        self.meet = self._entry("meet")

    def _entry(self, name: str) -> Handle:
        return self.entry(f"tktune_{self._family}_{name}")

    def expect_world(self, world: int, artifact: Path) -> None:
        """Raise `ArtifactError` unless it was built for `world` ranks."""
        if self.world != world:
            raise ArtifactError(
                f"{artifact} was built for {self.world} ranks, and there are {world}.",
                "Build it for this world.",
            )
