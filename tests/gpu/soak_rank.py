"""A rank of a pair (`dispatch_rank`) that is made late on purpose: on the host and on the device, before it meets the
others and between the meeting and its launch. It judges every row of every launch.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from typing import Any

import torch
from dispatch_rank import Rank, serve

from tktune.core.config import Config
from tktune.families.cuda.driver import current_stream, synchronize
from tktune.families.cuda.launch import Graph, Launch, Work
from tktune.families.dispatch_gemm.launch_cuda import CudaDispatchWorkbench
from tktune.gang.protocol import seat_from_json

CLOCKS_PER_US = 1900  # of torch's sleeping kernel; a delay need not be exact


class LateWorkbench(CudaDispatchWorkbench):
    """Is late at every meeting of ranks: `late` = (host seconds and device µs before it, device µs after it).

    One that does not wait leaves its second meeting out, with which a gate ends: its peer may still read its rows.
    """

    late = (0.0, 0.0, 0.0)
    waits = True

    def _meeting(self) -> Work:  # type: ignore[override]
        meeting, (host_s, before_us, after_us) = super()._meeting(), self.late
        met = 0

        def be_late(stream: int) -> None:
            nonlocal met
            met += 1
            if met == 2 and not self.waits:
                return
            if host_s:
                time.sleep(host_s)
            sleep_on_device(before_us)
            meeting(stream)
            sleep_on_device(after_us)

        return be_late

    def in_time(self) -> Launch:
        return super()._meeting()


def sleep_on_device(microseconds: float) -> None:
    """One thread sleeps on torch's current stream."""
    if microseconds:
        torch.cuda._sleep(int(microseconds * CLOCKS_PER_US))  # type: ignore[no-untyped-call]


class SoakRank(Rank):
    bench: LateWorkbench

    def seat_workbench(self) -> dict[str, Any]:
        self.bench = LateWorkbench(self.seat)
        return {}

    def time(self, config: dict[str, Any], mode: str, iterations: int, sequence: int) -> dict[str, Any]:
        self.bench.late = (0.0, 0.0, 0.0)
        return super().time(config, mode, iterations, sequence)

    def round(
        self,
        late: list[list[float]],
        config: dict[str, Any],
        routing: str,
        seed: int,
        sequence: int,
        waits: bool = True,
    ) -> dict[str, Any]:
        """One launch on poisoned buffers, each rank as late as `late[rank]` says; how many rows were judged."""
        host_s, before_us, after_us = late[self.seat.rank]
        self.bench.late, self.bench.waits = (host_s, before_us, after_us), waits
        verdict = self.gate(config, routing, seed, sequence)
        plan = next(reversed(self.bench._plans.values()))
        return {**verdict, "rows": plan.case.real_rows}

    def replays(
        self,
        config: dict[str, Any],
        routing: str,
        seed: int,
        sequence: int,
        count: int,
        every: int,
        slow: int,
    ) -> dict[str, Any]:
        """One captured launch between two meetings, replayed `count` times; every row is judged after each `every`.

        Rank `slow` begins each of these later than its peer.
        """
        bench, stream = self.bench, current_stream(self.seat.device_index)
        pause = random.Random(self.seat.rank)
        judged, wrong = 0, ""
        with bench._control.launching():
            plan = bench._prepare(routing, seed)
            placed = bench._placed(Config(config), plan)
            bench._count_from(sequence)
            meeting, launches = bench.in_time(), bench._planned(Config(config), plan, ["fused"])

            def work(stream: int) -> None:
                for launch in (meeting, *launches, meeting):
                    launch(stream)

            graph = Graph(work)
            try:
                for done in range(every, count + 1, every):
                    placed.poison()
                    bench._space.out.fill_(math.nan)
                    if self.seat.rank == slow:
                        time.sleep(pause.uniform(0.0, 0.02))
                        sleep_on_device(pause.uniform(0.0, 2000.0))
                    for _ in range(every):
                        graph(stream)
                    synchronize(stream)
                    verdict = bench._judge(plan, placed)
                    judged += 1
                    if not verdict.passed and not wrong:
                        wrong = f"after {done} replays: {verdict.sentence} ({verdict.worst_error:.3g})"
            finally:
                graph.close()
        return {"judged": judged, "wrong": wrong, "rows": plan.case.real_rows}


if __name__ == "__main__":
    serve(SoakRank(seat_from_json(json.loads(sys.argv[1]))))
