"""The space as an object: feasible set, waterfall, default, pins, canonical configs, and the empty space's words."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tktune.core.config import Config
from tktune.core.device import PRESETS
from tktune.core.errors import NothingFeasible, WordsError
from tktune.core.feasible import SAME_BEHAVIOUR
from tktune.core.problem import Problem
from tktune.core.space import Constraint, Parameter, Space

PROBLEM = Problem("dispatch_gemm", 96, 64, 8, 2, 4, world=2, pad=64)
DEVICE = PRESETS["sm_90a"]
PARAMETERS = (
    Parameter("late", (0, 1), "launch", "a launch value"),
    Parameter("A", (16, 32, 64), "build", "a block"),
    Parameter("B", (1, 2, 3), "build", "a depth"),
    Parameter("word", ("x", "y"), "launch", "a word"),
)
DEFAULT = Config(A=64, B=2, late=0, word="x")


def divides(config, problem, device):
    return f"{config['A']} does not divide {problem.hidden}" if problem.hidden % config["A"] else None


def room(config, problem, device):
    needed = config["A"] * config["B"]
    return f"needs {needed}, has 64" if needed > 64 else None


def pair(config, problem, device):
    return "late with B = 1" if config["late"] and config["B"] == 1 else None


CONSTRAINTS = (
    Constraint("pair", "late needs depth", pair),
    Constraint("divides", "A divides hidden", divides, ("A",), lambda c, p, d: f"use hidden = {c['A']}"),
    Constraint("room", "A × B fits", room, ("A", "B")),
)


def space(canonical=None, constraints=CONSTRAINTS, default=DEFAULT) -> Space:
    return Space(PROBLEM, DEVICE, PARAMETERS, constraints, default, canonical)


def brute(s: Space) -> set[Config]:
    return {
        c for c in s.all_configs() if all(k.broken(c, s.problem, s.device) is None for k in s.constraints)
    }


def test_the_feasible_set_is_what_every_constraint_passes():
    s = space()
    assert s.size == 36 == len(list(s.all_configs()))
    assert set(s.feasible) == s.feasible.members == brute(s)
    assert all(s.is_feasible(c) for c in s.feasible)


def test_the_waterfall_sums_to_what_is_left():
    found = space().feasible
    assert [row.name for row in found.waterfall] == ["divides", "room", "pair"]
    left = found.total
    for row in found.waterfall:
        left -= row.removed
        assert row.left == left
        assert bool(row.example) == bool(row.removed)
    assert left == len(found)


def test_build_and_launch_parts_make_the_whole():
    s = space()
    assert (s.build_names, s.launch_names) == (("A", "B"), ("late", "word"))
    for config in s.feasible:
        assert Config({**s.build_part(config), **s.launch_part(config)}) == config


def test_configs_that_behave_the_same_are_listed_once():
    s = space(lambda c: c.replace(word="x") if c["late"] == 0 else c)
    found = s.feasible
    assert all(c["word"] == "x" for c in found if c["late"] == 0)
    row = next(row for row in found.waterfall if row.name == SAME_BEHAVIOUR)
    assert row.removed == 5
    assert found.total - sum(r.removed for r in found.waterfall) == len(found) == found.waterfall[-1].left
    pinned = s.restrict({"word": ["y"]})
    assert {c["word"] for c in pinned.feasible} == {"y"}


def test_same_behaviour_is_counted_without_any_constraint():
    s = space(lambda c: c.replace(word="x"), ())
    assert [row.name for row in s.feasible.waterfall] == [SAME_BEHAVIOUR]
    assert s.feasible.waterfall[0].left == len(s.feasible) == 18


def test_the_default_is_the_nearest_feasible_config():
    assert space().default_config() == Config(A=32, B=2, late=0, word="x")
    good = Config(A=16, B=3, late=1, word="y")
    assert space(default=good).default_config() == good


def test_pins_restrict_and_strange_ones_are_refused():
    s = space().restrict({"A": [16], "late": [1]})
    assert {(c["A"], c["late"]) for c in s.feasible} == {(16, 1)}
    with pytest.raises(WordsError, match="no parameter 'C'"):
        space().restrict({"C": [1]})
    with pytest.raises(WordsError, match="A cannot be 48"):
        space().restrict({"A": [16, 48]})
    with pytest.raises(WordsError, match="A cannot be empty"):
        space().restrict({"A": []})


def test_nothing_feasible_names_the_binding_constraint_and_the_way_out():
    s = space().restrict({"A": [64], "B": [1]})
    with pytest.raises(NothingFeasible) as caught:
        s.default_config()
    words = str(caught.value)
    assert "binds is divides: 64 does not divide 96" in words
    assert "use hidden = 64" in words
    assert "take the pin off A, B" in words
    assert caught.value.exit_code == 2


def test_the_smallest_relaxation_is_the_smallest_excess():
    never = (
        Constraint(
            "size",
            "A is at most 8",
            lambda c, p, d: f"{c['A']} > 8",
            ("A",),
            lambda c, p, d: f"make it {c['A']}",
            lambda c, p, d: c["A"] / 8 - 1,
        ),
        Constraint("late_is_set", "late is 1", lambda c, p, d: None if c["late"] else "late is 0"),
    )
    with pytest.raises(NothingFeasible, match=r"lets A=16 B=2 late=1 word=x pass: make it 16"):
        _ = space(constraints=never).feasible


def test_a_parameter_without_values_is_named():
    s = Space(PROBLEM, DEVICE, (Parameter("A", (), "build", ""),), (), Config(A=1))
    with pytest.raises(NothingFeasible, match="A has no values"):
        _ = s.feasible


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_remembered_verdicts_change_nothing(data):
    """Any constraint over any parameters, declared or not, gives the same set as plain filtering."""
    names = [p.name for p in PARAMETERS]
    constraints = []
    for number in range(data.draw(st.integers(0, 4))):
        over = tuple(data.draw(st.lists(st.sampled_from(names), unique=True)))
        salt = data.draw(st.integers(0, 5))

        def broken(config, problem, device, over=over, salt=salt):
            value = hash((salt, *(config[name] if config[name] not in ("x", "y") else 7 for name in over)))
            return "broken" if value % 3 == 0 else None

        constraints.append(Constraint(f"c{number}", "", broken, data.draw(st.sampled_from([over, None]))))
    s = space(constraints=constraints)
    found = s.enumerate()
    assert set(found.configs) == brute(s)
    assert found.total - sum(row.removed for row in found.waterfall) == len(found)
    for config in s.all_configs():
        assert s.is_feasible(config) == (config in found.members) == (not s.broken(config))


def test_configs_are_values():
    one = Config(B=1, A=2)
    assert one == Config.of_sorted({"A": 2, "B": 1})
    assert hash(one) == hash(Config(A=2, B=1))
    assert one.digest == Config(A=2, B=1).digest != one.replace(A=3).digest
    assert (one.json, str(one), repr(one)) == ('{"A":2,"B":1}', "A=2 B=1", "Config(A=2 B=1)")
    assert one.only(["A"]) == Config(A=2)
    with pytest.raises(TypeError):
        Config(A=True)
    with pytest.raises(TypeError):
        Config(A="x").number("A")
