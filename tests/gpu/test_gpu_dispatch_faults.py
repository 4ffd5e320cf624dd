"""Waits end: by the abort word, by the spin limit with a report, and when the peer is killed; the next pair works."""

from __future__ import annotations

import time

import pytest
from dispatch_pair import Pair, build_all, configured, dispatch_problem, gate_words
from gpu_places import few, kept_cache, needs_two

from tktune.core.device_cuda import cuda_device_classes

pytestmark = [pytest.mark.gpu, needs_two]


@pytest.fixture(scope="module", params=["gathered", "indexed"])
def ready(tmp_path_factory, request):
    problem, device = dispatch_problem(), cuda_device_classes()[0]
    config = configured(problem, device, DRAW="dispenser", ACTIVATIONS=request.param)
    cache = kept_cache(tmp_path_factory.mktemp("cache"))
    ((artifact, part),) = build_all(cache, [(problem, device, config)])

    def seated(spin_limit_s=2.0):
        return Pair(problem, device, spin_limit_s).seated(artifact, part)

    return seated, dict(config)


def test_the_abort_word_ends_a_meeting_and_leaves_the_context_usable(ready):
    seated, config = ready
    with seated() as pair:
        pair.ask(0, "gate", **gate_words(config, 10))  # rank 1 never comes
        time.sleep(1.0)
        pair.page.abort()
        assert pair.reply(0, 10.0)["failed"] == "aborted"
        pair.page.clear()
        for said in pair.both("gate", **gate_words(config, 20)):
            assert said["passed"], said


def test_a_row_that_never_comes_is_reported_by_the_gate(ready):
    seated, config = ready
    with seated(0.5) as pair:
        pair.ask(0, "withhold", rows=1)
        assert "ok" in pair.reply(0)
        for rank in range(2):
            pair.ask(rank, "gate", **gate_words(config, 10))
        said = pair.reply(0, 20.0)
        assert said["failed"] == "spin_limit", said
        assert (
            "gate" in said["sentence"] and "arrivals[0]: 128 was expected, 127 was there" in said["sentence"]
        )
        pair.page.abort()  # rank 1 has its result and waits for rank 0 to be done with its rows
        assert pair.reply(1, 20.0)["failed"] == "aborted"


def test_a_rank_outlives_a_peer_that_is_killed_while_it_is_read(ready):
    """Launches left after the kill each hear of the abort within two milliseconds; ranks that take turns leave most."""
    seated, config = ready
    iterations = few(60_000, 5000)
    with seated() as pair:
        for rank in range(2):
            pair.ask(rank, "time", config=config, mode="comm", iterations=iterations, sequence=100)
        time.sleep(few(2, 1))
        pair.ranks[1].kill()
        pair.ranks[1].wait(10)
        time.sleep(0.2)
        pair.page.abort()
        said = pair.reply(0, 60.0)
        assert "failed" in said, said
        print(f"\nthe survivor says {said['sentence']}", end="")
    with seated() as pair:
        for said in pair.both("gate", **gate_words(config, 10)):
            assert said["passed"], said
