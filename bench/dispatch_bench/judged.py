"""What is made of the ranks' samples: the slowest rank of each launch, medians, overlap, and whether the tuner's split is
the sweep's. Pure arithmetic and the tables; definitions are those of docs/how-it-measures.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dispatch_bench.wanted import Cost
from tktune.search.attribution import Attribution
from tktune.search.judging import measured_noise, paired_ratio, tie_band

Rounds = list[list[float]]  # microseconds of each launch, by round

WINNER, AGAIN, DEFAULT, COMP = "winner", "winner again", "default", "comp"
SERIAL = (
    "serial",
    "serial, real rows",
)  # all-gather, index_select, library GEMM; the second without padding rows
ALONE = ("torch._grouped_mm", "torch._grouped_mm, real rows", "DeepGEMM", "grouped_gemm winner", COMP)
QUARTER = 0.25


def split_name(split: int) -> str:
    return f"split {split}"


def comm_name(split: int) -> str:
    return f"comm {split}"


def hand_name(number: int) -> str:
    """Of a config of the sweep that is made by hand, by its place there."""
    return f"hand {number}"


def slowest(ranks: Sequence[Mapping[str, Rounds]]) -> dict[str, Rounds]:
    """The slowest rank of each launch; names that every rank has, in the order of the first."""
    return {
        name: [
            [max(launch) for launch in zip(*of_round, strict=True)]
            for of_round in zip(*(rank[name] for rank in ranks), strict=True)
        ]
        for name in ranks[0]
        if all(name in rank for rank in ranks)
    }


def median_us(rounds: Rounds) -> float:
    return statistics.median(us for launches in rounds for us in launches)


@dataclass(frozen=True)
class Claim:
    """Is the tuner's winner the sweep's best, and at what cost?

    The sweep is the one made by hand (`hand`: its number of configs; 0: it was not measured) and the winner's own line
    of splits. `ratio` is winner ÷ best of both, measured side by side after they had named the best; `noise` the winner
    against itself in the same rounds.
    """

    split: int
    best: str
    ratio: float
    noise: float
    hand: int
    cost: Cost | None

    @property
    def band(self) -> float:
        return tie_band(self.noise)

    @property
    def as_fast(self) -> bool:
        return self.ratio <= 1.0 + self.band

    @property
    def sentence(self) -> str:
        swept = f"a sweep of {self.hand} configs and of its own splits" if self.hand else "its own splits"
        said = (
            f"The tuner's winner (split {self.split}) {'is' if self.as_fast else 'is NOT'} within {self.band:.1%} of the best of "
            f"{swept}, {self.best}: measured side by side it takes {self.ratio:.3f} × its time."
        )
        if self.cost is None:
            return f"{said} What finding it cost is not known: no winner of this problem is stored."
        c = self.cost
        told = (
            f"It was config {c.found_after} of {c.measured} that the tuner measured, from {c.builds} builds"
        )
        if self.hand:
            told += (
                f": {c.found_after / self.hand:.1%} of that sweep until it was found ({self._judged(c.found_after)}), "
                f"{c.measured / self.hand:.1%} in all ({self._judged(c.measured)})"
            )
        return (
            f"{said} {told}. Of the sweep it had measured {c.in_sweep} configs, of its own {c.line} splits {c.on_line}, of "
            f"{c.space} feasible configs {c.measured / c.space:.2%}."
        )

    def _judged(self, count: int) -> str:
        return f"{'at most' if count <= QUARTER * self.hand else 'MORE than'} a quarter"

    def object(self) -> dict[str, Any]:
        cost = None if self.cost is None else dict(vars(self.cost))
        if cost is not None and self.cost is not None and self.hand:
            cost["at_most_a_quarter_of_the_sweep"] = {
                "until_found": self.cost.found_after <= QUARTER * self.hand,
                "in_all": self.cost.measured <= QUARTER * self.hand,
            }
        return {
            "split": self.split,
            "best": self.best,
            "winner_over_best": round(self.ratio, 4),
            "noise": round(self.noise, 4),
            "band": round(self.band, 4),
            "within_band": self.as_fast,
            "sweep": self.hand,
            "cost": cost,
            "sentence": self.sentence,
        }


def claim(split: int, rounds: Mapping[str, Rounds], cost: Cost | None, hand: Sequence[object] = ()) -> Claim:
    """Of the last rounds, which hold the winner twice and the fastest that were swept. The winner itself is one of them
    where none was faster; then it is compared with itself, as it was measured for the sweep.
    """
    by_round = {name: [statistics.median(one) for one in launches] for name, launches in rounds.items()}
    swept = [name for name in by_round if name.startswith(("split ", "hand "))]
    best = min(swept, key=lambda name: (statistics.median(by_round[name]), name))
    kind, _, number = best.partition(" ")
    return Claim(
        split,
        best if kind == "split" else str(hand[int(number)]),
        paired_ratio(by_round[WINNER], by_round[best]),
        measured_noise(by_round[WINNER], by_round[AGAIN]),
        len(hand),
        cost,
    )


@dataclass(frozen=True)
class Judged:
    """One (shape, routing, launch mode): medians in microseconds."""

    split: int
    median_us: Mapping[str, float]
    claim: Claim | None = None  # where the sweeps were measured

    @property
    def fused_us(self) -> float:
        return self.median_us[WINNER]

    @property
    def serial(self) -> str:
        return min((name for name in SERIAL if name in self.median_us), key=lambda name: self.median_us[name])

    @property
    def alone(self) -> str:
        return min((name for name in ALONE if name in self.median_us), key=lambda name: self.median_us[name])

    @property
    def comm(self) -> dict[int, float]:
        named = {name: us for name, us in self.median_us.items() if name.startswith("comm ")}
        return {int(name.removeprefix("comm ")): us for name, us in named.items()}

    @property
    def sweep(self) -> dict[int, float]:
        named = {name: us for name, us in self.median_us.items() if name.startswith("split ")}
        return {int(name.removeprefix("split ")): us for name, us in named.items()}

    @property
    def attribution(self) -> Attribution:
        comm = self.comm
        least = min(comm, key=lambda split: (comm[split], split), default=None)
        return Attribution(
            self.fused_us,
            self.median_us[COMP],
            comm.get(self.split),
            None if least is None else comm[least],
            least,
            self.median_us[self.serial],
            self.median_us[self.alone],
        )

    def object(self) -> dict[str, Any]:
        parts = self.attribution

        def ratio(over_us: float) -> float:
            return round(over_us / self.fused_us, 3)

        return {
            "fused_us": round(self.fused_us, 2),
            "default_over_fused": ratio(self.median_us[DEFAULT]),
            "serial": self.serial,
            "serial_over_fused": ratio(self.median_us[self.serial]),
            "alone": self.alone,
            "fused_over_alone": round(self.fused_us / self.median_us[self.alone], 3),
            "comm_at_split_us": rounded(parts.comm_us),
            "comm_least_us": rounded(parts.comm_least_us),
            "comm_least_split": parts.comm_least_split,
            "overlap_at_split": rounded(parts.overlap_at_split),
            "overlap_at_least": rounded(parts.overlap_at_least),
            "exposed_us": rounded(parts.exposed_us),
            "sweep_us": {str(split): round(us, 2) for split, us in self.sweep.items()},
            "claim": None if self.claim is None else self.claim.object(),
            "median_us": {
                name: round(us, 2)
                for name, us in self.median_us.items()
                if not name.startswith(("hand ", "split "))
            },
        }


def judge(
    split: int,
    rounds: Mapping[str, Rounds],
    last: Mapping[str, Rounds],
    cost: Cost | None,
    hand: Sequence[object] = (),
) -> Judged:
    """`rounds` of everything, and the `last` rounds of the winner and the fastest that were swept ({}: nothing was)."""
    medians = {name: median_us(launches) for name, launches in rounds.items()}
    return Judged(split, medians, claim(split, last, cost, hand) if last else None)


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


HEADER = (
    "shape | routing | fused, µs (split) | default ÷ fused | serial ÷ fused | GEMM alone, µs | fused ÷ alone "
    "| comm, µs | comm*, µs (split) | overlap | exposed, µs"
)


def table(rows: Sequence[tuple[str, str, Judged]]) -> str:
    """Markdown, one line a (shape, routing, result)."""
    lines = [f"| {HEADER} |", "|" + "---|" * (HEADER.count("|") + 1)]
    for shape, routing, one in rows:
        parts, us = one.attribution, one.median_us
        cells = [
            shape,
            routing,
            f"{one.fused_us:.1f} ({one.split})",
            f"{us[DEFAULT] / one.fused_us:.2f}",
            f"{us[one.serial] / one.fused_us:.2f} ({us[one.serial]:.0f} µs)",
            f"{us[one.alone]:.1f} ({one.alone})",
            f"{one.fused_us / us[one.alone]:.3f}",
            _us(parts.comm_us),
            f"{_us(parts.comm_least_us)} ({parts.comm_least_split})",
            f"{_share(parts.overlap_at_split)}, {_share(parts.overlap_at_least)}",
            _us(parts.exposed_us),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _us(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def curve(one: Judged) -> str:
    """The sweep in one line."""
    return " ".join(f"{split}:{us:.0f}" for split, us in one.sweep.items())
