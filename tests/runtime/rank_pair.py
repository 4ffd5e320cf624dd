"""Two rank processes that run one scenario after another, so that torch is imported once. A scenario that fails ends
them, and the next one gets a fresh pair.
"""

from __future__ import annotations

import gc
import itertools
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

WITHIN_S = 60.0
WORLD = 2


class RankPair:
    """`run(scenario, *words)` calls `scenario(rank, *words)` on both ranks of one group of gloo."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, itertools.count()
        self._ranks: list[Any] = []
        self._pipes: list[Connection] = []

    @property
    def living(self) -> bool:
        return bool(self._ranks)

    def run(self, scenario: Any, *words: Any) -> None:
        """Raises `AssertionError` with what a rank said when it failed, or said nothing for `WITHIN_S`."""
        if not self._ranks:
            self._start()
        try:
            for pipe in self._pipes:
                pipe.send((scenario, words))
            said = [pipe.recv() if pipe.poll(WITHIN_S) else "nothing" for pipe in self._pipes]
        except (EOFError, OSError) as error:
            said = [f"a rank died: {error!r}"]
        if any(said):
            self.close()
            raise AssertionError("\n".join(f"rank {rank}: {one}" for rank, one in enumerate(said)))

    def _start(self) -> None:
        context = mp.get_context("spawn")
        meeting = str(self._folder / f"rendezvous-{next(self._count)}")
        for rank in range(WORLD):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs, meeting), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._ranks.append(process)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # ranks that wait for their next scenario leave
        for process in self._ranks:
            process.join(10)
            process.kill()
        self._pipes, self._ranks = [], []


def _serve(rank: int, pipe: Connection, meeting: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD)
    while True:
        try:
            scenario, words = pipe.recv()
        except EOFError:
            break
        failed = True
        try:
            scenario(rank, *words)
            gc.collect()  # a caught error's frames still hold the group, and gloo aborts when it outlives the interpreter
            failed = False
        finally:
            pipe.send(traceback.format_exc() if failed else "")
    dist.destroy_process_group()
