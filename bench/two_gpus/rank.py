"""One rank of a two-GPU bench: how ranks talk, in which order they time what they are given, and how their process lives
and ends. All ranks do the same in the same order; the driver joins what they found.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tktune.core.device import DeviceClass
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.families.base import RankSeat
from tktune.families.control_page import ControlPage
from tktune.families.cuda.launch import Work
from tktune.families.cuda.symmetric import MemfdExchange
from tktune.gang.rank import die_with

AGREE_S = 90.0  # the other rank may still be checking
PIECE_BYTES = 1000  # what ranks exchange at once

Timed = Callable[[int], list[float]]  # launches → microseconds
Call = Callable[[], Any]


class BenchRank:
    """Subclasses measure one work of the driver's in `work` and add what they find to `found`, each with its number."""

    def __init__(self, words: dict[str, Any], rank: int) -> None:
        self.words, self.rank = words, rank
        self.device = DeviceClass(**words["device"])
        self.page = ControlPage(words["control_fd"])
        self.policy = Policy(**words["policy"])
        self._agree = MemfdExchange(words["talk_fds"], rank, AGREE_S, lambda: self.page.aborted)
        self._doing_fd = words["doing_fds"][rank]
        self._sequence = 1
        self._end = time.monotonic() + words["seconds"]
        self.found: list[dict[str, Any]] = []

    def work(self, work: dict[str, Any]) -> None:
        raise NotImplementedError

    def doing(self, what: str) -> None:
        os.pwrite(self._doing_fd, what.encode()[:200].ljust(200), 0)

    def agreed(self, mine: Any) -> list[Any]:
        """What each rank says, in rank order, however long it is. Raises `GangError` when one does not."""
        text = json.dumps(mine).encode()
        most = max(int(said) for said in self._agree(str(len(text)).encode()))
        pieces = [self._agree(text[at : at + PIECE_BYTES]) for at in range(0, most, PIECE_BYTES)]
        return [json.loads(b"".join(said)) for said in zip(*pieces, strict=True)]

    def in_time(self, what: object) -> bool:
        """Whether there is time to begin `what`; the same on every rank, and said when there is none."""
        if all(self.agreed(time.monotonic() < self._end)):
            return True
        self.say(f"Out of time: {what} is left out.")
        return False

    def numbers(self) -> int:
        """The first of a block of sequence numbers; the same on every rank."""
        self._sequence += 1 << 20
        return self._sequence

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def seat(self, problem: Problem, fds: list[int]) -> RankSeat:
        self.doing(f"took its seat for {problem}")
        return RankSeat(
            problem, self.device, self.policy, self.rank, problem.world, tuple(fds), self.words["control_fd"],
            self.words["spin_limit_s"], self.rank,
        )  # fmt: skip

    def interleave(self, runs: Mapping[str, Timed], where: str) -> dict[str, list[list[float]]]:
        """Every run once a round, in an order that turns each round: launches of each round by name, microseconds."""
        samples: dict[str, list[list[float]]] = {name: [] for name in runs}
        for number in range(self.words["rounds"]):
            names = list(runs)
            shift = number % len(names)
            names = names[shift:] + names[:shift]
            for name in reversed(names) if number % 2 else names:
                self.doing(f"timed {name} of {where}")
                samples[name].append(runs[name](self.words["iterations"]))
        return samples

    def write(self) -> None:
        path = Path(self.words["folder"]) / f"rank{self.rank}.json"
        path.write_text(json.dumps({"found": self.found, "versions": versions()}))


def versions() -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),  # type: ignore[no-untyped-call]
        "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE"),
    }


def launched(calls: list[Call], mode: str) -> Work:
    """Calls that were run before, one after the other; where `mode` is graph as one CUDA graph, collectives too, which
    other threads of theirs must not disturb.
    """
    if mode != "graph":
        return eager(calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()
    return lambda stream: graph.replay()


def eager(calls: list[Call]) -> Work:
    def work(stream: int) -> None:
        for call in calls:
            call()

    return work


def serve(kind: type[BenchRank]) -> None:
    """The life of a rank process: WORDS RANK DRIVER on its command line (`two_gpus.driver.run`)."""
    words, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    die_with(int(sys.argv[3]))
    bench = kind(words, rank)
    bench.doing("met the other ranks")
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{words['folder']}/nccl",
        rank=rank,
        world_size=words["world"],
        timeout=datetime.timedelta(seconds=120),
    )
    dist.barrier(device_ids=[rank])  # the communicator exists from here on
    torch.backends.cuda.matmul.allow_tf32 = False
    code = 1
    try:
        for work in words["works"]:
            bench.work(work)
            torch.cuda.empty_cache()
            bench.write()
        code = 0
    finally:
        if code:
            traceback.print_exc()
            bench.page.abort()  # nobody waits for this rank any more
        bench.write()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # a dead peer must not hold up NCCL's own farewell
