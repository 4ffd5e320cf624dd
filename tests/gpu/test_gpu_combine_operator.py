"""The combine operator on two GPUs, a process each: plans and calls against fp32 and the golden tables, graphs whose ids
change, a whole layer by one schedule, the library form, and what happens when ids are wrong, rows do not fit, or a rank
dies.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_places import SHARED, needs_a_gpu_each, needs_two

pytestmark = [pytest.mark.gpu, needs_two, pytest.mark.timeout(300)]


SCENES = (
    "forms",
    "columns",
    "groups",
    "pulls",
    "pulls_columns",
    "layer",
    "library",
    "mistakes",
    "crowded",
    "timed",
)


def played(folder, scenes, ranks=(0, 1), within_s=120):
    """What each rank found in each scene; only `ranks` are expected to live to tell."""
    program = Path(__file__).with_name("combine_operator_rank.py")
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), "2", str(folder), *scenes],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    found = {scene: [] for scene in scenes}
    errors = []
    try:
        for rank, process in enumerate(processes):
            try:
                said, error = process.communicate(timeout=within_s)
            except subprocess.TimeoutExpired:
                process.kill()
                said, error = process.communicate()
                error += f"\nrank {rank} did not end within {within_s} s"
            if rank not in ranks:
                continue
            for line in said.splitlines():
                if line.startswith("["):
                    scene, one = json.loads(line)
                    found[scene].append(one)
            if process.returncode != 0:
                errors.append(error[-3000:])
    finally:
        for process in processes:
            process.kill()
    return found, "\n".join(errors)


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """All scenes in one pair of processes; each test reads its own. Ranks that take turns are not timed."""
    scenes = [scene for scene in SCENES if not (SHARED and scene == "timed")]
    found, errors = played(tmp_path_factory.mktemp("operator"), scenes, within_s=250)

    def of(scene):
        assert len(found[scene]) == 2, errors
        return found[scene]

    return of


def right(found):
    return all(error <= 1 for one in found for error in one["errors"])


@pytest.mark.parametrize("scene", SCENES[:5])
def test_calls_and_replays_are_the_weighted_sums_and_tables_the_golden_ones(play, scene):
    found = play(scene)
    assert right(found), found
    for one in found:
        assert set(one["tables"]) == {""} and all(one["same"]), one


def test_a_layer_runs_both_gemms_by_one_schedule_in_one_graph(play):
    found = play("layer")
    assert right(found), found


def test_the_library_form_and_compiled_code_give_the_same(play):
    for one in play("library"):
        assert one["library"] and one["compiled"]
        assert one["close_s"] < (10.0 if SHARED else 2.0)


def test_wrong_ids_raise_on_every_rank_and_harm_nothing_later(play):
    found = play("mistakes")
    for one in found:
        ids, *shapes = one["said"]
        assert "outside 0..15" in ids and len(shapes) == 2
    assert found[1]["emptied"] and not found[0]["emptied"]
    assert right(found), found


def test_rows_beyond_the_capacity_raise_where_they_would_have_gone(play):
    first, second = play("crowded")
    assert "1024 fit" in first["said"] and second["said"] == ""
    assert all(one["owes_nothing"] and one["finite"] for one in (first, second))


@needs_a_gpu_each("how long plans and calls take")
def test_plans_and_calls_are_timed(play):
    found = play("timed")
    for name in ("plan", "tables", "call", "host"):
        print(f"\ncombine operator {name:7} {max(one[name] for one in found):7.1f} us", end="")
    assert max(one["tables"] for one in found) < 50 and max(one["plan"] for one in found) < 100


def test_closing_is_quick_also_when_a_rank_is_dead(tmp_path):
    found, errors = played(tmp_path, ["killed"], ranks=(0,), within_s=60)
    assert len(found["killed"]) == 1, errors
    assert found["killed"][0]["close_s"] < 10.0
