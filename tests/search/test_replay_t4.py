"""Kernel Tuner's results as a recording: units, ends, costs, and what is refused."""

from __future__ import annotations

import copy
import json

import pytest

from tktune.core import status
from tktune.core.config import Config
from tktune.core.errors import WordsError
from tktune.search.effort import PROFILES
from tktune.search.recording_form import read_recording
from tktune.search.replay import replay, study_of


def result(x: int, y: object, ms: float, invalidity: str = "correct", **more: object) -> dict[str, object]:
    ok = invalidity == "correct"
    return {
        "timestamp": "2026-11-29T00:00:00",
        "configuration": {"x": x, "y": y, "flag": True, "share": 0.5},
        "objectives": ["time"],
        "times": {
            "compilation_time": 2000.0, "runtimes": [ms, ms * 1.1, ms] if ok else [], "framework": 1.0,
            "search_algorithm": 0.1, "validation": 30.0,
        },
        "invalidity": invalidity,
        "correctness": int(ok),
        "measurements": [{"name": "time", "value": ms, "unit": "ms"}] if ok else [],
        **more,
    }  # fmt: skip


RESULTS = {
    "schema_version": "1.0.0",
    "results": [
        result(x, y, 1.0 + abs(x - 4) + (0.5 if y == "b" else 0.0)) for x in (1, 2, 4, 8) for y in ("a", "b")
    ]
    + [
        result(16, "a", 0, "compile"),
        result(16, "b", 0, "runtime"),
        result(32, "a", 0, "correctness"),
        result(32, "b", 0, "timeout"),
        result(64, "a", 0, "constraints"),
    ],
}


def read(tmp_path, content=RESULTS):
    path = tmp_path / "toy-A100.json"
    path.write_text(json.dumps(content))
    return read_recording(path)


def config(x: int, y: str) -> Config:
    return Config(x=x, y=y, flag="true", share="0.5")


def test_times_are_microseconds_and_costs_seconds(tmp_path):
    found = read(tmp_path)
    best = found.optimum
    assert best.config == config(4, "a") and best.time_us == 1000.0
    assert best.time_s == pytest.approx(0.0031) and best.gate_s == 0.03
    assert best.run_s == pytest.approx(0.0331)
    assert found.builds[best.config].build_s == 2.0
    assert found.iterations == 3 and found.build_names == ("x", "y", "flag", "share")


def test_ends_are_named_as_ours_and_constraints_leave_the_space(tmp_path):
    found = read(tmp_path)
    assert found.trials[config(16, "a")].status == status.BUILD_FAILED
    assert found.trials[config(16, "b")].status == status.fault("runtime")
    assert found.trials[config(32, "a")].status == status.WRONG
    assert found.trials[config(32, "b")].status == status.timeout("time")
    assert len(found.trials) == 12
    assert found.trials[found.default].timed


def test_it_is_replayed_to_its_optimum(tmp_path):
    found = read(tmp_path)
    ended = replay(found, study_of(found, PROFILES["full"]))
    assert ended.result.winner == config(4, "a") and ended.gap == 0.0
    assert str(ended.result.problem) == "toy-A100" and ended.build_s == 12 * 2.0


def test_another_unit_is_converted_and_no_unit_of_time_is_refused(tmp_path):
    content = copy.deepcopy(RESULTS)
    content["results"][0]["measurements"][0].update(value=7.0, unit="us")
    assert read(tmp_path, content).optimum.time_us == 7.0
    content["results"][0]["measurements"][0]["unit"] = "GFLOP/s"
    with pytest.raises(WordsError, match="GFLOP/s"):
        read(tmp_path, content)


def test_without_a_measurement_the_launches_speak(tmp_path):
    content = copy.deepcopy(RESULTS)
    content["results"][4]["measurements"] = []
    assert read(tmp_path, content).trials[config(4, "a")].time_us == 1000.0
    content["results"][4]["times"]["runtimes"] = []
    with pytest.raises(WordsError, match="has no time"):
        read(tmp_path, content)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(schema_version="2.0.0"),
        lambda c: c.update(results=[]),
        lambda c: c["results"][0].pop("configuration"),
        lambda c: c["results"][0]["configuration"].pop("x"),
        lambda c: c["results"][0].update(invalidity="sad"),
        lambda c: [one.update(invalidity="compile") for one in c["results"]],
    ],
)
def test_what_is_not_sound_is_refused(tmp_path, change):
    content = copy.deepcopy(RESULTS)
    change(content)
    with pytest.raises(WordsError):
        read(tmp_path, content)
