"""One rank of a pair that a test drives (`python dispatch_rank.py SEAT_JSON`): commands are lines of JSON on stdin, each
is answered by one line on stdout. A rank does what it is told and judges nothing.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

from tktune.core.config import Config
from tktune.core.errors import LaunchFailed
from tktune.families.base import RankSeat
from tktune.gang.protocol import seat_from_json

ROWS, COLS = 128, 256
MATRIX_BYTES = ROWS * COLS * 2


class Rank:
    def __init__(self, seat: RankSeat) -> None:
        self.seat = seat
        self.bench: Any = None

    def seat_workbench(self) -> dict[str, Any]:
        from tktune.families.dispatch_gemm.launch_cuda import CudaDispatchWorkbench

        self.bench = CudaDispatchWorkbench(self.seat)
        return {}

    def load(self, artifact: str, sha256: str, build_part: dict[str, Any]) -> dict[str, Any]:
        return dict(self.bench.load(Path(artifact), sha256, Config(build_part)))

    def gate(self, config: dict[str, Any], routing: str, seed: int, sequence: int) -> dict[str, Any]:
        verdict = self.bench.gate(Config(config), routing, seed, sequence)
        return {"passed": verdict.passed, "error": verdict.worst_error, "sentence": verdict.sentence}

    def time(self, config: dict[str, Any], mode: str, iterations: int, sequence: int) -> dict[str, Any]:
        return {"us": self.bench.time(Config(config), mode, 0, iterations, sequence)}

    def withhold(self, rows: int) -> dict[str, Any]:
        """From now on the first pad block lacks `rows` rows that nobody will bring."""
        from tktune.families.dispatch_gemm.plan_cuda import Workspace

        seeded = Workspace.seed

        def seed(space: Any, slack: Any) -> None:
            seeded(space, slack)
            space.arrivals[:1] -= rows

        Workspace.seed = seed  # type: ignore[method-assign]
        return {}

    def p2p(self, cubin: str) -> dict[str, Any]:
        """Which of the four ways through the peer's memory gave wrong elements: name → count."""
        import torch

        from tktune.families.control_page import ControlPage
        from tktune.families.cuda.control import Control
        from tktune.families.cuda.dispatch_globals import packed_guard
        from tktune.families.cuda.driver import attach, current_stream, synchronize
        from tktune.families.cuda.gemm_globals import View
        from tktune.families.cuda.launch import Launch
        from tktune.families.cuda.module import Module
        from tktune.families.cuda.symmetric import HEADER_BYTES, MemfdExchange, SymmetricMemory
        from tktune.families.cuda.tensor_map import MapKey, TensorMaps

        seat = self.seat
        attach(seat.device_index)
        control = Control(ControlPage(seat.control_fd), seat.rank, seat.spin_limit_s)
        exchange = MemfdExchange(seat.symmetric_fds, seat.rank, 30.0)
        memory = SymmetricMemory(HEADER_BYTES + 5 * MATRIX_BYTES, seat.rank, seat.world, exchange)
        places = {
            name: HEADER_BYTES + i * MATRIX_BYTES
            for i, name in enumerate(("own", "brought", "pushed", "bulk_brought", "bulk_pushed"))
        }
        tensors = {n: memory.tensor(torch.bfloat16, (ROWS, COLS), at) for n, at in places.items()}

        def source(rank: int) -> Any:
            stream = torch.Generator().manual_seed(rank)
            return torch.randn(ROWS, COLS, generator=stream).bfloat16().to(f"cuda:{seat.device_index}")

        tensors["own"].copy_(source(seat.rank))
        torch.cuda.synchronize()
        exchange(b"ready")
        peer = (seat.rank + 1) % seat.world
        maps = TensorMaps()

        def view(base: int, name: str) -> bytes:
            at = base + places[name]
            return View(maps.get(MapKey(at, ROWS, COLS, 64)), at, ROWS, COLS).packed()

        mine, theirs = memory.local, memory.peer(peer)
        arguments = view(mine, "own") + view(theirs, "own") + view(mine, "brought") + view(theirs, "pushed")
        arguments += struct.pack("<QQ", mine + places["bulk_brought"], theirs + places["bulk_pushed"])
        arguments += packed_guard(control.guard)
        module = Module(Path(cubin).read_bytes(), "dispatch_p2p", 1)
        arguments = arguments.ljust(module.facts.globals_bytes, b"\0")
        launch = Launch(module.function, 1, 32, module.facts.smem_bytes, arguments, (memory,))
        with control.launching():
            launch(current_stream(seat.device_index))
            synchronize(current_stream(seat.device_index))
        exchange(b"done")  # the peer has pushed
        wanted = source(peer)
        wrong = {n: int((tensors[n] != wanted).sum()) for n in places if n != "own"}
        memory.close()
        return {"wrong": wrong}


def serve(rank: Rank) -> None:
    """Answer commands until end of file."""
    for line in sys.stdin:
        words = json.loads(line)
        try:
            reply = {"ok": getattr(rank, words.pop("do"))(**words)}
        except LaunchFailed as error:
            reply = {"failed": error.code, "sentence": str(error)}
        except Exception as error:  # noqa: BLE001 - the test reads what went wrong
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    serve(Rank(seat_from_json(json.loads(sys.argv[1]))))
