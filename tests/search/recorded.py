"""Recordings made of a formula, small and large, for tests that replay them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

from fakes import BUILD, CPU, DEFAULT, LAUNCH, PROBLEM, true_us

from tktune.core import status
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.policy import Policy
from tktune.core.space import Parameter
from tktune.search.recording import RecordedBuild, RecordedTrial, Recording, SampleSummary

POLICY = Policy(first_iterations=3, iterations=15)
FAILED = Config(TILE=16, STAGES=1)  # this build did not compile
WRONG = Config(TILE=128, STAGES=3, num_comm_sms=3, order="slot")

# Two build parameters more than the fakes have: 288 builds, 2592 configs.
LARGE_BUILD = {
    "TILE": (16, 32, 64, 128),
    "STAGES": (1, 2, 3, 4),
    "WARPS": (1, 2, 4),
    "DEPTH": (16, 32, 64, 96, 128, 256),
}
LARGE_LAUNCH = {"num_comm_sms": (1, 2, 3), "order": ("slot", "token", "both")}
LARGE_DEFAULT = Config(TILE=32, STAGES=2, WARPS=1, DEPTH=32, num_comm_sms=1, order="slot")


def large_us(config: Config) -> float:
    """Bowls that lean on each other, and a word that matters; the bottom is at about 100 µs."""
    tile, depth = config.number("TILE"), config.number("DEPTH")
    us = 100.0 * (1 + 0.3 * abs(tile - 64) / 64) * (1 + 0.05 * abs(config.number("STAGES") - 3))
    us *= (
        1
        + 0.1 * abs(config.number("WARPS") - (2 if tile <= 64 else 4))
        + 0.2 * abs(depth * tile - 4096) / 8192
    )
    us *= 1 + 0.08 * abs(config.number("num_comm_sms") - (2 if depth > 32 else 3))
    return us * {"slot": 1.06, "token": 1.0, "both": 1.03}[str(config["order"])]


def recording(
    build: Mapping[str, Sequence[int | str]] = BUILD,
    launch: Mapping[str, Sequence[int | str]] = LAUNCH,
    default: Config = DEFAULT,
    truth: Callable[[Config], float] = true_us,
    device: DeviceClass = CPU,
    failures: bool = True,
    build_s: float = 2.0,
) -> Recording:
    """A recording in which a build takes `build_s`, a trial 0.1 s, and, with `failures`, one build and a config fail."""
    parameters = [Parameter(n, tuple(v), "build", f"the {n}") for n, v in build.items()]
    parameters += [Parameter(n, tuple(v), "launch", f"the {n}") for n, v in launch.items()]
    builds: dict[Config, RecordedBuild] = {}
    trials: dict[Config, RecordedTrial] = {}
    for values in itertools.product(*(p.values for p in parameters)):
        config = Config(dict(zip([p.name for p in parameters], values, strict=True)))
        part = config.only(build)
        us = truth(config)
        broken = failures and part == FAILED
        builds[part] = RecordedBuild(
            part,
            build_s,
            status.BUILD_FAILED if broken else status.OK,
            "It does not compile." if broken else "",
            {"smem_bytes": 1024, "threads_per_block": 64, "registers": 32},
        )
        if broken:
            trials[config] = RecordedTrial(
                config, status.BUILD_FAILED, None, 0.0, sentence="It does not compile."
            )
        elif failures and config == WRONG:
            trials[config] = RecordedTrial(
                config, status.WRONG, None, 0.05, gate_s=0.05, sentence="It is wrong."
            )
        else:
            samples = SampleSummary(15, us * 0.99, us * 0.995, us * 1.01, us * 1.2)
            trials[config] = RecordedTrial(config, status.OK, us, 0.1, 0.01, 0.03, 0.06, samples, us * 1.3)
    return Recording(
        "toy space", PROBLEM, device, POLICY, ("g++", "fake 1", ("-O3",)), tuple(parameters), default,
        builds, trials, iterations=15, gates=4, build_jobs=2,
    )  # fmt: skip


def large(**changes: object) -> Recording:
    return recording(LARGE_BUILD, LARGE_LAUNCH, LARGE_DEFAULT, large_us, failures=False, **changes)  # type: ignore[arg-type]
