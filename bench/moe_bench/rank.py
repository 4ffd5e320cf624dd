"""One rank of the layer bench (`python rank.py WORDS RANK DRIVER`): checks every launch against the fp32 reference, then
times all of them in interleaved rounds. All ranks do the same in the same order; the driver joins what they found.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import struct
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from dispatch_bench.libraries import captured, eager

from moe_bench import figures
from moe_bench.figures import FORMS, SERIAL
from moe_bench.serial import Serial
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.families.base import RankSeat, family
from tktune.families.control_page import ControlPage
from tktune.families.cuda.driver import current_stream, synchronize
from tktune.families.cuda.launch import Work
from tktune.families.cuda.symmetric import MemfdExchange
from tktune.gang.rank import die_with
from tktune.moe.bench_cuda import CudaLayerWorkbench
from tktune.moe.cases import layer_tolerance
from tktune.moe.cases_cuda import LayerCase

WARMUP, SEED = 2, 0
SWEPT_LAUNCHES = 5
AGREE_S = 90.0  # the other rank may still be checking
SERIAL_TOLERANCE = (
    2.0  # times the layer's own: weights rounded to bf16 in one form, gate and up rounded in both
)

Timed = Callable[[int], list[float]]  # launches → microseconds


class BenchRank:
    def __init__(self, words: dict[str, Any], rank: int) -> None:
        self.words, self.rank = words, rank
        self.device = DeviceClass(**words["device"])
        self.page = ControlPage(words["control_fd"])
        self.policy = dataclasses.replace(Policy(**words["policy"]), warmup=WARMUP)
        self._agree = MemfdExchange(words["talk_fds"], rank, AGREE_S, lambda: self.page.aborted)
        self._sequence = 1
        self._end = time.monotonic() + words["seconds"]
        self.found: list[dict[str, Any]] = []

    def doing(self, what: str) -> None:
        os.pwrite(self.words["doing_fds"][self.rank], what.encode()[:200].ljust(200), 0)

    def all_say(self, yes: bool) -> bool:
        return all(said == b"y" for said in self._agree(b"y" if yes else b"n"))

    def numbers(self) -> int:
        """The first of a block of sequence numbers; the same on every rank."""
        self._sequence += 1 << 20
        return self._sequence

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def row(self, work: dict[str, Any]) -> None:
        """One model and number of tokens."""
        layer = Problem(**work["problem"])
        if not self.all_say(time.monotonic() < self._end):
            self.say(f"Out of time: {layer} is left out.")
            return
        begin = time.monotonic()
        self.doing(f"took its seat for {layer}")
        seat = RankSeat(
            layer, self.device, self.policy, self.rank, layer.world, tuple(work["fds"]), self.words["control_fd"],
            self.words["spin_limit_s"], self.rank,
        )  # fmt: skip
        bench = CudaLayerWorkbench(seat)
        try:
            self.measure(bench, layer, work)
        finally:
            bench.close()
        self.say(f"{layer}: {time.monotonic() - begin:.1f} s")

    def swept(self, bench: CudaLayerWorkbench, layer: Problem, config: Config, case: LayerCase) -> Config:
        """`config` with each launch parameter in turn at its best value, by the layer's time on the slowest rank."""
        space = family(layer.family).space(layer, self.device)
        launches = bench.launches(case)

        def us(candidate: Config) -> float:
            works = launches.layer(candidate)
            samples = bench.timed(launches, candidate, works, SWEPT_LAUNCHES, self.numbers())
            return max(
                struct.unpack("<d", said)[0] for said in self._agree(struct.pack("<d", median(samples)))
            )

        times = {config: us(config)}
        for parameter in (p for p in space.parameters if p.kind == "launch"):
            best = min(times, key=lambda one: (times[one], one.digest))
            for value in parameter.values:
                candidate = space.canonical(best.replace(**{parameter.name: value}))
                if candidate not in times and space.is_feasible(candidate):
                    self.doing(f"timed {candidate}")
                    times[candidate] = us(candidate)
        best = min(times, key=lambda one: (times[one], one.digest))
        self.say(
            f"  {len(times)} launches tried: {times[config]:.1f} to {times[best]:.1f} µs with {space.launch_part(best)}"
        )
        return best

    def measure(self, bench: CudaLayerWorkbench, layer: Problem, work: dict[str, Any]) -> None:
        config = Config(work["config"])
        bench.load(Path(work["artifact"]), work["sha256"], Config(work["part"]))
        case = bench.case(layer.routing, SEED)
        if self.words["sweep"]:
            verdict = bench.gate(config, layer.routing, SEED, self.numbers())
            if self.all_say(verdict.passed):
                config = self.swept(bench, layer, config, case)
        serial = Serial(layer, self.rank, case, *bench._weights)
        self.doing(f"checked the launches of {layer}")
        wrong = self.check(bench, config, layer, case, serial)
        found: dict[str, Any] = {"row": work["number"], "wrong": wrong, "modes": {}, "config": dict(config)}
        self.found.append(found)
        if not self.all_say(not wrong):
            self.say(f"{layer}: something is WRONG, so nothing is timed. {wrong}")
            return
        for mode in self.words["modes"]:
            bench.seat = dataclasses.replace(
                bench.seat, policy=dataclasses.replace(self.policy, launch_mode=mode)
            )
            runs = self.runs(bench, config, case, serial, mode)
            found["modes"][mode] = self.interleave(runs, f"{layer}, {mode}")
        verdict = bench.gate(config, layer.routing, SEED + 1, self.numbers())
        if not verdict.passed:
            wrong["layer, after timing"] = verdict.sentence

    def check(
        self, bench: CudaLayerWorkbench, config: Config, layer: Problem, case: LayerCase, serial: Serial
    ) -> dict[str, str]:
        """What is wrong, by name."""
        wrong: dict[str, str] = {}
        for number, routing in enumerate([layer.routing, "hot:0.5@0"]):
            verdict = bench.gate(config, routing, SEED + number, self.numbers())
            self.say(f"  {routing}: error {verdict.worst_error:.2e} of {verdict.tolerance:.2e} allowed")
            if not verdict.passed:
                wrong[f"layer, {routing}"] = verdict.sentence or f"{verdict.worst_error:.3g}"
        for form, call in serial.calls.items():
            call()
            torch.cuda.synchronize()
            error = (serial.result.float() - case.reference).double().square_().sum(1)
            total = float((error.sum() / case.size.sum()).sqrt())
            if not total <= SERIAL_TOLERANCE * layer_tolerance(layer):
                wrong[f"serial, {form}"] = f"it differs by {total:.3g}"
        return wrong

    def runs(
        self, bench: CudaLayerWorkbench, config: Config, case: LayerCase, serial: Serial, mode: str
    ) -> dict[str, Timed]:
        launches = bench.launches(case)
        ours: dict[str, list[Work]] = {
            figures.LAYER: launches.layer(config),
            figures.IN_PLACE: launches.layer(config)[1:],
            figures.GEMM1: launches.first(config, "comp"),
            figures.GEMM2: [launches.second(config, "comp")],
            figures.TABLES: launches.plans(config),
            figures.BARRIERS: [launches.meeting()],
            figures.REDUCE: [launches.reduced()],
        }

        def own(works: list[Work]) -> Timed:
            return lambda count: bench.timed(launches, config, works, count, self.numbers())

        def other(work: Work) -> Timed:
            def run(count: int) -> list[float]:
                bench._memory.count_from(self.numbers())
                synchronize(current_stream(self.rank))
                with bench._control.launching():
                    return bench._stopwatch.time(work, count, WARMUP, launches.meeting(bench._patient))

            return run

        runs = {name: own(works) for name, works in ours.items()}
        for form in FORMS:
            work = captured([serial.calls[form]]) if mode == "graph" else eager([serial.calls[form]])
            runs[f"{SERIAL}{form}"] = other(work)
        return runs

    def interleave(self, runs: dict[str, Timed], where: str) -> dict[str, list[list[float]]]:
        """Every run once a round, in an order that turns each round."""
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
        versions = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
        path.write_text(json.dumps({"found": self.found, "versions": versions}))


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
        for work in words["rows"]:
            bench.row(work)
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
