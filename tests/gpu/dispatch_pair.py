"""Two rank processes side by side that a test commands one by one, and kills; and artifacts for them."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tktune.build.artifact import Artifact
from tktune.build.cache import ArtifactCache
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.device_cuda import cuda_device_classes
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.families.base import RankSeat, family
from tktune.families.control_page import ControlPage
from tktune.gang.protocol import seat_to_json

needs_two = pytest.mark.skipif(
    len(cuda_device_classes()) < 2, reason="fewer than two GPUs answer on this host"
)

# The class that rehearses sm_120a on Hopper devices: mma.sync, 99 KB, 110 SMs.
REHEARSAL = DeviceClass("cuda", "sm_90", 110, 101376, 50331648, "nvlink", remote_atomics=False)


def dispatch_problem(**changes: Any) -> Problem:
    fields = {"hidden": 512, "cols": 768, "experts": 16, "top_k": 4, "tokens": 200, "world": 2}
    return Problem("dispatch_gemm", **{**fields, "weight_layout": "enk", **changes})


def configured(problem: Problem, device: DeviceClass, **changes: Any) -> Config:
    """The default with `changes`; feasible but for splits that no study would try."""
    space = family(problem.family).space(problem, device)
    config = space.default.replace(**changes)
    assert space.broken(config) == [], space.broken(config)
    return config


def build_all(
    cache: ArtifactCache, wanted: list[tuple[Problem, DeviceClass, Config]]
) -> list[tuple[Artifact, Config]]:
    """Artifact and build part of each, built in parallel."""
    bench = family("dispatch_gemm")
    parts = [bench.space(problem, device).build_part(config) for problem, device, config in wanted]
    specs = [bench.build_spec(part, p, d) for part, (p, d, _) in zip(parts, wanted, strict=True)]
    made = []
    for outcome, part in zip(cache.build(specs), parts, strict=True):
        assert outcome.artifact is not None, outcome.error_sentence
        made.append((outcome.artifact, part))
    return made


class Pair:
    """Ranks 0 and 1 of `problem` on devices 0 and 1, each running `script` beside this file; use it as a context."""

    def __init__(
        self,
        problem: Problem,
        device: DeviceClass,
        spin_limit_s: float = 2.0,
        script: str = "dispatch_rank.py",
    ) -> None:
        self.page = ControlPage.create(2)
        self._fds = [os.memfd_create(f"rank-{rank}") for rank in range(2)]
        self.ranks: list[subprocess.Popen[str]] = []
        for rank in range(2):
            seat = RankSeat(
                problem, device, Policy(warmup=0), rank, 2, tuple(self._fds), self.page.fd, spin_limit_s
            )
            command = [sys.executable, str(Path(__file__).with_name(script))]
            self.ranks.append(
                subprocess.Popen(
                    [*command, json.dumps(seat_to_json(seat))],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    pass_fds=(*self._fds, self.page.fd),
                )
            )

    def ask(self, rank: int, do: str, **words: Any) -> None:
        stdin = self.ranks[rank].stdin
        assert stdin is not None
        stdin.write(json.dumps({"do": do, **words}) + "\n")
        stdin.flush()

    def reply(self, rank: int, within_s: float = 60.0) -> dict[str, Any]:
        stdout = self.ranks[rank].stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            assert selector.select(within_s), f"rank {rank} said nothing for {within_s} s"
        said: dict[str, Any] = json.loads(stdout.readline())
        return said

    def both(self, do: str, within_s: float = 60.0, **words: Any) -> list[Any]:
        """The same command to both; raises unless both succeed."""
        for rank in range(2):
            self.ask(rank, do, **words)
        replies = [self.reply(rank, within_s) for rank in range(2)]
        assert all("ok" in reply for reply in replies), replies
        return [reply["ok"] for reply in replies]

    def load(self, artifact: Artifact, part: Config) -> None:
        self.both("load", artifact=str(artifact.path), sha256=artifact.sha256, build_part=dict(part))

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait(20)
        self.page.close()
        for fd in self._fds:
            os.close(fd)
