"""Where the time of a run went: every second of every gang is counted once, for what its ranks did or why they did nothing."""

from __future__ import annotations

import random
import threading

import pytest

from tktune.search.account import BETWEEN, COMMITTING, DECIDING, OTHER, WAITING, Account, Spent


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_second_belongs_to_what_the_ranks_do_whatever_the_driver_is_at(clock):
    account = Account(clock)
    ranks, lane = account.ranks(0), account.lane(0)
    ranks("start")
    clock.now += 8
    ranks("prepare")
    clock.now += 1
    ranks("")
    with account.driver(DECIDING):
        clock.now += 2  # nobody works
        lane("job")
        clock.now += 0.25
        ranks("load")
        clock.now += 0.5
        ranks("")
        with account.driver(COMMITTING):
            ranks("gate")
            clock.now += 3
            ranks("")
            clock.now += 0.25
        ranks("time")
        clock.now += 4
        ranks("")
        lane("")
    with account.driver(WAITING):
        clock.now += 5
    clock.now += 1
    spent = account.cut(1)
    assert spent.wall_s == 25.0
    assert spent.seconds == {
        "starting": 9.0, DECIDING: 2.0, BETWEEN: 0.5, "loading": 0.5, "gating": 3.0, "timing": 4.0, WAITING: 5.0, OTHER: 1.0,
    }  # fmt: skip
    assert spent.busy_s == 7.0 and spent.waiting_s == 5.0
    assert spent.built_share == pytest.approx(7 / 20)
    assert spent.sentence.startswith(
        "Ranks gated or timed for 7.0 of 25.0 s (28%, 35% of what did not wait for builds); "
    )
    assert "starting 9.0 s, waiting for builds 5.0 s" in spent.sentence


def test_a_cut_goes_on_with_what_everybody_is_at(clock):
    account = Account(clock)
    account.ranks(0)("time")
    clock.now += 2
    assert account.cut(1).seconds == {"timing": 2.0}
    clock.now += 3
    account.ranks(0)("")
    clock.now += 1
    assert account.cut(1).seconds == {"timing": 3.0, OTHER: 1.0}


def test_gangs_side_by_side_have_a_second_each(clock):
    account = Account(clock)
    account.ranks(0)("time")
    with account.driver(WAITING):
        clock.now += 4
    spent = account.cut(2)
    assert spent.seconds == {"timing": 4.0, WAITING: 4.0} and spent.whole_s == 8.0
    assert "of 8.0 s of 2 gangs" in spent.sentence


def test_whatever_is_marked_in_whatever_order_the_parts_add_up_to_the_whole(clock):
    draw = random.Random(5)
    account = Account(clock)
    marks = [account.ranks(0), account.ranks(1), account.lane(0), account.lane(1)]
    whole = 0.0
    for _ in range(20):
        for _ in range(draw.randrange(40)):
            draw.choice(marks)(draw.choice(["", "load", "gate", "time", "start", "report"]))
            with account.driver(draw.choice([DECIDING, COMMITTING, WAITING])):
                clock.now += draw.random()
        spent = account.cut(2)
        assert spent.whole_s == pytest.approx(2 * spent.wall_s)
        whole += spent.wall_s
    assert whole == pytest.approx(clock.now - 100.0)


def test_marks_of_threads_are_kept(clock):
    account = Account(clock)

    def work(gang: int) -> None:
        for _ in range(500):
            account.ranks(gang)("time")
            account.ranks(gang)("")

    threads = [threading.Thread(target=work, args=(gang,)) for gang in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    clock.now += 1
    assert account.cut(4).seconds == {OTHER: 4.0}


def test_it_is_kept_as_facts_and_runs_add_up():
    spent = Spent(3.0, 2, {"gating": 1.0, OTHER: 5.0})
    assert Spent.of_facts(spent.facts()) == spent
    both = spent + Spent(2.0, 2, {"gating": 2.0, "timing": 2.0})
    assert both == Spent(5.0, 2, {"gating": 3.0, OTHER: 5.0, "timing": 2.0})
    assert Spent(0.0, 1).sentence == "No gang had any time."
