"""What measured link facts answer: exact where measured, monotone in bytes, never negative, silent where nothing was
measured; and a family that is told of them orders its configs by them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tktune.core.device import device_class
from tktune.core.problem import Problem
from tktune.families.base import family
from tktune.families.link_model import FORM, Curve, LinkFacts, first_known, informed, link_facts

RECORDED = Path(__file__).parents[2] / "bench" / "results" / "link_2026-11-29.json"
DEVICE = device_class("sm_90a")
SMS = (1, 2, 4, 8, 12, 16, 24, 32)


@pytest.fixture(scope="module")
def recorded() -> LinkFacts:
    return LinkFacts.from_json(json.loads(RECORDED.read_text())["facts"])


rates = st.floats(0.1, 5000.0)


@st.composite
def curves(draw: st.DrawFn, way: str) -> list[Curve]:
    keys = draw(
        st.lists(
            st.tuples(st.sampled_from((1, 2, 4, 8)), st.sampled_from((2048, 4096, 8192, 14336))),
            unique=True,
            min_size=1,
            max_size=5,
        )
    )
    found = []
    for fan, row_bytes in keys:
        sms = tuple(sorted(draw(st.sets(st.sampled_from(SMS), min_size=1))))
        found.append(Curve(way, fan, row_bytes, 8, sms, tuple(draw(rates) for _ in sms)))
    return found


@st.composite
def facts(draw: st.DrawFn) -> LinkFacts:
    given_away = sorted(draw(st.sets(st.integers(1, 44), max_size=4)))
    gemm = ((0, draw(rates)), *((n, draw(rates)) for n in given_away)) if draw(st.booleans()) else ()
    number = st.none() | rates
    found = (*draw(curves("scatter")), *draw(curves("scatter_own")))
    return LinkFacts(2, 132, found, draw(number), draw(number), draw(number), gemm)


@given(
    facts(),
    st.floats(0, 1e10),
    st.floats(0, 1e10),
    st.floats(0, 1e9),
    st.integers(16, 65536),
    st.floats(1, 16),
    st.integers(1, 131),
)
def test_time_is_never_negative_and_grows_with_the_bytes(found, far, near, more, row_bytes, fan, sms):
    time_us = found.gather_us(far, near, row_bytes, fan, sms)
    assert time_us is not None and time_us >= 0
    for farther, nearer in ((far + more, near), (far, near + more)):
        longer = found.gather_us(farther, nearer, row_bytes, fan, sms)
        assert longer >= time_us - 1e-9 * time_us


@given(
    facts(),
    st.integers(1, 4000),
    st.integers(16, 60000),
    st.integers(0, 5000),
    st.floats(1, 16),
    st.integers(1, 131),
)
def test_longer_rows_never_take_less_time(found, rows, row_bytes, more, fan, sms):
    def us(length):
        return found.gather_us(0, rows * length * fan, length, fan, sms)

    assert us(row_bytes + more) >= us(row_bytes) * (1 - 1e-9)


@given(facts(), st.floats(1, 16), st.floats(0, 8), st.integers(1, 131), st.integers(512, 16384))
def test_more_places_for_each_row_never_take_less_time(found, fan, more, sms, row_bytes):
    one = found.gather_us(0, 1e6 * fan, row_bytes, fan, sms)
    assert found.gather_us(0, 1e6 * (fan + more), row_bytes, fan + more, sms) >= one * (1 - 1e-9)


@given(facts(), st.integers(0, 131))
def test_the_share_that_the_gemm_loses_is_a_share_and_grows(found, count):
    share = found.lost_share(count)
    if share is None:
        assert len(found.gemm_us) < 2
    else:
        assert 0 <= share < 1 and found.lost_share(count + 1) >= share and found.lost_share(0) == 0


@given(facts())
def test_json_gives_the_same_facts_back(found):
    assert LinkFacts.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert link_facts(json.loads(found.json)) == found


def test_what_was_measured_is_answered_as_it_was(recorded):
    for curve in recorded.curves:
        for sms, rate in zip(curve.sms, curve.gb_s, strict=True):
            assert curve.at(sms) == rate
            if curve.way == "scatter":
                found = recorded.stored_gb_s("scatter", sms, curve.fan, curve.row_bytes)
                assert (
                    found == pytest.approx(rate, rel=1e-9) or curve.row_bytes == 4096
                )  # 8192 may not be slower
    assert recorded.stored_gb_s("scatter", 10, 4, 8192) == pytest.approx((401 + 580) / 2)
    assert recorded.stored_gb_s("scatter", 48, 4, 8192) == pytest.approx(960)


@pytest.mark.parametrize(
    ("written_mb", "row_bytes", "us"), [(34, 8192, 84), (134, 8192, 334), (235, 14336, 550), (67, 4096, 161)]
)
def test_the_recorded_curve_gives_the_recorded_times_at_eight_sms(recorded, written_mb, row_bytes, us):
    """All rows through the link, four places each: the times that stand beside the recorded rates."""
    rate = recorded.stored_gb_s("scatter", 8, 4, row_bytes)
    assert written_mb * 1e3 / rate == pytest.approx(us, rel=0.03)


def test_other_row_lengths_follow_the_usual_one_between_their_points():
    usual = Curve("scatter_own", 4, 8192, 28, (8, 16, 24, 32), (400.0, 800.0, 1300.0, 1200.0))
    short = Curve("scatter_own", 4, 4096, 56, (8, 32), (400.0, 1200.0))
    found = LinkFacts(2, 132, (usual, short))
    for sms in (8, 16, 24, 32):
        assert found.stored_gb_s("scatter_own", sms, 4, 4096) == pytest.approx(usual.at(sms))


def test_a_saturated_link_bounds_its_part_and_own_rows_do_not_wait_for_it():
    far = Curve("scatter", 1, 8192, 28, (8, 16, 32), (280.0, 300.0, 300.0))
    near = Curve("scatter_own", 1, 8192, 28, (8, 16, 32), (300.0, 600.0, 1200.0))
    found = LinkFacts(2, 132, (far, near))
    assert found.gather_us(300e6, 300e6, 8192, 1, 32) == pytest.approx(1000)  # the link
    assert found.gather_us(300e6, 300e6, 8192, 1, 8) == pytest.approx(2000)  # the SMs
    assert found.gather_us(0, 300e6, 8192, 1, 16) == pytest.approx(500)


def test_a_dispatch_is_a_gather_whose_rows_come_evenly_from_all_ranks():
    found = told(300, 1200)
    assert found.dispatch_us(1e8, 4e8, 8192, 8, 2) == found.gather_us(2e8, 2e8, 8192, 4, 8)
    assert found.dispatch_us(1e8, 1e8, 8192, 8, 4) == found.gather_us(0.75e8, 0.25e8, 8192, 1, 8)
    # Own rows that stay in place are not moved at all.
    assert found.dispatch_us(1e8, 0.5e8, 8192, 8, 2) == found.gather_us(0.5e8, 0, 8192, 1, 8)
    assert found.dispatch_us(0, 0, 8192, 8, 2) == 0


def test_nothing_arrives_before_a_question_could_be_answered():
    curve = Curve("scatter", 1, 8192, 28, (8,), (300.0,))
    near = Curve("scatter_own", 1, 8192, 28, (8,), (300.0,))
    found = LinkFacts(2, 132, (curve, near), round_trip_us=2.5)
    assert found.gather_us(8192, 0, 8192, 1, 8) > 2.5
    assert found.gather_us(0, 8192, 8192, 1, 8) < 1


def test_where_nothing_was_measured_nothing_is_said(recorded):
    none = LinkFacts(1, 132, ())
    assert none.gather_us(1, 1, 8192, 1, 8) is None and none.lost_share(8) is None
    assert none.stored_gb_s("pull", 8, 1, 8192) is None and none.curve("pull") is None
    local = LinkFacts(1, 132, tuple(c for c in recorded.curves if c.way == "scatter_own"))
    assert local.gather_us(1e6, 1e6, 8192, 4, 8) is None
    assert local.gather_us(0, 1e6, 8192, 4, 8) is not None


@pytest.mark.parametrize(
    "wrong",
    [
        {"form": FORM + 1},
        {"curves": [{"way": "teleport"}]},
        {"gemm_us": [[8, 1.0], [0, 1.0]]},
        {"gemm_us": [[0, 1.0], [200, 1.0]]},
        {"round_trip_us": -1.0},
        {"surprise": 1},
    ],
)
def test_facts_of_another_form_are_no_facts(recorded, wrong):
    value = {**recorded.to_json(), **wrong}
    with pytest.raises(ValueError):
        LinkFacts.from_json(value)
    assert link_facts(value) is None and link_facts(None) is None
    assert first_known([value, recorded.to_json(), {}]) == recorded and first_known([value]) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"way": "x"},
        {"sms": (2, 1)},
        {"sms": ()},
        {"gb_s": (1.0,)},
        {"gb_s": (1.0, 0.0)},
        {"gb_s": (1.0, float("nan"))},
        {"fan": 0},
    ],
)
def test_a_curve_that_cannot_be_is_refused(wrong):
    right = {"way": "pull", "fan": 1, "row_bytes": 8192, "slots": 1, "sms": (1, 2), "gb_s": (1.0, 2.0)}
    Curve(**right)
    with pytest.raises(ValueError):
        Curve(**{**right, **wrong})


# The family that is told.


def dispatch(**changes):
    return Problem(
        "dispatch_gemm",
        **{"hidden": 4096, "cols": 3072, "experts": 64, "top_k": 8, "tokens": 2048, "world": 2, **changes},
    )


def costs(bench, problem, **changes):
    space = bench.space(problem, DEVICE)
    splits = next(p for p in space.parameters if p.name == "num_comm_sms").values
    return [bench.cost_us(space.default.replace(num_comm_sms=c, **changes), problem, DEVICE) for c in splits]


def told(peer_gb_s, own_gb_s, gemm=()):
    sms = (1, 8, 16, 32)
    curves = [
        Curve(way, fan, 8192, 28, sms, tuple(min(cap, 40.0 * count) for count in sms))
        for way, cap in (("scatter", peer_gb_s), ("scatter_own", own_gb_s))
        for fan in (1, 4)
    ]
    return LinkFacts(2, 132, tuple(curves), gemm_us=gemm)


def test_without_facts_nothing_changes():
    bench, problem = family("dispatch_gemm"), dispatch()
    assert informed(bench, None) is bench
    empty = informed(bench, LinkFacts(2, 132, ()))
    assert empty is not bench and costs(empty, problem) == costs(bench, problem)
    alone = family("grouped_gemm")
    assert informed(alone, told(300, 1200)) is alone


def test_a_slower_link_costs_more_where_the_link_is_what_binds():
    bench, problem = family("dispatch_gemm"), dispatch()
    fast, slow = (costs(informed(bench, told(rate, 1200)), problem, order="slot") for rate in (300, 30))
    assert all(a < b for a, b in zip(fast, slow, strict=True))


def test_fewer_sms_are_given_to_a_link_that_they_saturate():
    bench, problem = family("dispatch_gemm"), dispatch()
    by_rate = []
    for rate in (60, 1200):
        found = costs(informed(bench, told(rate, rate)), problem)
        by_rate.append(found.index(min(found)))
    assert by_rate[0] <= by_rate[1]


def test_what_the_gemm_loses_is_what_was_measured():
    bench, problem = family("dispatch_gemm"), dispatch()
    cheap, dear = (
        costs(informed(bench, told(300, 1200, ((0, 100.0), (8, us), (48, us + 1)))), problem)
        for us in (101.0, 150.0)
    )
    assert all(a <= b for a, b in zip(cheap, dear, strict=True)) and cheap[-1] < dear[-1]


@settings(max_examples=30, deadline=None)
@given(facts(), st.sampled_from(("token", "slot", "mixed")))
def test_any_facts_give_finite_positive_costs(found, order):
    for cost in costs(informed(family("dispatch_gemm"), found), dispatch(), order=order):
        assert 0 < cost < float("inf")


def test_a_whole_space_asks_each_question_once():
    bench, problem, found = family("dispatch_gemm"), dispatch(), told(300, 1200)
    space = bench.space(problem, DEVICE)
    told_bench = informed(bench, found)
    for config in space.feasible.configs[:2000]:
        told_bench.cost_us(config, problem, DEVICE)
    splits = next(p for p in space.parameters if p.name == "num_comm_sms").values
    assert 0 < len(found._answered) <= 6 * len(splits)
