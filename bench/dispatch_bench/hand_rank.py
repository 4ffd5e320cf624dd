"""The sweep that is made by hand, on one rank: every config of it is timed briefly, and the fastest are named, the same on
all ranks.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from dispatch_bench import judged
from tktune.core.config import Config
from tktune.families.dispatch_gemm.launch_cuda import CudaDispatchWorkbench

if TYPE_CHECKING:
    from two_gpus.rank import Timed

    from dispatch_bench.rank import BenchRank

LAUNCHES = 4  # of each config of the sweep
AGAIN = 12  # of them, the fastest: measured with everything else


class HandSweep:
    """The sweep of one case: `case["hand"]` are builds with their launches, numbered through."""

    def __init__(self, rank: BenchRank, bench: CudaDispatchWorkbench, case: dict[str, Any]) -> None:
        self._rank, self._bench, self._routing = rank, bench, case["problem"]["routing"]
        self._of: dict[str, dict[str, Any]] = {}
        for build in case["hand"]:
            for config in build["configs"]:
                what = {key: build[key] for key in ("artifact", "sha256", "part")}
                self._of[judged.hand_name(len(self._of))] = {**what, "config": config}

    def check(self, seed: int) -> dict[str, str]:
        """One launch of each build in each order against the fp32 reference; configs of a form that is wrong, by name."""
        said: dict[tuple[str, Any], str] = {}
        found = {}
        for name, what in self._of.items():
            form = (what["sha256"], what["config"]["order"])
            if form not in said:
                self._rank.doing(f"checked {what['config']}")
                said[form] = self._rank.gate(self._bench, what, self._routing, seed)
            if said[form]:
                found[name] = said[form]
        return found

    def fastest(self, wrong: set[str]) -> tuple[dict[str, float], list[str]]:
        """Microseconds of every config on this rank, and the names of those to be measured again."""
        took = {}
        for name, run in self.runs([name for name in self._of if name not in wrong]).items():
            self._rank.doing(f"swept {self._of[name]['config']}")
            took[name] = round(statistics.median(run(LAUNCHES)), 2)
        worst = [max(one) for one in zip(*self._rank.agreed(list(took.values())), strict=True)]
        ranked = sorted(zip(worst, took, strict=True))
        return took, [name for _, name in ranked[:AGAIN]]

    def runs(self, names: list[str]) -> dict[str, Timed]:
        return {name: self._run(self._of[name]) for name in names}

    def _run(self, what: dict[str, Any]) -> Timed:
        return self._rank.own(self._bench, what, "fused", config=Config(what["config"]))
