"""Two rank processes side by side that a test commands one by one, and kills; and artifacts for them."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_places import SHARED, some

from tktune.build.artifact import Artifact
from tktune.build.cache import ArtifactCache
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.device_cuda import gpus_of_ranks
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.families.base import RankSeat, family
from tktune.families.control_page import ControlPage
from tktune.gang.gang import Gang
from tktune.gang.protocol import seat_to_json

# The class that rehearses sm_120a on Hopper devices: mma.sync, 99 KB, 110 SMs.
REHEARSAL = DeviceClass("cuda", "sm_90", 110, 101376, 50331648, "nvlink", remote_atomics=False)


# Shapes beyond the default one, by name, and where their tokens go.
PROBLEMS: dict[str, dict[str, Any]] = {
    "small": {},
    "ragged": {"hidden": 320, "cols": 328, "experts": 6, "top_k": 3, "tokens": 77, "weight_layout": "ekn"},
    "one_expert": {"experts": 4, "top_k": 1, "tokens": 50},  # a rank may get nothing at all
    "long_rows": {"hidden": 7168, "cols": 256, "experts": 64, "top_k": 8, "tokens": 64},
}
ROUTINGS = ("uniform", "empty:0", "hot:0.9@3", "one:3", "zipf:1.2")


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
    parts = [family(p.family).space(p, device).build_part(config) for p, device, config in wanted]
    specs = [family(p.family).build_spec(part, p, d) for part, (p, d, _) in zip(parts, wanted, strict=True)]
    made = []
    for outcome, part in zip(cache.build(specs), parts, strict=True):
        assert outcome.artifact is not None, outcome.error_sentence
        made.append((outcome.artifact, part))
    return made


def gated(
    gang: Gang,
    configs: Sequence[Config],
    built: Sequence[tuple[Artifact, Config]],
    launches: Sequence[Mapping[str, Any]],
    routings: Sequence[str],
) -> None:
    """Every config in every launch under every routing (on a shared GPU: under some), with fresh inputs each, gives the
    reference."""
    seed = 0
    for number, (config, (artifact, part)) in enumerate(zip(configs, built, strict=True)):
        loaded = gang.load(artifact.path, artifact.sha256, part)
        assert loaded.ok and loaded.sentence == "", loaded
        for way, launch in enumerate(launches):
            for routing in some(gang.takes_turns, number + way, routings):
                seed += 1
                outcome = gang.gate(config.replace(**launch), routing, seed)
                assert outcome.ok, f"{dict(config)} {launch} {routing}: {outcome.sentence}"


def gated_for_a_hundred_rounds(
    gang: Gang, config: Config, launches: Sequence[Mapping[str, Any]], routings: Sequence[str]
) -> None:
    for seed in range(100):
        launch = launches[seed % len(launches)]
        outcome = gang.gate(config.replace(**launch), routings[seed % 3], 1000 + seed)
        assert outcome.ok, f"round {seed}: {outcome.sentence}"


def timed_in_every_mode(gang: Gang, config: Config, replays: int) -> None:
    """Then so many launches in a row (few on a shared GPU), and outputs are right afterwards."""
    for mode in ("fused", "comp", "comm", "serial", "peer"):
        outcome = gang.time(config, mode, 0, 10)
        assert outcome.ok, f"{mode}: {outcome.sentence}"
        assert len(outcome.worst_us) == 10 and (gang.takes_turns or 3 < min(outcome.worst_us) < 5000)
        assert outcome.took_turns == (SHARED and gang.world > 1)
    again = gang.time(config, "fused", 0, min(replays, 200) if gang.takes_turns else replays)
    assert again.ok, again.sentence
    assert gang.gate(config, "uniform", 5).ok


def gate_words(config: Mapping[str, Any], sequence: int) -> dict[str, Any]:
    """What a rank is asked for one gate."""
    return {"config": dict(config), "routing": "uniform", "seed": 1, "sequence": sequence}


class Pair:
    """Ranks 0 and 1 of `problem`, each at its GPU, running `script` beside this file; use it as a context."""

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
        for rank, gpu in enumerate(gpus_of_ranks(2, device)):
            seat = RankSeat(
                problem, device, Policy(warmup=0), rank, 2, tuple(self._fds), self.page.fd, spin_limit_s, gpu
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

    def seated(self, artifact: Artifact, part: Config) -> Pair:
        """With a workbench on each rank that has loaded the artifact."""
        self.both("seat_workbench")
        self.load(artifact, part)
        return self

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait(20)
        self.page.close()
        for fd in self._fds:
            os.close(fd)
