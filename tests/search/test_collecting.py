"""The collector stays away while many lasting objects are made, and looks at everything again at the end."""

from __future__ import annotations

import gc
import threading

from tktune.search.collecting import all_looked_at, laid_aside


def test_nothing_is_collected_inside_and_what_was_made_is_laid_aside():
    before = gc.get_freeze_count()
    with all_looked_at():
        with laid_aside():
            assert not gc.isenabled()
            made = [[number] for number in range(1000)]
        assert gc.isenabled() and gc.get_freeze_count() >= before + len(made)
    assert gc.get_freeze_count() == 0


def test_threads_that_are_inside_at_the_same_time_keep_it_away_together():
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with laid_aside():
            inside.set()
            leave.wait()

    with all_looked_at():
        thread = threading.Thread(target=other)
        thread.start()
        inside.wait()
        with laid_aside():
            assert not gc.isenabled()
        assert not gc.isenabled()
        leave.set()
        thread.join()
        assert gc.isenabled()


def test_who_had_switched_it_off_finds_it_off():
    gc.disable()
    try:
        with all_looked_at(), laid_aside():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
