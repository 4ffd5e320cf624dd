"""Which part of the database a command speaks of: one study's problems, or everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tktune.core.config import Value
from tktune.core.problem import Problem

if TYPE_CHECKING:
    from tktune.store.rows import KeyFacts


@dataclass(frozen=True)
class Selection:
    """What to show. `pins` and `problems` are the study's, where one was named."""

    title: str
    file_name: str
    wanted: Callable[[KeyFacts], bool]
    problems: Sequence[Problem] = ()
    pins: Mapping[str, Sequence[Value]] = field(default_factory=dict)


def selection(study: str | None, device: str | None) -> Selection:
    """Everything, or the problems of `study` on its device class (or on `device`). Raises `WordsError`."""
    from tktune.core.device import device_class

    if study is None:
        if device is None:
            return Selection("tktune report", "report", lambda facts: True)
        chosen = device_class(device)
        return Selection(f"tktune report: {device}", "report", lambda facts: facts.device == chosen)
    from tktune.search.study import load_study

    loaded = load_study(study)
    on = device_class(device or loaded.device)
    policy = loaded.policy(on)
    problems = frozenset(loaded.problems)
    return Selection(
        f"tktune report: {loaded.name}",
        file_name(loaded.name),
        lambda facts: facts.problem in problems and facts.device == on and facts.policy == policy,
        loaded.problems,
        loaded.pins,
    )


def file_name(title: str) -> str:
    """A study's name as the name of a file: letters, digits, dots and dashes."""
    words = "".join(c if c.isalnum() or c in ".-_" else " " for c in title).split()
    return "-".join(words).strip(".") or "study"
