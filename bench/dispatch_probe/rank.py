"""One rank of the dispatch probe: gates every variant, times every launch, and the serial path, in one harness. Both
ranks run the same commands in the same order; what they found goes to a file that the probe joins.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import beside
import torch
import torch.distributed as dist
from plan import LAUNCHES, configs_of, form_of, launches_of, problem_of

from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.families.base import RankSeat
from tktune.families.control_page import ControlPage
from tktune.families.dispatch_gemm.launch_cuda import CudaDispatchWorkbench

GATES = [("uniform", 1), ("empty:0", 2), ("hot:0.9@3", 3)]


class Probe:
    def __init__(self, words: dict[str, Any], rank: int) -> None:
        self.words, self.rank = words, rank
        self.page = ControlPage(words["control_fd"])
        self.sequence = 1
        self.end = time.monotonic() + words["seconds"]
        self.found: dict[str, Any] = {}

    def numbers(self) -> int:
        self.sequence += 1 << 20
        return self.sequence

    def all_agree(self, holds: bool) -> bool:
        """Whether it holds on every rank; decisions must be the same everywhere."""
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, holds)
        return all(said)

    def time_left(self) -> bool:
        return self.all_agree(time.monotonic() < self.end)

    def shape(self, place: int, shape: str, device: DeviceClass) -> None:
        words = self.words
        problem = problem_of(shape, words["layout"])
        policy = Policy(launch_mode="graph", flush_bytes=2 * 62914560, warmup=2)
        fds = tuple(words["fds"][place])
        seat = RankSeat(problem, device, policy, self.rank, 2, fds, words["control_fd"], 2.0, self.rank)
        begin = time.monotonic()
        bench = CudaDispatchWorkbench(seat)
        found: dict[str, Any] = {"times": {}, "verdicts": {}}
        self.found[f"{shape} {device.arch}"] = found
        right: dict[str, Config] = {}
        for name, config in configs_of(problem, device, words["set"]).items():
            if f"{name} {device.arch}" not in words["built"]:
                continue
            built = words["built"][f"{name} {device.arch}"]
            part = Config(built["part"])
            bench.load(Path(built["path"]), built["sha256"], part)
            wrong = ""
            for launch, (routing, seed) in self.gates(name, shape, problem):
                verdict = bench.gate(config.replace(**launch), routing, seed, self.numbers())
                if not verdict.passed and not wrong:
                    wrong = f"{launch} {routing}: {verdict.sentence} ({verdict.worst_error:.3g})"
            found["verdicts"][name] = wrong or "right"
            if self.all_agree(not wrong):
                right[name] = config
            elif self.rank == 0 or wrong:
                print(f"WRONG rank {self.rank} {shape} {name}: {wrong or 'on the other rank'}", flush=True)
        self.say(f"{shape} {device.arch}: {len(right)} variants right after {time.monotonic() - begin:.1f} s")
        if words["check_only"] or not right or (words["set"] == "beside" and shape == "small"):
            bench.close()
            return
        if words["set"] == "beside":
            self.compare(bench, right, found, shape)
        else:
            self.sweep(bench, right, found)
        bench.close()
        del bench
        torch.cuda.empty_cache()

    def gates(self, name: str, shape: str, problem: Problem) -> list[tuple[dict[str, Any], tuple[str, int]]]:
        if self.words["set"] == "beside":
            routings = GATES if shape == "small" else GATES[:1]
            return list(itertools.product(beside.gated(name, shape, problem), routings))
        return list(itertools.product(LAUNCHES[form_of(name)][:3], GATES))

    def compare(
        self, bench: CudaDispatchWorkbench, right: dict[str, Config], found: dict[str, Any], shape: str
    ) -> None:
        """Every launch of the set `beside` a few times; then the fastest of each kind in interleaved rounds."""
        times: dict[str, list[float]] = found["times"]

        def run(key: str, name: str, mode: str, words: dict[str, Any], count: int) -> None:
            built = self.words["built"][f"{name} {bench.seat.device.arch}"]
            bench.load(Path(built["path"]), built["sha256"], Config(built["part"]))
            measured = bench.time(right[name].replace(**words), mode, 0, count, self.numbers())
            times.setdefault(key, []).extend(measured)

        iterations = self.words["iterations"]
        some = next(iter(right))
        self.serial(bench, times, iterations)
        run("peer", some, "peer", {}, iterations)
        for name in right:
            run(f"comp|{name}", name, "comp", {}, iterations)
            for mode, launch in beside.parts(name, shape):
                run(f"{mode}|{name}|{_key(launch)}", name, mode, launch, iterations)
        candidates = [(n, w) for n in right for w in beside.launches(n, shape, bench.problem)]
        for name, launch in candidates:
            if not self.time_left():
                self.say("out of time: the sweep is cut short")
                break
            run(f"fused|{name}|{_key(launch)}", name, "fused", launch, iterations)
        ranked = self.by_slowest_rank(times, "fused|", "gathered")
        kinds = {"old": 1, "blocks": 2, "beside": 6}
        finalists = []
        for key in ranked:
            kind = "old" if key.startswith("fused|old") else "beside" if '"beside"' in key else "blocks"
            kinds[kind] -= 1
            if kinds[kind] >= 0:
                finalists.append(key)
        found["finalists"] = finalists
        alone = self.by_slowest_rank(times, "comp|", "gathered")[0]
        ungated = [key for key in times if key.startswith("ungated|")][:1]
        for _ in range(self.words["rounds"]):
            for key in [*finalists, *ungated]:
                mode, name, text = key.split("|")
                run(f"final {key}", name, mode, json.loads(text), 5)
            run(f"final {alone}", alone.split("|")[1], "comp", {}, 5)
            run("final peer", some, "peer", {}, 5)
            self.serial(bench, times, 5, "final ")

    def sweep(self, bench: CudaDispatchWorkbench, right: dict[str, Config], found: dict[str, Any]) -> None:
        times: dict[str, list[float]] = found["times"]
        iterations = self.words["iterations"]

        def run(key: str, name: str, mode: str, config: Config, count: int = iterations) -> None:
            built = self.words["built"][f"{name} {bench.seat.device.arch}"]
            bench.load(Path(built["path"]), built["sha256"], Config(built["part"]))
            times.setdefault(key, []).extend(bench.time(config, mode, 0, count, self.numbers()))

        first = {form_of(name): name for name in reversed(right)}
        any_name = next(iter(right))
        launches = {form: launches_of(form, self.words["splits"]) for form in first}
        self.serial(bench, times, iterations)
        run("peer", any_name, "peer", right[any_name])
        for name, config in right.items():
            run(f"comp|{name}", name, "comp", config)
        for form, name in first.items():
            for launch in launches[form]:
                if "own_first" not in launch:
                    run(f"comm|{form}|{_key(launch)}", name, "comm", right[name].replace(**launch))
        for place in range(max(map(len, launches.values()))):  # forms and tiles interleaved
            if not self.time_left():
                self.say("out of time: the sweep is cut short")
                break
            for name, config in right.items():
                for launch in launches[form_of(name)][place : place + 1]:
                    run(f"fused|{name}|{_key(launch)}", name, "fused", config.replace(**launch))
        for form in first:
            _, name, text = self.by_slowest_rank(times, "fused|", form)[0].split("|")
            for wave in (1, 2, 4, 8):
                launch = {**json.loads(text), "wave": wave}
                run(f"fused|{name}|{_key(launch)}", name, "fused", right[name].replace(**launch))
        # The finalists again, interleaved, so that they share the clocks.
        finalists = [key for form in first for key in self.by_slowest_rank(times, "fused|", form)[:2]]
        alone = [self.by_slowest_rank(times, "comp|", form)[0] for form in first]
        found["finalists"] = finalists
        for _ in range(self.words["rounds"]):
            for key in finalists:
                _, name, text = key.split("|")
                run(f"final {key}", name, "fused", right[name].replace(**json.loads(text)), 5)
            for key in alone:
                name = key.split("|")[1]
                run(f"final {key}", name, "comp", right[name], 5)
            run("final peer", any_name, "peer", right[any_name], 5)
            self.serial(bench, times, 5, "final ")

    def by_slowest_rank(self, times: dict[str, list[float]], prefix: str, form: str) -> list[str]:
        """Keys of this form by the slowest rank's median, fastest first; the same list on every rank."""
        mine = {
            key: statistics.median(samples)
            for key, samples in times.items()
            if key.startswith(prefix) and form_of(key.split("|")[1]) == form
        }
        said: list[Any] = [None, None]
        dist.all_gather_object(said, mine)
        return sorted(said[0], key=lambda k: max(one[k] for one in said))

    def serial(
        self, bench: CudaDispatchWorkbench, times: dict[str, list[float]], count: int, prefix: str = ""
    ) -> None:
        """NCCL all-gather, index_select, torch._grouped_mm: each alone and all in a row, through the same stopwatch."""
        problem = bench.problem
        plan = bench._prepare(problem.routing, 0)
        everyone = torch.empty(2 * problem.tokens, problem.hidden, dtype=torch.bfloat16, device="cuda")
        index = plan.case.slot_token.clamp(min=0).to(everyone.device)
        rows = torch.empty(len(index), problem.hidden, dtype=torch.bfloat16, device="cuda")
        weights = bench._weights
        if problem.weight_layout == "enk":
            weights = weights.transpose(1, 2)
        steps = {
            "all-gather": lambda: dist.all_gather_into_tensor(everyone, plan.x),
            "gather": lambda: torch.index_select(everyone, 0, index, out=rows),
            "GEMM": lambda: torch._grouped_mm(rows, weights, offs=plan.case.offsets),
        }
        for step in steps.values():
            step()
        torch.cuda.synchronize()
        runs: dict[str, list[Any]] = {"serial": list(steps.values())}
        if not prefix:
            runs |= {name: [step] for name, step in steps.items()}
        for name, work in runs.items():

            def run(stream: int, work: list[Any] = work) -> None:
                for step in work:
                    step()

            bench._count_from(self.numbers())
            torch.cuda.synchronize()
            measured = bench._stopwatch.time(run, count, 2, bench._meeting())
            times.setdefault(prefix + name, []).extend(measured)

    def write(self) -> None:
        Path(self.words["out"]).joinpath(f"rank{self.rank}.json").write_text(json.dumps(self.found))

    def say(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)


def _key(launch: dict[str, Any]) -> str:
    return json.dumps(launch, sort_keys=True)


def main() -> None:
    words, rank = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    torch.cuda.set_device(rank)
    timeout = datetime.timedelta(seconds=150)
    dist.init_process_group(
        "nccl", init_method=f"file://{words['store']}", rank=rank, world_size=2, timeout=timeout
    )
    dist.barrier(device_ids=[rank])  # the communicator exists from here on
    torch.backends.cuda.matmul.allow_tf32 = False
    probe = Probe(words, rank)
    code = 0
    try:
        for place, (shape, fields) in enumerate(words["work"]):
            if place and not probe.time_left():
                probe.say(f"out of time: {shape} is left out")
                break
            probe.shape(place, shape, DeviceClass(**fields))
            probe.write()
    except Exception as error:  # noqa: BLE001 - the peer must not wait for a rank that has failed
        print(f"FAILED rank {rank}: {type(error).__name__}: {error}", flush=True)
        probe.page.abort()
        code = 1
    probe.write()
    sys.stdout.flush()
    os._exit(code)  # a dead peer must not hold up NCCL's own farewell


if __name__ == "__main__":
    main()
