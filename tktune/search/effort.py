"""How much a run does: the three profiles of `--effort`, the only place where their numbers stand.

A profile holds only what no measurement's key holds. How often one trial launches is part of the policy, and numbers
of different policies are never compared; so `quick` and `full` share every trial, and one continues the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from tktune.core.errors import WordsError


@dataclass(frozen=True)
class Effort:
    """The budget of one problem, and how its winner is verified.

    `trials` and `seconds` bound the search. `finalists` are measured again in `rounds` interleaved rounds, up to three
    times as many while the noise is too large. With `stop_early` the search ends when another minute is not worth it.
    """

    name: str
    trials: int
    seconds: float
    finalists: int
    rounds: int
    stop_early: bool


PROFILES = {
    "quick": Effort("quick", trials=60, seconds=60.0, finalists=3, rounds=6, stop_early=True),
    "full": Effort("full", trials=200, seconds=600.0, finalists=4, rounds=12, stop_early=True),
    "exhaustive": Effort(
        "exhaustive", trials=10_000_000, seconds=1e7, finalists=8, rounds=24, stop_early=False
    ),
}
DEFAULT = "full"


def effort(name: str) -> Effort:
    """The profile called `name`. Raises `WordsError`."""
    try:
        return PROFILES[name]
    except KeyError:
        raise WordsError(f"There is no effort {name!r}.", f"Use one of: {', '.join(PROFILES)}.") from None
