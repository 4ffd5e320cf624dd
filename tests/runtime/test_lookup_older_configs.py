"""Winners that were stored before a parameter was there: they answer with what they meant."""

from __future__ import annotations

import pytest

import tktune
from tktune.core.config import Config
from tktune.core.device import device_class
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.families.base import family
from tktune.store.results import Store
from tktune.store.rows import VerificationRow

DEVICE = device_class("sm_90a")
WORDS = {"hidden": 2048, "cols": 768, "experts": 128, "top_k": 8, "tokens": 2048, "world": 2}
PROBLEM = Problem("dispatch_gemm", **WORDS)
SPACE = family("dispatch_gemm").space(PROBLEM, DEVICE)
WINNER = SPACE.default.replace(num_comm_sms=12, order="mixed")


@pytest.fixture
def ask(tmp_path):
    """Stores a winner without some of its parameters, and looks its problem up."""

    def answer(*without, winner=WINNER, **changes):
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.db"
        stored = Config({name: value for name, value in winner.items() if name not in without})
        with Store.open(str(path)) as store:
            key = store.key(PROBLEM, DEVICE, Policy(), store.toolchain_id("nvcc", "nvcc 13.0", "0" * 64))
            trial = store.start_trial(key, stored, "a" * 64, "run")
            store.finish_trial(trial, "ok", time_us=150.0, samples=[150.0])
            row = VerificationRow(stored, "a" * 64, "finalist", 150.0, (150.0,) * 9, True, "fastest")
            store.add_verification(key, "session", [row])
        tktune.lookup.cache_clear()
        return tktune.lookup("dispatch_gemm", **{**WORDS, **changes}, device=DEVICE, db=path)

    yield answer
    tktune.lookup.cache_clear()


def test_a_winner_older_than_transports_pulls(ask):
    choice = ask("TRANSPORT")
    assert (choice.provenance, choice.config) == ("exact", WINNER)
    assert choice.config["TRANSPORT"] == "pull" and choice.artifact_digest == "a" * 64


def test_so_does_one_of_other_tokens(ask):
    choice = ask("TRANSPORT", tokens=1024)
    assert (choice.provenance, choice.config) == ("near", WINNER)


def test_a_winner_that_lacks_anything_else_is_of_another_version(ask):
    choice = ask("TRANSPORT", "OUT_SLOTS")
    assert choice.provenance == "default" and "of another version" in choice.explain()


def test_a_winner_that_pushes_is_answered_explained_and_judged_anew(ask):
    push = WINNER.replace(TRANSPORT="push", ACTIVATIONS="indexed", num_comm_sms=4)
    choice = ask(winner=push)
    assert (choice.provenance, choice.config) == ("exact", push)
    assert "exactly this problem" in choice.explain() and "150.0 µs" in choice.explain()
    assert ask(winner=push, tokens=4096).config == push
    staged = WINNER.replace(TRANSPORT="push")  # an order that staged rows do not have
    for tokens in (2048, 1024):
        choice = ask(winner=staged, tokens=tokens)
        assert choice.provenance == "default" and "staged_rows_come_first" in choice.explain()


def test_a_space_completes_what_is_older_than_it_and_leaves_the_rest_alone():
    older = Config({name: value for name, value in WINNER.items() if name != "TRANSPORT"})
    assert SPACE.completed(older) == WINNER
    assert SPACE.completed(WINNER) is WINNER
    push = WINNER.replace(TRANSPORT="push")
    assert SPACE.completed(push) is push
    pinned = SPACE.restrict({"TRANSPORT": ["push"]})
    assert pinned.completed(older) == WINNER  # a pin changes what is tried, not what was meant
