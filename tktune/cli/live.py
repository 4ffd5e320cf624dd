"""The live table of a run on a terminal: progress, best against default, status counts, time left."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tktune.cli.listeners import sentence_of
from tktune.cli.progress import Progress
from tktune.report.text import ratio_text, seconds_text, time_text
from tktune.search import events
from tktune.search.events import Event


class LiveTable:
    """Sentences scroll by above; the table stays at the bottom and is redrawn four times a second."""

    def __init__(self, progress: Progress, console: Console | None = None) -> None:
        self._progress = progress
        self._console = console or Console(highlight=False, soft_wrap=False)
        self._live = Live(
            get_renderable=self.picture, console=self._console, refresh_per_second=4, transient=True
        )

    def __enter__(self) -> LiveTable:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def on_event(self, event: Event) -> None:
        self._progress.on_event(event)
        if isinstance(event, events.TrialDone) and event.sentence and event.status not in ("ok", "censored"):
            self.say(f"{event.status}: {event.config}: {event.sentence}")
        elif not isinstance(event, events.FinalistRound):
            sentence = sentence_of(event, self._progress)
            if sentence is not None:
                self.say(sentence)

    def say(self, sentence: str) -> None:
        self._console.print(Text(sentence))

    def stopping(self, sentence: str) -> None:
        self._progress.notice = sentence

    def picture(self) -> Any:
        """The table as it is now."""
        p = self._progress
        rows = [self._headline(), self._bar(), self._scores(), self._recent(), Text(p.doing, style="dim")]
        return Group(*rows, *([Text(p.notice, style="yellow")] if p.notice else []))

    def _headline(self) -> Text:
        p = self._progress
        place = f"[{p.problem_number}/{p.problems}] " if p.problems > 1 else ""
        left = "" if p.left_s is None else f", about {seconds_text(p.left_s)} left"
        return Text(f"{place}{p.problem or 'starting'}  {seconds_text(p.elapsed_s)}{left}", style="bold")

    def _bar(self) -> Any:
        p = self._progress
        total = p.wanted or p.feasible or None
        grid = Table.grid(padding=(0, 1))
        grid.add_row(
            ProgressBar(total=total, completed=p.number, width=40),
            f"{p.number} of {total or '?'} configs" + (f", {p.resumed} resumed" if p.resumed else ""),
        )
        return grid

    def _scores(self) -> Table:
        p = self._progress
        grid = Table.grid(padding=(0, 2))
        grid.add_row("default", time_text(p.default_us), "", str(p.default or ""))
        grid.add_row("best", time_text(p.best_us), ratio_text(p.gain), str(p.best or ""))
        counts = "  ".join(f"{status} {count}" for status, count in sorted(p.statuses.items()))
        grid.add_row("statuses", "", "", counts or "–")
        return grid

    def _recent(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("#", justify="right")
        table.add_column("status")
        table.add_column("time", justify="right")
        table.add_column("config", no_wrap=True, overflow="ellipsis")
        for trial in self._progress.recent:
            style = "green" if trial.config == self._progress.best else ""
            table.add_row(
                str(trial.number), trial.status, time_text(trial.time_us), str(trial.config), style=style
            )
        return table
