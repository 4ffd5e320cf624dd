"""A rank process for tests of the workbench: takes its seat from the first line, then answers calls line by line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.errors import TktuneError
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.families.base import RankSeat, family


def main() -> None:
    words = json.loads(sys.stdin.readline())
    problem = Problem(**words["problem"])
    seat = RankSeat(
        problem,
        DeviceClass("cpu", "x86-64", words["seats"], 1 << 20, 1 << 25, "shm"),
        Policy(flush_bytes=1 << 20, warmup=1),
        words["rank"],
        words["world"],
        tuple(words["symmetric_fds"]),
        words["control_fd"],
        words["spin_limit_s"],
    )
    bench = family(problem.family).workbench(seat)
    for line in sys.stdin:
        name, *args = json.loads(line)
        args = [Config(arg) if isinstance(arg, dict) else arg for arg in args]
        try:
            if name == "load":
                answer = bench.load(Path(args[0]), *args[1:])
            elif name == "gate":
                verdict = bench.gate(*args)
                answer = [verdict.passed, verdict.worst_error, verdict.tolerance, verdict.sentence]
            elif name == "time":
                answer = bench.time(*args)
            else:
                bench.close()
                answer = sorted(set(sys.modules) & {"torch", "optuna", "sqlalchemy"})
        except TktuneError as error:
            answer = {"error": type(error).__name__, "code": getattr(error, "code", ""), "said": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
