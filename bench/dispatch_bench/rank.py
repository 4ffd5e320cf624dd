"""One rank of the dispatch bench (`python rank.py WORDS RANK DRIVER`): checks every launch, then times all of them in
interleaved rounds. All ranks do the same in the same order; the driver joins what they found.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dispatch_bench import judged
from dispatch_bench.hand_rank import HandSweep
from dispatch_bench.judged import Rounds
from dispatch_bench.libraries import Libraries, OwnGemm, captured, eager
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.families.base import RankSeat
from tktune.families.control_page import ControlPage
from tktune.families.cuda.driver import current_stream, synchronize
from tktune.families.cuda.launch import Graph, Work
from tktune.families.cuda.symmetric import MemfdExchange
from tktune.families.dispatch_gemm.launch_cuda import CudaDispatchWorkbench
from tktune.families.dispatch_gemm.plan_cuda import Plan
from tktune.gang.rank import die_with
from tktune.search.attribution import SPLIT

WARMUP = 1
SWEPT_AGAIN = 3  # the fastest of the sweep, beside the winner, in the last rounds
AGREE_S = 90.0  # the other rank may still be checking
SEED = 0
PIECE_BYTES = 1000  # what ranks exchange at once

Timed = Callable[[int], list[float]]  # launches → microseconds


class BenchRank:
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

    # Talking.

    def doing(self, what: str) -> None:
        os.pwrite(self._doing_fd, what.encode()[:200].ljust(200), 0)

    def agreed(self, mine: Any) -> list[Any]:
        """What each rank says, in rank order, however long it is. Raises `GangError` when one does not."""
        text = json.dumps(mine).encode()
        most = max(int(said) for said in self._agree(str(len(text)).encode()))
        pieces = [self._agree(text[at : at + PIECE_BYTES]) for at in range(0, most, PIECE_BYTES)]
        return [json.loads(b"".join(said)) for said in zip(*pieces, strict=True)]

    def numbers(self) -> int:
        """The first of a block of sequence numbers; the same on every rank."""
        self._sequence += 1 << 20
        return self._sequence

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    # One shape.

    def shape(self, work: dict[str, Any]) -> None:
        problem = Problem(**work["cases"][0]["problem"])
        self.doing(f"took its seat for {problem}")
        seat = RankSeat(
            problem,
            self.device,
            self.policy,
            self.rank,
            problem.world,
            tuple(work["fds"]),
            self.words["control_fd"],
            self.words["spin_limit_s"],
            self.rank,
        )
        bench = CudaDispatchWorkbench(seat)
        try:
            for case in work["cases"]:
                if not all(self.agreed(time.monotonic() < self._end)):
                    self.say(f"Out of time: {case['problem']} is left out.")
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
        found: dict[str, Any] = {"case": case["number"], "real_rows": plan.case.real_rows, "modes": {}}
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
            rounds = self.interleave(runs, self.words["rounds"], where)
            last: dict[str, Rounds] = {}
            if sweeps:
                swept = [name for name in runs if name.startswith(("split ", "hand "))]
                again = (judged.WINNER, judged.AGAIN, *self.fastest(rounds, swept))
                last = self.interleave({name: runs[name] for name in again}, self.words["rounds"], where)
        self.doing(f"checked the winner of {bench.problem} again")
        wrong_after = self.gate(bench, case["winner"], bench.problem.routing, SEED)
        found["modes"][mode] = {"rounds": rounds, "last": last, "wrong_after": wrong_after}

    def fastest(self, rounds: dict[str, Rounds], names: list[str]) -> list[str]:
        """The same names on every rank: by the slowest rank's median."""
        said = self.agreed({name: judged.median_us(rounds[name]) for name in names})
        worst = {name: max(one[name] for one in said) for name in names}
        return sorted(names, key=lambda name: (worst[name], name))[:SWEPT_AGAIN]

    def interleave(self, runs: dict[str, Timed], rounds: int, where: str) -> dict[str, Rounds]:
        """Every run once a round, in an order that turns each round."""
        samples: dict[str, Rounds] = {name: [] for name in runs}
        for number in range(rounds):
            names = list(runs)
            shift = number % len(names)
            names = names[shift:] + names[:shift]
            for name in reversed(names) if number % 2 else names:
                self.doing(f"timed {name} of {where}")
                samples[name].append(runs[name](self.words["iterations"]))
        return samples

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
            runs[name] = self.other(bench, captured(steps) if mode == "graph" else eager(steps))
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


def main() -> None:
    words, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    die_with(int(sys.argv[3]))
    bench = BenchRank(words, rank)
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
        for work in words["shapes"]:
            bench.shape(work)
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


if __name__ == "__main__":
    main()
