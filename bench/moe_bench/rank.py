"""One rank of the layer bench: checks every launch against the fp32 reference, then times all of them in interleaved
rounds.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from two_gpus import rank
from two_gpus.rank import Timed, launched, serve

from moe_bench import figures
from moe_bench.figures import FORMS, SERIAL
from moe_bench.serial import Serial
from tktune.core.config import Config
from tktune.core.problem import Problem
from tktune.families.base import family
from tktune.families.cuda.driver import current_stream, synchronize
from tktune.families.cuda.launch import Work
from tktune.moe.bench_cuda import CudaLayerWorkbench
from tktune.moe.cases import layer_tolerance
from tktune.moe.cases_cuda import LayerCase

WARMUP, SEED = 2, 0
SWEPT_LAUNCHES = 5
# Times the layer's own: weights are rounded to bf16 in one form, gate and up in both.
SERIAL_TOLERANCE = 2.0


class BenchRank(rank.BenchRank):
    def __init__(self, words: dict[str, Any], rank: int) -> None:
        super().__init__(words, rank)
        self.policy = dataclasses.replace(self.policy, warmup=WARMUP)

    def work(self, work: dict[str, Any]) -> None:
        """One model and number of tokens."""
        layer = Problem(**work["problem"])
        if not self.in_time(layer):
            return
        begin = time.monotonic()
        bench = CudaLayerWorkbench(self.seat(layer, work["fds"]))
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
            return max(self.agreed(median(samples)))

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
            if all(self.agreed(verdict.passed)):
                config = self.swept(bench, layer, config, case)
        serial = Serial(layer, self.rank, case, *bench._weights)
        self.doing(f"checked the launches of {layer}")
        wrong = self.check(bench, config, layer, case, serial)
        found: dict[str, Any] = {"number": work["number"], "wrong": wrong, "modes": {}}
        found["config"] = dict(config)
        self.found.append(found)
        if any(self.agreed(bool(wrong))):
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
            runs[f"{SERIAL}{form}"] = other(launched([serial.calls[form]], mode))
        return runs


if __name__ == "__main__":
    serve(BenchRank)
