"""Kernel Tuner's results format (T4, schema version 1) as a recording. Reads decoded JSON; opens no file.

T4 knows no launch parameters, so every config is a build of its own. Its times are milliseconds. What T4 says of a
config and what it becomes: correct → ok, correctness → wrong, compile → build_failed, runtime → fault:runtime,
timeout → timeout:time; what its constraints excluded is no config.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel, Field, FiniteFloat, ValidationError

from tktune.core import status
from tktune.core.config import Config, Value
from tktune.core.device import DeviceClass
from tktune.core.errors import WordsError
from tktune.core.policy import Policy
from tktune.core.space import Parameter
from tktune.search.recording import NamedProblem, RecordedBuild, RecordedTrial, Recording, summary_of

_ENDS = {
    "correct": status.OK,
    "correctness": status.WRONG,
    "compile": status.BUILD_FAILED,
    "runtime": status.fault("runtime"),
    "timeout": status.timeout("time"),
}
_UNITS_US = {"us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6, "ns": 1e-3, "": 1e3}
_WAY_OUT = "Write Kernel Tuner's results with store_output_file, objective time."


class _Times(BaseModel):
    compilation_time: FiniteFloat = Field(default=0.0, ge=0)
    validation: FiniteFloat = Field(default=0.0, ge=0)
    runtimes: list[FiniteFloat] = Field(default_factory=list)


class _Measurement(BaseModel):
    name: str
    value: Any = None
    unit: str = ""


class _Result(BaseModel):
    configuration: dict[str, Any]
    times: _Times
    invalidity: str
    objectives: list[str] = Field(default_factory=lambda: ["time"])
    measurements: list[_Measurement] = Field(default_factory=list)


class _Results(BaseModel):
    schema_version: str = Field(pattern=r"^1\.")
    results: list[_Result] = Field(min_length=1)


def is_t4(content: Any) -> bool:
    """Whether decoded JSON looks like T4 results, sound or not."""
    return isinstance(content, Mapping) and "results" in content and "format" not in content


def recording_of_t4(content: Mapping[str, Any], path: Path) -> Recording:
    """The recording that T4 results tell of; `path` names it. Raises `WordsError` with the way out.

    The default is the config of median time, as T4 names none: neither good nor bad.
    """
    try:
        found = _Results.model_validate(content).results
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise WordsError(f"{path} is not sound T4: {where}: {first['msg']}.", _WAY_OUT) from error
    trials: dict[Config, RecordedTrial] = {}
    builds: dict[Config, RecordedBuild] = {}
    for result in found:
        if result.invalidity == "constraints":
            continue
        config = Config({name: _value(value) for name, value in result.configuration.items()})
        if trials and set(config) != set(next(iter(trials))):
            raise WordsError(f"{path} is not sound T4: {config} has other parameters.", _WAY_OUT)
        trial = trials[config] = _trial(result, config, path)
        failed = trial.status == status.BUILD_FAILED
        builds[config] = RecordedBuild(
            config,
            result.times.compilation_time / 1e3,
            status.BUILD_FAILED if failed else status.OK,
            "The compiler refused it when it was recorded." if failed else "",
        )
    timed = sorted((t for t in trials.values() if t.timed), key=lambda t: (t.time_us or 0.0, t.config.digest))
    if not timed:
        raise WordsError(f"{path} has no config that was timed.", _WAY_OUT)
    iterations = max((len(result.times.runtimes) for result in found), default=0) or 7
    name = path.name.split(".")[0]
    return Recording(
        name=name,
        problem=NamedProblem(name, 1, 1, 1, 1, 1),
        device=DeviceClass("cpu", "recorded", 1, 0, 0, "none", display_name="the recorded device"),
        policy=Policy("recorded", warmup=0, first_iterations=min(3, iterations), iterations=iterations),
        toolchain=("nvcc", "recorded", ()),
        parameters=_parameters(list(found[0].configuration), trials),
        default=timed[len(timed) // 2].config,
        builds=builds,
        trials=trials,
        iterations=iterations,
        gates=3,
    )


def _trial(result: _Result, config: Config, path: Path) -> RecordedTrial:
    ended = _ENDS.get(result.invalidity)
    if ended is None:
        raise WordsError(f"{path} is not sound T4: invalidity {result.invalidity!r}.", _WAY_OUT)
    time_s = sum(result.times.runtimes) / 1e3
    gate_s = result.times.validation / 1e3
    if ended != status.OK:
        sentence = f"It ended as {result.invalidity} when it was recorded."
        return RecordedTrial(
            config, ended, None, time_s + gate_s, gate_s=gate_s, time_s=time_s, sentence=sentence
        )
    us = [one * 1e3 for one in result.times.runtimes if one > 0]
    time_us = _objective_us(result, path)
    if time_us is None:
        time_us = median(us) if us else None
    if time_us is None:
        raise WordsError(f"{path} is not sound T4: {config} is correct and has no time.", _WAY_OUT)
    if time_s == 0:
        time_s = 7 * time_us / 1e6
    return RecordedTrial(config, status.OK, time_us, time_s + gate_s, 0.0, gate_s, time_s, summary_of(us))


def _objective_us(result: _Result, path: Path) -> float | None:
    wanted = result.objectives[0] if result.objectives else "time"
    for one in result.measurements:
        if one.name != wanted:
            continue
        if one.unit not in _UNITS_US:
            raise WordsError(
                f"{path} is measured in {one.unit}, and a replay needs times.", "Use the objective time."
            )
        if isinstance(one.value, int | float) and math.isfinite(one.value) and one.value > 0:
            return float(one.value) * _UNITS_US[one.unit]
    return None


def _parameters(names: Iterable[str], configs: Iterable[Config]) -> tuple[Parameter, ...]:
    values: dict[str, set[Value]] = {name: set() for name in names}
    for config in configs:
        for name, value in config.items():
            values[name].add(value)
    return tuple(
        Parameter(name, tuple(sorted(found, key=_order)), "build", "") for name, found in values.items()
    )


def _value(value: Any) -> Value:
    """JSON's value as a parameter's: whole numbers stay, everything else is a word."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) else str(value)


def _order(value: Value) -> tuple[bool, float, str]:
    return isinstance(value, str), 0.0 if isinstance(value, str) else float(value), str(value)
