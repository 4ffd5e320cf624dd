"""What the search promises of the figures of search.py: each promise, what came out, and whether it is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OURS, BELIEVING, MISLED = "tktune", "tktune_with_prior", "tktune_prior_reversed"
SCORES = {"score@50": 0.45, "score@100": 0.62, "score@200": 0.75}
PRIOR_25 = 0.98  # of the optimum after 25 evaluations, with the recording of another GPU
MISLED_LOSS = 0.05  # in score@100, by a prior in reversed order
AHEAD_AT = ("score@50", "score@100", "score@200")

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Promise:
    """`found` is to be at least `asked`, or at most, where `most`."""

    what: str
    asked: float
    found: float
    most: bool = False

    @property
    def kept(self) -> bool:
        return self.found <= self.asked if self.most else self.found >= self.asked

    def __str__(self) -> str:
        return (
            f"{'kept' if self.kept else 'NOT KEPT':8}  {self.what}: {self.found:.3f}, "
            f"asked at {'most' if self.most else 'least'} {self.asked:g}"
        )


def promises(rows: Sequence[Row]) -> list[Promise]:
    """Those that `rows` (as search.py makes them) can tell of: of strategies that ran, and spaces of others ("@").

    Scores of our sampler, and that it is ahead of every strategy without a prior, are means of the spaces of others. A reversed prior is judged
    on the mean of those spaces, and on each of our own.
    """
    by: dict[str, dict[str, Row]] = {}
    for row in rows:
        if not str(row["space"]).startswith("mean of"):
            by.setdefault(str(row["strategy"]), {})[str(row["space"])] = row
    ours = by.get(OURS, {})
    found: list[Promise] = []
    for key, asked in SCORES.items():
        if (score := _mean(ours, key)) is not None:
            found.append(Promise(f"{OURS} {key}", asked, score))
    for key in AHEAD_AT:
        rivals = {
            name: score
            for name, those in by.items()
            if not name.startswith(OURS) and (score := _mean(those, key)) is not None
        }
        mine = _mean(ours, key)
        if rivals and mine is not None:
            best = max(rivals, key=rivals.__getitem__)
            found.append(Promise(f"{OURS} ahead of {best} in {key}", 0.0, mine - rivals[best]))
    if ours:
        found.append(Promise(f"{OURS} wasted", 0.0, max(row["wasted"] for row in ours.values()), most=True))
    if (fraction := _mean(by.get(BELIEVING, {}), "fraction@25")) is not None:
        found.append(Promise("fraction@25 with another GPU as prior", PRIOR_25, fraction))
    return found + _losses(ours, by.get(MISLED, {}))


def _losses(ours: Mapping[str, Row], misled: Mapping[str, Row]) -> list[Promise]:
    both = {
        s: row for s, row in misled.items() if s in ours and "score@100" in row and "score@100" in ours[s]
    }
    loss = {space: ours[space]["score@100"] - row["score@100"] for space, row in both.items()}
    found: list[Promise] = []
    others = [lost for space, lost in loss.items() if "@" in space]
    if others:
        what = "score@100 lost by a reversed prior, other GPUs"
        found.append(Promise(what, MISLED_LOSS, sum(others) / len(others), most=True))
    for space in sorted(space for space in loss if "@" not in space):
        what = f"score@100 lost by a reversed prior, {space}"
        found.append(Promise(what, MISLED_LOSS, loss[space], most=True))
    return found


def _mean(rows: Mapping[str, Row], key: str) -> float | None:
    """Of the spaces of others."""
    values = [float(row[key]) for space, row in rows.items() if "@" in space and key in row]
    return sum(values) / len(values) if values else None
