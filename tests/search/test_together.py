"""A setting of the process that threads change together: changed by the first, put back by the last, whatever happened."""

from __future__ import annotations

import threading

import pytest

from tktune.search.together import Together


@pytest.fixture
def calls():
    return []


@pytest.fixture
def setting(calls):
    def change() -> str:
        calls.append("changed")
        return f"usual {len(calls)}"

    return Together(change, calls.append)


def test_only_the_outermost_changes_it_and_what_was_usual_then_is_put_back(setting, calls):
    for _ in range(2):
        with setting.inside(), setting.inside():
            assert calls[-1] == "changed"
    assert calls == ["changed", "usual 1", "changed", "usual 3"]


def test_it_is_put_back_after_an_error(setting, calls):
    with pytest.raises(ZeroDivisionError), setting.inside():
        _ = 1 / 0
    assert calls == ["changed", "usual 1"]


def test_a_change_that_fails_leaves_nobody_inside(calls):
    fails = [True]

    def change() -> int:
        if fails.pop():
            raise OSError
        return 7

    fails.insert(0, False)
    setting = Together(change, calls.append)
    with pytest.raises(OSError), setting.inside():
        raise AssertionError("nobody comes in")
    with setting.inside():
        assert not calls
    assert calls == [7]


def test_the_last_of_several_threads_puts_it_back(setting, calls):
    everybody = threading.Barrier(5)

    def work() -> None:
        with setting.inside():
            everybody.wait(10)
            assert calls == ["changed"]
            everybody.wait(10)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    everybody.wait(10)
    everybody.wait(10)
    for thread in threads:
        thread.join()
    assert calls == ["changed", "usual 1"]
