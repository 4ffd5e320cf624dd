"""A loaded combine artifact."""

from __future__ import annotations

from tktune.families.cuda.dispatch_globals import meeting_bytes, self_test_bytes
from tktune.families.cuda.ranks_module import RanksModule
from tktune.families.gemm_combine.globals_cuda import globals_bytes


class CombineModule(RanksModule):
    """A combine artifact: the fused entry, the meeting of ranks and the self-test of their memory.

    `slots_bytes`, `warps`, `piece_vectors`: shared memory of a block's row pieces, its warps that sum, and 16-byte vectors
    of a piece in a lane, at most.
    """

    def __init__(self, content: bytes, sm_count: int, smem_bytes: int) -> None:
        super().__init__(content, "gemm_combine", sm_count)
        words = self._words("tktune_gemm_combine_world", 6)
        self.world, self.slots_bytes, self.warps, self.piece_vectors, *argument_bytes = words
        made = [globals_bytes(self.world), meeting_bytes(self.world), self_test_bytes(self.world)]
        self._complete(smem_bytes, [self.facts.globals_bytes, *argument_bytes], made)
        self.self_test = self._entry("self_test")
