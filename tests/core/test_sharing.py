"""Which GPU each rank sits at where ranks may share, what the variable may say, and that nothing is timed meanwhile."""

from __future__ import annotations

import dataclasses

import pytest

from tktune.core.device import device_class
from tktune.core.device_cuda import gpus_of_ranks
from tktune.core.errors import WordsError
from tktune.core.sharing import VARIABLE, in_turn, may_share, refuse_timing

HOPPER, BLACKWELL = device_class("sm_90a"), device_class("sm_120a")
CPU = dataclasses.replace(HOPPER, backend="cpu")


@pytest.fixture
def host(monkeypatch):
    """This host's GPUs, and what the variable says."""

    def of(word, *found):
        monkeypatch.setattr("tktune.core.device_cuda.cuda_device_classes", lambda: list(found))
        monkeypatch.setenv(VARIABLE, word)

    monkeypatch.delenv(VARIABLE, raising=False)
    return of


def test_nobody_shares_unless_asked_to(host):
    assert not may_share()
    for word, shares in (("", False), ("0", False), ("1", True)):
        host(word)
        assert may_share() is shares


@pytest.mark.parametrize("word", ["yes", "2", "true", " 1"])
def test_another_word_is_refused_with_what_it_may_be(host, word):
    host(word)
    with pytest.raises(WordsError, match=rf"{VARIABLE} is '{word}'.*Set it to 1"):
        may_share()


def test_every_rank_has_a_gpu_and_none_has_two_ranks_more_than_another():
    for world in range(1, 9):
        for gpus in range(1, 9):
            places = in_turn(world, range(10, 10 + gpus))
            counts = [places.count(gpu) for gpu in range(10, 10 + gpus)]
            assert len(places) == world == sum(counts) and max(counts) - min(counts) <= 1
            assert places[:gpus] == tuple(range(10, 10 + min(world, gpus)))  # its own while there are enough


def test_ranks_take_turns_only_where_they_may(host):
    host("0", HOPPER)
    assert gpus_of_ranks(2, HOPPER) == (0, 1)
    host("1", HOPPER)
    assert gpus_of_ranks(2, HOPPER) == (0, 0) and gpus_of_ranks(1, HOPPER) == (0,)
    host("1", HOPPER, HOPPER)
    assert gpus_of_ranks(2, HOPPER) == (0, 1) and gpus_of_ranks(4, HOPPER) == (0, 1, 0, 1)
    assert gpus_of_ranks(4, CPU) == (0, 1, 2, 3)


def test_ranks_share_gpus_of_their_own_class(host):
    host("1", HOPPER, BLACKWELL, HOPPER)
    assert gpus_of_ranks(3, HOPPER) == (0, 2, 0) and gpus_of_ranks(2, BLACKWELL) == (1, 1)
    # A class that is built for and not here runs wherever it can.
    assert gpus_of_ranks(2, dataclasses.replace(HOPPER, arch="sm_90")) == (0, 1)


def test_without_gpus_a_rank_has_the_place_of_its_number_and_learns_there_that_it_is_empty(host):
    host("1")
    assert gpus_of_ranks(2, HOPPER) == (0, 1)


def test_timing_is_refused_on_gpus_that_may_be_shared_and_nowhere_else(host):
    host("0")
    refuse_timing(HOPPER, "A run")
    host("1")
    refuse_timing(CPU, "A run")
    with pytest.raises(WordsError, match=rf"A run measures .*{VARIABLE}=1.*Unset {VARIABLE}") as caught:
        refuse_timing(HOPPER, "A run")
    assert caught.value.exit_code == 2
