"""A rank of a pair (`dispatch_rank`) that also tries flags behind pushed rows, and can be told to push nothing."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

from dispatch_rank import Rank, serve

from tktune.gang.protocol import seat_from_json

ROWS_BYTES, BLOCKS = 48 * 4096, 24  # push_flags.cu


class PushRank(Rank):
    def never_push(self) -> dict[str, Any]:
        """From now on fused launches of this rank compute, and push nothing."""
        from tktune.families.dispatch_gemm import launch_cuda

        launch_cuda.mirror.FUSED = launch_cuda.mirror.COMPUTE | launch_cuda.mirror.GATED
        return {}

    def flags(self, cubins: list[str], rounds: int) -> dict[str, Any]:
        """For each cubin of push_flags.cu, words that were wrong behind a flag on this rank, and µs of a round."""
        import torch

        from tktune.families.control_page import ControlPage
        from tktune.families.cuda.control import Control
        from tktune.families.cuda.dispatch_globals import packed_guard
        from tktune.families.cuda.driver import attach, current_stream, synchronize
        from tktune.families.cuda.launch import Launch
        from tktune.families.cuda.module import Module
        from tktune.families.cuda.symmetric import MemfdExchange, SymmetricMemory

        seat = self.seat
        attach(seat.device_index)
        control = Control(ControlPage(seat.control_fd), seat.rank, seat.spin_limit_s)
        exchange = MemfdExchange(seat.symmetric_fds, seat.rank, 30.0)
        each = ROWS_BYTES + 256
        memory = SymmetricMemory(each * len(cubins), seat.rank, 2, exchange)
        mine, theirs = memory.local, memory.peer(1 - seat.rank)
        stream = current_stream(seat.device_index)
        modules = [Module(Path(cubin).read_bytes(), "push_flags", 1) for cubin in cubins]
        said: dict[str, Any] = {"wrong": [], "us": []}
        for number, module in enumerate(modules):
            words = torch.zeros(3, dtype=torch.int32, device="cuda")
            at = [base + number * each for base in (mine, theirs)]
            arguments = struct.pack("<6Q", *at, *(a + ROWS_BYTES + skip for skip in (0, 64) for a in at))
            arguments += struct.pack("<2Q", words.data_ptr(), words[2:].data_ptr())
            arguments += packed_guard(control.guard) + struct.pack("<i", rounds)
            arguments = arguments.ljust(module.facts.globals_bytes, b"\0")
            facts = module.facts
            launch = Launch(module.function, BLOCKS, facts.threads, facts.smem_bytes, arguments, (memory,))
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            with control.launching():
                synchronize(stream)
                exchange(b"ready")
                begin.record()
                launch(stream)
                end.record()
                synchronize(stream)
            said["wrong"].append(int(words[2]))
            said["us"].append(round(1000 * begin.elapsed_time(end) / rounds, 2))
            exchange(b"done")
        memory.close()
        return said


if __name__ == "__main__":
    serve(PushRank(seat_from_json(json.loads(sys.argv[1]))))
