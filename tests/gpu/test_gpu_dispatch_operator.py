"""The dispatch operator on two GPUs, a process each: plans and calls against fp32, graphs whose ids change, the library
form, and what happens when ids are wrong, rows do not fit, or a rank dies.
"""

from __future__ import annotations

import pytest
from gpu_places import GPUS, SHARED, needs_two
from rank_programs import played

pytestmark = [pytest.mark.gpu, needs_two, pytest.mark.timeout(180)]
TOLERANCE = 4e-3


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    folder = tmp_path_factory.mktemp("operator")

    def scene(name, living=None):
        return played(
            "dispatch_operator_rank.py", folder, name, living=living, within_s=90 if GPUS > 1 else 150
        )

    return scene


def right(found):
    return all(error < TOLERANCE for one in found for error in one["errors"])


def test_calls_are_each_token_times_its_experts_weights(play):
    found = play("calls")
    assert right(found), found
    assert all(one["y"] == [one["capacity"], 768] for one in found)


def test_a_captured_plan_and_call_follow_the_ids(play):
    found = play("replays")
    assert right(found), found


@pytest.mark.parametrize("form", ["indexed", "pushed", "pushed_by_index"])
def test_rows_that_are_read_by_index_or_pushed_give_the_same(play, form):
    found = play(form)
    assert right(found), found


def test_the_library_form_and_compiled_code_give_the_same(play):
    for one in play("library"):
        assert one["library"] and one["compiled"]


def test_wrong_ids_raise_on_every_rank_and_harm_nothing_later(play):
    found = play("mistakes")
    for one in found:
        assert "outside 0..15" in one["said"] and "(3, 4)" in one["shape"]
    assert right(found), found


def test_rows_beyond_the_capacity_raise_where_they_would_have_gone(play):
    first, second = play("crowded")
    assert "1024 fit" in first["said"] and first["rows"] == 0
    assert second["said"] == "" and right([second])


def test_closing_is_quick_also_when_a_rank_is_dead(play):
    (survivor,) = play("killed", living=(0,))
    assert survivor["close_s"] < 10.0
    print(f"\nthe survivor's device is usable afterwards: {survivor['usable']}", end="")
    (first, second) = play("mistakes")
    assert max(first["close_s"], second["close_s"]) < (10.0 if SHARED else 2.0)
