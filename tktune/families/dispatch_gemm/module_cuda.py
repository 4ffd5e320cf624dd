"""A loaded dispatch artifact."""

from __future__ import annotations

from tktune.families import glu
from tktune.families.cuda import dispatch_globals as mirror
from tktune.families.cuda import push_globals
from tktune.families.cuda.ranks_module import RanksModule


class DispatchModule(RanksModule):
    """A dispatch artifact: the fused entry, the meeting of ranks and the self-test of their memory.

    `smem_bytes`: what a launch asks for, the device's whole opt-in size, so that row slots are many and every block
    has an SM of its own. `joins`: communicating blocks take up the GEMM when they have run dry. `indexed`: rows are
    fetched once a token, and loaded by index. `pushes`: by the rank that has them.
    """

    def __init__(self, content: bytes, sm_count: int, smem_bytes: int) -> None:
        super().__init__(content, "dispatch_gemm", sm_count)
        words = self._words("tktune_dispatch_gemm_world", 6)
        self.world, joins, *argument_bytes, indexed, pushes = words
        self.joins, self.indexed, self.pushes = bool(joins), bool(indexed), bool(pushes)
        nbytes = (push_globals if pushes else mirror).globals_bytes(self.world)
        made = [nbytes, mirror.meeting_bytes(self.world), mirror.self_test_bytes(self.world)]
        self._complete(smem_bytes, [self.facts.globals_bytes, *argument_bytes], made)
        self.self_test = self._entry("self_test")
        form, _ = self._words("tktune_dispatch_gemm_glu_facts", 2)
        self.glu_pass = self._entry("glu") if form == glu.CODES["separate"] else None
