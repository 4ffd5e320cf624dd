"""One rank of the dispatch bench: checks every launch, then times all of them in interleaved rounds."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from two_gpus import rank
from two_gpus.rank import Timed, launched, serve

from dispatch_bench import judged
from dispatch_bench.hand_rank import HandSweep
from dispatch_bench.judged import Rounds
from dispatch_bench.libraries import Libraries, OwnGemm
from tktune.core.config import Config
from tktune.core.problem import Problem
from tktune.families.cuda.driver import current_stream, synchronize
from tktune.families.cuda.launch import Graph, Work
from tktune.families.dispatch_gemm.launch_cuda import CudaDispatchWorkbench
from tktune.families.dispatch_gemm.plan_cuda import Plan
from tktune.search.attribution import SPLIT

WARMUP = 1
SWEPT_AGAIN = 3  # the fastest of the sweep, beside the winner, in the last rounds
SEED = 0


class BenchRank(rank.BenchRank):
    def work(self, work: dict[str, Any]) -> None:
        bench = CudaDispatchWorkbench(self.seat(Problem(**work["cases"][0]["problem"]), work["fds"]))
        try:
            for case in work["cases"]:
                if not self.in_time(case["problem"]):
                    break
                self.case(bench, case)
        finally:
            bench.close()

    def case(self, bench: CudaDispatchWorkbench, case: dict[str, Any]) -> None:
        """One routing, in every launch mode; the sweeps in the first of them."""
        problem = bench.problem = Problem(**case["problem"])
        with self.clock("prepare") as took:
            plan = bench._prepare(problem.routing, SEED)
            libraries = Libraries(problem, bench._weights, plan)
        found: dict[str, Any] = {"number": case["number"], "real_rows": plan.case.real_rows, "modes": {}}
        found |= {"padded_rows": plan.case.rows, "seconds": took}
        self.doing(f"checked the launches of {problem}")
        swept = HandSweep(self, bench, case)
        with self.clock("check", took):
            found["wrong"] = self.check(bench, case, libraries) | swept.check(SEED)
        self.found.append(found)
        wrong = {name for said in self.agreed(sorted(found["wrong"])) for name in said}
        if judged.WINNER in wrong or judged.DEFAULT in wrong:
            self.say(f"{problem}: the winner or the default is WRONG, so nothing is timed. {found['wrong']}")
            return
        for mode in self.words["modes"]:
            bench.seat = dataclasses.replace(
                bench.seat, policy=dataclasses.replace(self.policy, launch_mode=mode, warmup=WARMUP)
            )
            extra: dict[str, Timed] = {}
            if case["hand"] and not found["modes"]:
                with self.clock("sweep", took):
                    found["hand_us"], names = swept.fastest(wrong)
                extra = swept.runs(names)
            with self.clock(mode, took):
                self.mode(bench, case, plan, libraries, wrong, mode, found, extra)
        self.say(f"{problem}: {', '.join(f'{what} {s:.1f} s' for what, s in took.items())}")

    @contextlib.contextmanager
    def clock(self, what: str, took: dict[str, float] | None = None) -> Iterator[dict[str, float]]:
        """Add the seconds that passed to `took`."""
        took, begin = {} if took is None else took, time.monotonic()
        yield took
        took[what] = round(time.monotonic() - begin, 2)

    def mode(
        self,
        bench: CudaDispatchWorkbench,
        case: dict[str, Any],
        plan: Plan,
        libraries: Libraries,
        wrong: set[str],
        mode: str,
        found: dict[str, Any],
        extra: dict[str, Timed],
    ) -> None:
        sweeps = not found["modes"]
        with contextlib.ExitStack() as life:
            runs = self.own_runs(bench, case, sweeps) | extra
            runs |= self.library_runs(bench, case, plan, libraries, mode, life)
            runs = {name: run for name, run in runs.items() if name not in wrong}
            where = f"{bench.problem}, {mode}"
            rounds = self.interleave(runs, where)
            last: dict[str, Rounds] = {}
            if sweeps:
                swept = [name for name in runs if name.startswith(("split ", "hand "))]
                again = (judged.WINNER, judged.AGAIN, *self.fastest(rounds, swept))
                last = self.interleave({name: runs[name] for name in again}, where)
        self.doing(f"checked the winner of {bench.problem} again")
        wrong_after = self.gate(bench, case["winner"], bench.problem.routing, SEED)
        found["modes"][mode] = {"rounds": rounds, "last": last, "wrong_after": wrong_after}

    def fastest(self, rounds: dict[str, Rounds], names: list[str]) -> list[str]:
        """The same names on every rank: by the slowest rank's median."""
        said = self.agreed({name: judged.median_us(rounds[name]) for name in names})
        worst = {name: max(one[name] for one in said) for name in names}
        return sorted(names, key=lambda name: (worst[name], name))[:SWEPT_AGAIN]

    # Our own launches.

    def own_runs(self, bench: CudaDispatchWorkbench, case: dict[str, Any], sweeps: bool) -> dict[str, Timed]:
        winner, default = case["winner"], case["default"]
        runs = {
            judged.WINNER: self.own(bench, winner, "fused"),
            judged.AGAIN: self.own(bench, winner, "fused"),
            judged.DEFAULT: self.own(bench, default, "fused"),
            judged.COMP: self.own(bench, winner, "comp"),
        }
        at = self.config(winner).number(SPLIT)
        for split in case["splits"] if sweeps else [at]:
            if sweeps:
                runs[judged.split_name(split)] = self.own(bench, winner, "fused", self.config(winner, split))
            runs[judged.comm_name(split)] = self.own(bench, winner, "comm", self.config(winner, split))
        return runs

    def own(
        self, bench: CudaDispatchWorkbench, what: dict[str, Any], mode: str, config: Config | None = None
    ) -> Timed:
        chosen = self.config(what) if config is None else config

        def run(launches: int) -> list[float]:
            self.load(bench, what)
            return bench.time(chosen, mode, SEED, launches, self.numbers())

        return run

    def config(self, what: dict[str, Any], split: int | None = None) -> Config:
        config = Config(what["config"])
        return config if split is None else config.replace(**{SPLIT: split})

    def load(self, bench: CudaDispatchWorkbench, what: dict[str, Any]) -> None:
        bench.load(Path(what["artifact"]), what["sha256"], Config(what["part"]))

    # Checks.

    def check(
        self, bench: CudaDispatchWorkbench, case: dict[str, Any], libraries: Libraries
    ) -> dict[str, str]:
        """Every launch once, against the fp32 reference: what is wrong, by name."""
        routing = bench.problem.routing
        found = libraries.check()
        found[judged.WINNER] = self.gate(bench, case["winner"], routing, SEED)
        found[judged.DEFAULT] = self.gate(bench, case["default"], routing, SEED)
        for split in case["splits"]:
            found[judged.split_name(split)] = self.gate(bench, case["winner"], routing, SEED, split)
            found[judged.comm_name(split)] = self.parts(bench, case["winner"], split)
        found[judged.COMP] = found[judged.comm_name(case["splits"][0])]
        bench._prepare(routing, SEED)
        return {name: wrong for name, wrong in found.items() if wrong}

    def gate(
        self,
        bench: CudaDispatchWorkbench,
        what: dict[str, Any],
        routing: str,
        seed: int,
        split: int | None = None,
    ) -> str:
        self.load(bench, what)
        verdict = bench.gate(self.config(what, split), routing, seed, self.numbers())
        return "" if verdict.passed else f"{verdict.sentence} ({verdict.worst_error:.3g})"

    def parts(self, bench: CudaDispatchWorkbench, what: dict[str, Any], split: int) -> str:
        """Communication alone, then compute alone, on buffers full of NaN: together they must give the output."""
        self.load(bench, what)
        config, stream = self.config(what, split), current_stream(self.rank)
        with bench._control.launching():
            plan = bench._prepare(bench.problem.routing, SEED)
            placed = bench._placed(config, plan)
            placed.poison()
            bench._space.out.fill_(math.nan)
            bench._count_from(self.numbers())
            meeting = bench._meeting()
            launches = [bench._launch(config, plan, mode) for mode in ("comm", "comp")]
            for launch in (meeting, *launches, meeting):
                launch(stream)
            synchronize(stream)
            verdict = bench._judge(plan, placed)
        return "" if verdict.passed else f"{verdict.sentence} ({verdict.worst_error:.3g})"

    # What it is compared with.

    def library_runs(
        self,
        bench: CudaDispatchWorkbench,
        case: dict[str, Any],
        plan: Plan,
        libraries: Libraries,
        mode: str,
        life: contextlib.ExitStack,
    ) -> dict[str, Timed]:
        runs = {}
        for name, steps in libraries.steps.items():
            self.doing(f"captured {name} of {bench.problem}")
            runs[name] = self.other(bench, launched(steps, mode))
        if case["gemm"] is not None:
            what = case["gemm"]
            own = OwnGemm(bench, Path(what["artifact"]), what["sha256"], Config(what["config"]))
            work, wrong = own.work(plan.case, mode == "graph")
            if isinstance(work, Graph):
                life.callback(work.close)
            if any(self.agreed(wrong[:300])):
                self.say(f"Our grouped GEMM is WRONG and left out: {wrong or 'on another rank'}")
            else:
                runs["grouped_gemm winner"] = self.other(bench, work)
        return runs

    def other(self, bench: CudaDispatchWorkbench, work: Work) -> Timed:
        """Work that is not ours, through the same stopwatch, flush and meeting."""

        def run(launches: int) -> list[float]:
            bench._count_from(self.numbers())
            synchronize(current_stream(self.rank))
            with bench._control.launching():
                return bench._stopwatch.time(work, launches, WARMUP, bench._meeting())

        return run


if __name__ == "__main__":
    serve(BenchRank)
