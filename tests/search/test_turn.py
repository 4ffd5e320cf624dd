"""Runs that share a cache measure one after the other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tktune.search.budget import StopSignal
from tktune.search.events import Event, Note, Silent, Tee
from tktune.search.turn import measuring_turn

HOLDER = """
import sys
from pathlib import Path
from tktune.search.budget import StopSignal
from tktune.search.events import Silent
from tktune.search.turn import measuring_turn
with measuring_turn(Path(sys.argv[1]), Silent(), StopSignal()) as mine:
    print(mine, flush=True)
    sys.stdin.read()
"""


def test_a_run_waits_for_one_that_measures_and_takes_over_when_it_is_killed(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "cache")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"True\n"
    heard: list[Event] = []

    def kill_instead_of_sleeping(seconds: float) -> None:
        holder.kill()
        holder.wait()

    with measuring_turn(
        tmp_path / "cache", Tee(heard.append), StopSignal(), kill_instead_of_sleeping
    ) as mine:
        assert mine
    assert [type(event) for event in heard] == [Note]


def test_a_stop_ends_the_wait(tmp_path: Path) -> None:
    stop = StopSignal()
    with (
        measuring_turn(tmp_path, Silent(), stop) as first,
        measuring_turn(tmp_path, Silent(), stop, lambda seconds: stop.request()) as second,
    ):
        assert first and not second
