"""How a run is shown while it goes: plain lines, JSON lines. The live table is in `live`."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Mapping
from typing import Any, Protocol

from tktune.cli.output import print_line
from tktune.cli.progress import Progress
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.report.text import count_text, ratio_text, seconds_text, time_text
from tktune.search import events
from tktune.search.events import Event


class RunListener(Protocol):
    """A listener of one run that also carries the command line's own sentences."""

    def on_event(self, event: Event) -> None: ...

    def say(self, sentence: str) -> None: ...

    def stopping(self, sentence: str) -> None:
        """Called inside a signal handler: must not print through buffers."""
        ...

    def __enter__(self) -> RunListener: ...

    def __exit__(self, *_: object) -> None: ...


def sentence_of(event: Event, progress: Progress) -> str | None:
    """The line that people read for an event; None for events that only move the counters."""
    match event:
        case events.SpaceReady():
            place = f"[{progress.problem_number}/{progress.problems}] " if progress.problems > 1 else ""
            return (
                f"{place}{event.problem}: {event.feasible} of {count_text(event.total, 'config')} feasible, "
                f"from {count_text(event.builds, 'build')}."
            )
        case events.Resumed():
            return _resumed(event)
        case events.FinalistRound():
            if event.number > 1:
                return None
            finalists = count_text(len(event.medians_us), "finalist")
            return f"Verifying {finalists} in up to {count_text(event.of, 'interleaved round')}."
        case events.WinnerChosen():
            return _winner(event)
        case events.Note():
            return event.sentence
        case events.Finished():
            return (
                f"Measured {count_text(event.measured, 'config')} and built {count_text(event.builds, 'artifact')} "
                f"in {seconds_text(event.seconds)}: {event.reason}"
            )
        case _:
            return None


def _resumed(event: events.Resumed) -> str:
    words = [f"Resumed: {count_text(event.measured, 'config')} measured before"]
    if event.quarantined:
        words.append(f"{event.quarantined} quarantined")
    if event.lost:
        words.append(f"{event.lost} lost when an earlier run died")
    if event.left is not None:
        words.append(f"{event.left} left to measure")
    return ", ".join(words) + "."


def _winner(event: events.WinnerChosen) -> str:
    if event.config == event.default:
        return f"Winner: the default, {time_text(event.time_us)}."
    against = "the default did not finish"
    if event.default_us is not None:
        against = f"{ratio_text(event.default_us / event.time_us)} as fast as the default"
    return f"Winner: {time_text(event.time_us)}, {against}: {event.config}"


class PlainLines:
    """One line an event, for logs and pipes."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._built: list[events.BuildDone] = []

    def __enter__(self) -> PlainLines:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def on_event(self, event: Event) -> None:
        self._progress.on_event(event)
        if isinstance(event, events.BuildDone) and not (event.cached or event.sentence):
            self._built.append(event)
        elif self._built and not isinstance(event, events.BuildDone | events.BuildStarted):
            seconds = sum(build.seconds for build in self._built)
            self.say(f"Built {count_text(len(self._built), 'artifact')}, {seconds:.1f} s of compiling.")
            self._built = []
        if isinstance(event, events.TrialDone):
            of = "" if event.wanted is None else f"/{event.wanted}"
            line = (
                f"{event.number:>4}{of}  {event.status:<9}  {time_text(event.time_us):>10}  "
                f"best {time_text(event.best_us):>10}  {event.config}"
            )
            unusual = event.sentence and event.status not in ("ok", "censored")
            self.say(f"{line}  {event.sentence}" if unusual else line)
            return
        sentence = sentence_of(event, self._progress)
        if sentence is not None:
            self.say(sentence)

    def say(self, sentence: str) -> None:
        print(sentence, flush=True)

    def stopping(self, sentence: str) -> None:
        write_to_stderr(sentence)


class JsonLines:
    """One object a line: {"event": "trial_done", …fields of the event…}."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def on_event(self, event: Event) -> None:
        self._progress.on_event(event)
        print_line(event_object(event))

    def say(self, sentence: str) -> None:
        print_line({"event": "note", "sentence": sentence})

    def stopping(self, sentence: str) -> None:
        write_to_stderr(sentence)


def write_to_stderr(sentence: str) -> None:
    """Safe inside a signal handler, where a buffered write may be under way."""
    os.write(2, f"{sentence}\n".encode())


def event_object(event: Event) -> dict[str, Any]:
    """An event as a JSON object."""
    fields = {field.name: _plain(getattr(event, field.name)) for field in dataclasses.fields(event)}
    return {"event": event_name(type(event)), **fields}


def event_name(kind: type[Event]) -> str:
    """TrialDone -> "trial_done"."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def _plain(value: Any) -> Any:
    """`value` in JSON's own types."""
    if isinstance(value, Problem | DeviceClass):
        return value.key
    if isinstance(value, Config | Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def listener_for(progress: Progress, as_json: bool) -> RunListener:
    """JSON lines on demand, the live table on a terminal, plain lines elsewhere."""
    if as_json:
        return JsonLines(progress)
    if sys.stdout.isatty():
        from tktune.cli.live import LiveTable

        return LiveTable(progress)
    return PlainLines(progress)
