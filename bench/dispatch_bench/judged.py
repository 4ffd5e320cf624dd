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


def fastest(rounds: Mapping[str, Rounds], names: Sequence[str], count: int) -> list[str]:
    """The `count` of `names` with the smallest medians, fastest first."""
    there = [name for name in names if name in rounds]
    return sorted(there, key=lambda name: (median_us(rounds[name]), name))[:count]


@dataclass(frozen=True)
class Claim:
    """Is the tuner's split the sweep's best, and at what cost? `ratio` is winner ÷ best, both measured side by side
    after the sweep had named the best; `noise` the winner against itself in the same rounds.
    """

    split: int
    best_split: int
    ratio: float
    noise: float
    cost: Cost | None

    @property
    def band(self) -> float:
        return tie_band(self.noise)

    @property
    def as_fast(self) -> bool:
        return self.ratio <= 1.0 + self.band

    @property
    def sentence(self) -> str:
        how = "is" if self.as_fast else "is NOT"
        said = (
            f"The tuner's split {self.split} {how} within {self.band:.1%} of the sweep's best, {self.best_split}: "
            f"measured side by side it takes {self.ratio:.3f} × its time."
        )
        if self.cost is None:
            return f"{said} What finding it cost is not known: no winner of this problem is stored."
        c = self.cost
        bases = (
            (c.on_line, c.line, "splits of this build and launch"),
            (
                c.measured,
                c.tried,
                f"configs that sweeping every launch value of its {c.tried_builds} builds takes",
            ),
            (c.measured, c.space, "feasible configs"),
        )
        told = "; ".join(
            f"{done} of {of} {what} ({done / of:.1%}, {'at most' if done <= QUARTER * of else 'MORE than'} a quarter)"
            for done, of, what in bases
        )
        return f"{said} It had measured {told}."

    def object(self) -> dict[str, Any]:
        cost = None
        if self.cost is not None:
            c = self.cost
            cost = {
                "measured": c.measured,
                "measured_on_line": c.on_line,
                "line": c.line,
                "tried_builds": c.tried_builds,
                "every_launch_of_tried_builds": c.tried,
                "space": c.space,
                "at_most_a_quarter_of": {
                    "line": c.on_line <= QUARTER * c.line,
                    "every_launch_of_tried_builds": c.measured <= QUARTER * c.tried,
                    "space": c.measured <= QUARTER * c.space,
                },
            }
        return {
            "split": self.split,
            "best_split": self.best_split,
            "winner_over_best": round(self.ratio, 4),
            "noise": round(self.noise, 4),
            "band": round(self.band, 4),
            "within_band": self.as_fast,
            "cost": cost,
            "sentence": self.sentence,
        }


def claim(split: int, rounds: Mapping[str, Rounds], cost: Cost | None) -> Claim:
    """Of the last rounds, which hold the winner twice and the fastest of the sweep. The winner's own split is one of
    them where the sweep found none faster; then it is compared with itself, as it was measured for the sweep.
    """
    by_round = {name: [statistics.median(one) for one in launches] for name, launches in rounds.items()}
    swept = [name for name in by_round if name.startswith("split ")]
    best = min(swept, key=lambda name: (statistics.median(by_round[name]), name))
    return Claim(
        split,
        int(best.removeprefix("split ")),
        paired_ratio(by_round[WINNER], by_round[best]),
        measured_noise(by_round[WINNER], by_round[AGAIN]),
        cost,
    )


@dataclass(frozen=True)
class Judged:
    """One (shape, routing, launch mode): medians in microseconds."""

    split: int
    median_us: Mapping[str, float]
    claim: Claim

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
        least = min(comm, key=lambda split: (comm[split], split))
        return Attribution(
            self.fused_us,
            self.median_us[COMP],
            comm.get(self.split),
            comm[least],
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
            "claim": self.claim.object(),
            "median_us": {name: round(us, 2) for name, us in self.median_us.items()},
        }


def judge(split: int, rounds: Mapping[str, Rounds], last: Mapping[str, Rounds], cost: Cost | None) -> Judged:
    """`rounds` of everything, and the `last` rounds of the winner and the fastest of the sweep."""
    return Judged(
        split, {name: median_us(launches) for name, launches in rounds.items()}, claim(split, last, cost)
    )


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
