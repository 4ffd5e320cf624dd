"""While the search thinks, linear algebra uses one thread; afterwards as many as before."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from tktune.search.coordinates import FeasibleRows
from tktune.search.one_thread import _threads, one_thread
from tktune.search.pool_search import PoolSearch
from tktune.search.success import SuccessModel

found = _threads()
pytestmark = pytest.mark.skipif(found is None, reason="numpy has another library than OpenBLAS here")


def threads() -> int:
    return found[0]()


@pytest.fixture(autouse=True)
def _two_threads():
    usual = threads()
    found[1](2)
    yield
    found[1](usual)


def test_one_thread_inside_and_as_many_as_before_outside():
    with one_thread():
        with one_thread():
            assert threads() == 1
        assert threads() == 1
    assert threads() == 2


def test_an_error_inside_changes_nothing_outside():
    with pytest.raises(ZeroDivisionError), one_thread():
        _ = 1 / 0
    assert threads() == 2


def test_whoever_leaves_last_gives_the_threads_back():
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with one_thread():
            inside.set()
            leave.wait(10)

    other = threading.Thread(target=stay)
    with one_thread():
        other.start()
        inside.wait(10)
    assert threads() == 1
    leave.set()
    other.join()
    assert threads() == 2


def test_the_search_thinks_in_one_thread(monkeypatch):
    seen = []
    by = SuccessModel.by

    def watched(self, *given):
        seen.append(threads())
        return by(self, *given)

    monkeypatch.setattr(SuccessModel, "by", watched)
    codes = np.array([(a, b) for a in range(6) for b in range(6)])
    search = PoolSearch(FeasibleRows([list(range(6))] * 2, codes), 0)
    for count in range(12):
        search.tell(search.choose(), None if count % 3 else 1.0 + count)
    search.gains()
    search.gains(np.arange(3))
    assert seen and set(seen) == {1}
    assert threads() == 2
