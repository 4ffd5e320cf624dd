"""Routing specifications: their spelling, their draws, and what a wrong one is told."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tktune.core.errors import ProblemError, RoutingError
from tktune.core.problem import Problem
from tktune.core.routing import GATE_ROUTINGS, gate_routings, parse_routing


def problem(**changes) -> Problem:
    fields = {"hidden": 64, "cols": 64, "experts": 8, "top_k": 2, "tokens": 400, "world": 2, "pad": 32}
    return Problem(family="dispatch_gemm", **{**fields, **changes})


def share_of(drawn: np.ndarray, expert: int) -> float:
    return float((drawn == expert).any(axis=-1).mean())


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("uniform", "uniform"),
        (" uniform ", "uniform"),
        ("zipf:1.20", "zipf:1.2"),
        ("hot:0.50", "hot:0.5@0"),
        ("hot:0.5@3", "hot:0.5@3"),
        ("empty:3,1,3", "empty:1,3"),
        ("one:07", "one:7"),
    ],
)
def test_a_routing_has_one_canonical_spelling(text, canonical):
    assert parse_routing(text).text == canonical
    assert parse_routing(canonical).text == canonical


@pytest.mark.parametrize(
    "text",
    [
        "",
        "zipf",
        "zipf:x",
        "zipf:-1",
        "zipf:nan",
        "hot:1.5",
        "hot:0.5@x",
        "empty:",
        "one:-1",
        "random",
        "trace:",
    ],
)
def test_a_routing_that_is_not_understood_says_the_forms(text):
    with pytest.raises(RoutingError, match="Write one of: uniform, zipf"):
        parse_routing(text)


TEXTS = ["uniform", "zipf:1", "hot:0.5@3", "empty:0,5", "one:7"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_draw_is_a_pure_function_of_text_shapes_and_seed(text):
    p = problem(routing=text)
    first = parse_routing(text).draw(p, 3)
    assert first.dtype == np.int32
    assert first.shape == (2, 400, 2)
    assert (first == parse_routing(text).draw(p, 3)).all()
    assert (first != parse_routing(text).draw(p, 4)).any()


def test_draws_are_the_same_on_every_machine():
    drawn = parse_routing("uniform").draw(problem(tokens=3), 0)
    assert drawn.tolist() == UNIFORM_GOLDEN


UNIFORM_GOLDEN = [[[3, 5], [0, 1], [2, 5]], [[4, 2], [0, 3], [6, 0]]]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_experts_are_distinct_within_a_token(data):
    world = data.draw(st.integers(1, 4))
    experts = world * data.draw(st.integers(1, 6))
    top_k = data.draw(st.integers(1, experts))
    kinds = ["uniform", "zipf:1.5", f"hot:0.7@{experts - 1}", "one:0"]
    if experts > top_k:
        kinds.append("empty:0")
    p = problem(
        world=world, experts=experts, top_k=top_k, tokens=9, routing=data.draw(st.sampled_from(kinds))
    )
    drawn = parse_routing(p.routing).draw(p, data.draw(st.integers(0, 99)))
    ordered = np.sort(drawn, axis=-1)
    assert drawn.min() >= 0
    assert drawn.max() < experts
    assert (ordered[..., 1:] != ordered[..., :-1]).all()


def test_uniform_gives_every_expert_about_the_same_share():
    drawn = parse_routing("uniform").draw(problem(tokens=4000), 0)
    shares = np.bincount(drawn.ravel(), minlength=8) / drawn.size
    assert abs(shares - 1 / 8).max() < 0.01


def test_zipf_is_skewed_and_the_same_experts_are_popular_for_all_seeds():
    counts = [
        np.bincount(parse_routing("zipf:1.2").draw(problem(tokens=4000, top_k=1), s).ravel(), minlength=8)
        for s in (0, 1)
    ]
    assert counts[0].max() > 4 * np.median(counts[0])
    assert counts[0].argmax() == counts[1].argmax()
    weights = np.arange(1, 9) ** -1.2
    wanted = weights / weights.sum()
    assert abs(np.sort(counts[0] / counts[0].sum())[::-1] - wanted).max() < 0.02


def test_hot_has_its_share_of_tokens_and_one_has_them_all():
    assert abs(share_of(parse_routing("hot:0.7@5").draw(problem(tokens=4000), 0), 5) - 0.7) < 0.02
    assert share_of(parse_routing("one:5").draw(problem(), 0), 5) == 1.0


def test_empty_experts_get_nothing_and_the_rest_share_evenly():
    drawn = parse_routing("empty:0,3").draw(problem(tokens=4000), 0)
    counts = np.bincount(drawn.ravel(), minlength=8)
    assert counts[0] == counts[3] == 0
    assert abs(counts[counts > 0] / drawn.size - 1 / 6).max() < 0.01


def test_a_problem_refuses_an_expert_it_does_not_have_and_too_few_left():
    with pytest.raises(RoutingError, match="names expert 8, and there are 8"):
        problem(routing="one:8")
    with pytest.raises(RoutingError, match="leaves 2 experts for top_k = 3"):
        problem(routing="empty:0,1,2,3,4,5", top_k=3)
    with pytest.raises(ProblemError, match="top_k = 9 is more than experts = 8"):
        problem(top_k=9)


def test_gate_routings_have_an_empty_and_a_hot_expert():
    assert GATE_ROUTINGS is gate_routings
    assert gate_routings(problem()) == ["uniform", "empty:0", "hot:0.9@7"]
    for p in (
        problem(experts=2, world=1),
        problem(experts=1, top_k=1, world=1),
        problem(routing="hot:0.9@7"),
    ):
        texts = gate_routings(p)
        assert len(texts) == len(set(texts)) >= 2
        for text in texts:
            parse_routing(text).draw(p, 0)


class TestTrace:
    def ids(self, tokens=900, top_k=2, experts=8) -> np.ndarray:
        rng = np.random.default_rng(0)
        return np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)]).astype(np.int64)

    def test_a_trace_is_hashed_when_parsed_and_replayed_in_windows(self, tmp_path):
        ids = self.ids()
        np.save(tmp_path / "t.npy", ids)
        p = problem(routing=f"trace:{tmp_path / 't.npy'}")
        assert p.routing.startswith(f"trace:{tmp_path / 't.npy'}#")
        assert len(p.routing.rpartition("#")[2]) == 16
        routing = parse_routing(p.routing)
        assert routing.text == p.routing
        assert (routing.draw(p, 0).reshape(-1, 2) == ids[:800]).all()
        assert (routing.draw(p, 1) != routing.draw(p, 0)).any()

    def test_json_and_npy_of_the_same_ids_draw_the_same(self, tmp_path):
        ids = self.ids()
        np.save(tmp_path / "t.npy", ids)
        (tmp_path / "t.json").write_text(json.dumps(ids.tolist()))
        p = problem()
        drawn = [parse_routing(f"trace:{tmp_path / name}").draw(p, 5) for name in ("t.npy", "t.json")]
        assert (drawn[0] == drawn[1]).all()

    def test_another_content_is_another_problem(self, tmp_path):
        path = tmp_path / "t.npy"
        np.save(path, self.ids())
        before = problem(routing=f"trace:{path}")
        np.save(path, self.ids()[::-1])
        assert problem(routing=f"trace:{path}").digest != before.digest
        with pytest.raises(RoutingError, match="is not the one with hash"):
            parse_routing(before.routing).draw(before, 0)

    def test_a_recorded_trace_needs_no_file_to_be_read_back_from_the_store(self, tmp_path):
        text = f"trace:{tmp_path}/gone.npy#0123456789abcdef"
        assert problem(routing=text).routing == text
        with pytest.raises(RoutingError, match="cannot be read"):
            parse_routing(text).draw(problem(), 0)
        with pytest.raises(RoutingError, match="cannot be read"):
            parse_routing(f"trace:{tmp_path}/gone.npy")

    @pytest.mark.parametrize(
        ("ids", "says"),
        [
            (np.zeros((800,), np.int64), "not whole numbers"),
            (np.zeros((900, 3), np.int64), "not whole numbers"),
            (np.zeros((900, 2), np.float32), "not whole numbers"),
            (np.full((900, 2), [0, 8]), "names experts 0..8"),
            (np.full((900, 2), [0, -1]), "names experts -1..0"),
            (np.full((900, 2), [1, 1]), "names an expert twice"),
            (np.full((100, 2), [0, 1]), "holds 100 tokens, and the problem needs 800"),
        ],
    )
    def test_a_trace_that_does_not_fit_is_refused(self, tmp_path, ids, says):
        np.save(tmp_path / "t.npy", ids)
        routing = parse_routing(f"trace:{tmp_path / 't.npy'}")
        with pytest.raises(RoutingError, match=says):
            routing.check_trace(problem())

    def test_a_file_that_is_no_array_is_refused(self, tmp_path):
        for name, text in (("t.json", "{"), ("t.npy", "junk")):
            (tmp_path / name).write_text(text)
            with pytest.raises(RoutingError, match="is no array of ids"):
                parse_routing(f"trace:{tmp_path / name}").draw(problem(), 0)
