"""What a run shows while it goes: the counters, the lines, the JSON lines, the live table."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from tktune.cli.listeners import JsonLines, PlainLines, listener_for
from tktune.cli.live import LiveTable
from tktune.cli.progress import Progress
from tktune.core.config import Config
from tktune.core.device import PRESETS
from tktune.core.feasible import WaterfallRow
from tktune.core.problem import Problem
from tktune.search import events
from tktune.search.events import Event

PROBLEM = Problem("dispatch_gemm", 64, 64, 4, 2, 32, 2)
DEFAULT, BEST, BAD = Config(A=1), Config(A=2), Config(A=3)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def story() -> list[Event]:
    """A short run: resumed, one build that works and one that does not, four ends, a winner."""
    return [
        events.SpaceReady(
            PROBLEM, PRESETS["sm_90a"], 10, 6, 3, (WaterfallRow("a", "b", 4, 6, "c"),), DEFAULT
        ),
        events.Resumed(2, 8, 1, 1, 5),
        events.BuildStarted((Config(A=1), Config(A=2))),
        events.BuildDone(Config(A=1), "d" * 64, 1.5, False),
        events.BuildDone(Config(A=2), "e" * 64, 0.5, False, "no such file"),
        events.TrialStarted(DEFAULT, 3, 8),
        events.TrialDone(DEFAULT, "ok", 200.0, 200.0, DEFAULT, 3, 8),
        events.TrialDone(BEST, "ok", 100.0, 100.0, BEST, 4, 8),
        events.TrialDone(BAD, "censored", 300.0, 100.0, BEST, 5, 8, "slower"),
        events.TrialDone(BAD, "timeout:time", None, 100.0, BEST, 6, 8, "Rank 1 was late."),
        events.FinalistRound(1, 12, ((BEST, 100.0), (DEFAULT, 200.0))),
        events.FinalistRound(2, 12, ((BEST, 100.0), (DEFAULT, 200.0))),
        events.Note("This machine is noisy."),
        events.WinnerChosen(PROBLEM, BEST, 100.0, DEFAULT, 200.0, 0.01, "faster in 12 of 12 rounds"),
        events.Finished(PROBLEM, 4, 2, 90.0, "all 8 configs are measured."),
    ]


def test_counters_follow_the_events() -> None:
    progress = Progress(1)
    for event in story():
        progress.on_event(event)
    assert progress.statuses == {"ok": 2, "censored": 1, "timeout:time": 1}
    assert (progress.best_us, progress.default_us, progress.gain) == (100.0, 200.0, 2.0)
    assert (progress.number, progress.wanted, progress.resumed) == (6, 8, 2)
    assert progress.doing == "finished"


def test_time_left_follows_the_pace_and_never_passes_the_budget() -> None:
    clock = Clock()
    progress = Progress(1, 60.0, clock)
    assert progress.left_s == 60.0
    progress.on_event(story()[0])
    progress.on_event(events.TrialStarted(DEFAULT, 1, 100))
    clock.now = 10.0
    for number in range(1, 6):
        progress.on_event(events.TrialDone(DEFAULT, "ok", 1.0, 1.0, DEFAULT, number, 20))
    assert progress.left_s == pytest.approx(30.0)
    clock.now = 59.0
    assert progress.left_s == pytest.approx(1.0)


def test_plain_lines_tell_the_story(capsys: pytest.CaptureFixture[str]) -> None:
    with PlainLines(Progress(2)) as listener:
        for event in story():
            listener.on_event(event)
        listener.say("last words")
    lines = capsys.readouterr().out.splitlines()
    text = "\n".join(lines)
    for part in (
        "[1/2] dispatch_gemm",
        "6 of 10 configs feasible, from 3 builds",
        "Resumed: 2 configs measured before, 1 quarantined, 1 lost when an earlier run died, 5 left to measure.",
        "Built 1 artifact, 1.5 s of compiling.",
        "   4/8  ok           100.0 µs  best   100.0 µs  A=2",
        "timeout:time",
        "Rank 1 was late.",
        "Verifying 2 finalists in up to 12 interleaved rounds.",
        "This machine is noisy.",
        "Winner: 100.0 µs, 2.00 × as fast as the default: A=2",
        "Measured 4 configs and built 2 artifacts in 1 min 30 s: all 8 configs are measured.",
        "last words",
    ):
        assert part in text, part
    assert text.count("Verifying") == 1 and "slower" not in text


@pytest.mark.parametrize(
    ("winner", "default_us", "said"), [(DEFAULT, 9.0, "the default, 9.0"), (BEST, None, "did not finish")]
)
def test_a_winner_without_a_gain_is_told_as_such(
    winner: Config, default_us: float | None, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    PlainLines(Progress(1)).on_event(
        events.WinnerChosen(PROBLEM, winner, 9.0, DEFAULT, default_us, 0.01, "tie")
    )
    assert said in capsys.readouterr().out


def test_json_lines_hold_every_field_of_every_event(capsys: pytest.CaptureFixture[str]) -> None:
    listener = JsonLines(Progress(1))
    for event in story():
        listener.on_event(event)
    listener.say("a note")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = [line["event"] for line in lines]
    assert names[0] == "space_ready" and "trial_done" in names and names[-2:] == ["finished", "note"]
    assert lines[0]["problem"] == PROBLEM.key and lines[0]["waterfall"][0]["removed"] == 4
    done = next(line for line in lines if line["event"] == "trial_done")
    assert done["config"] == {"A": 1} and done["time_us"] == 200.0


def test_the_live_table_shows_progress_best_counts_and_time_left() -> None:
    clock = Clock()
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120, color_system=None)
    with LiveTable(Progress(2, 60.0, clock), console) as listener:
        for event in story()[:-2]:
            listener.on_event(event)
        listener.stopping("Stopping: the finalists are still verified.")
        with console.capture() as capture:
            console.print(listener.picture())
        listener.say("said above the table")
    picture = capture.get()
    for part in (
        "[1/2] dispatch_gemm",
        "about 1 min 0 s left",
        "6 of 8 configs, 2 resumed",
        "default   200.0 µs",
        "best      100.0 µs  2.00 ×",
        "censored 1  ok 2  timeout:time 1",
        "finalists: round 2 of 12",
        "Stopping",
    ):
        assert part in picture, (part, picture)
    said = screen.getvalue()
    assert "Rank 1 was late." in said and "said above the table" in said and "Resumed" in said


def test_the_live_table_stands_before_anything_happened() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with LiveTable(Progress(1), console) as listener, console.capture() as capture:
        console.print(listener.picture())
    assert "starting" in capture.get()


def test_markup_in_a_sentence_is_only_text() -> None:
    screen = io.StringIO()
    with LiveTable(
        Progress(1), Console(file=screen, force_terminal=True, width=80, color_system=None)
    ) as listener:
        listener.say("[bold]not markup[/bold] [/]")
    assert "[bold]not markup[/bold] [/]" in screen.getvalue()


def test_the_way_of_showing_follows_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    progress = Progress(1)
    assert isinstance(listener_for(progress, as_json=True), JsonLines)
    assert isinstance(listener_for(progress, as_json=False), PlainLines)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert isinstance(listener_for(progress, as_json=False), LiveTable)


def test_a_stop_is_told_without_buffers(capfd: pytest.CaptureFixture[str]) -> None:
    for listener in (PlainLines(Progress(1)), JsonLines(Progress(1))):
        listener.stopping("Stopping.")
    assert capfd.readouterr().err == "Stopping.\nStopping.\n"
