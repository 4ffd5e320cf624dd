"""From ranks' samples to the table: medians by the slowest rank, the serial path's better form, and the bound. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

LAYER, IN_PLACE = "layer", "layer, rows in place"
SERIAL = "serial, "
FORMS = ("index_add", "gather and weighted sum")
GEMM1, GEMM2, TABLES, BARRIERS, REDUCE = "GEMM 1 alone", "GEMM 2 alone", "tables", "barriers", "final reduce"
PARTS = (GEMM1, GEMM2, TABLES, BARRIERS, REDUCE)
ASKED_OF_BOUND, ASKED_OF_SERIAL = 0.92, 1.25
FROM_TOKENS = 2048  # where a ratio to serial is asked

Rounds = Sequence[Sequence[float]]  # launches of each round, microseconds


def slowest_us(of_ranks: Sequence[Rounds]) -> float:
    """Each launch by its slowest rank, the median launch of each round, the median round."""
    rounds = [median(max(launch) for launch in zip(*one, strict=True)) for one in zip(*of_ranks, strict=True)]
    return median(rounds)


@dataclass(frozen=True)
class Row:
    """Times of one model and number of tokens, microseconds by name."""

    us: Mapping[str, float]
    tokens: int

    @property
    def serial_us(self) -> float:
        """The faster of the two forms."""
        return min(self.us[f"{SERIAL}{form}"] for form in FORMS)

    @property
    def parts_us(self) -> float:
        return sum(self.us[part] for part in PARTS)

    @property
    def bound(self) -> float:
        """What serial ÷ layer could be if all communication were hidden."""
        return self.serial_us / self.parts_us

    @property
    def speedup(self) -> float:
        return self.serial_us / self.us[LAYER]

    @property
    def of_bound(self) -> float:
        return self.speedup / self.bound

    @property
    def reached(self) -> bool:
        enough = self.tokens < FROM_TOKENS or self.speedup >= ASKED_OF_SERIAL
        return enough and self.of_bound >= ASKED_OF_BOUND

    def facts(self) -> dict[str, Any]:
        return {
            "us": dict(self.us),
            "serial_us": self.serial_us,
            "bound": self.bound,
            "serial_over_layer": self.speedup,
            "share_of_bound": self.of_bound,
            "reached": self.reached,
        }


def table(rows: Sequence[tuple[str, Row]]) -> str:
    """One line a row, for people."""
    heads = ["", "layer", "in place", *(f"serial {form.split()[0]}" for form in FORMS)]
    heads += ["GEMM 1", "GEMM 2", "tables", "barriers", "reduce", "serial/layer", "bound", "of bound", ""]
    lines = [heads]
    for name, row in rows:
        times = [LAYER, IN_PLACE, *(f"{SERIAL}{form}" for form in FORMS), *PARTS]
        ratios = [f"{row.speedup:.2f}", f"{row.bound:.2f}", f"{row.of_bound:.3f}"]
        us = [f"{row.us[what]:.1f}" for what in times]
        lines.append([name, *us, *ratios, "ok" if row.reached else "short"])
    widths = [max(len(line[at]) for line in lines) for at in range(len(heads))]
    return "\n".join(
        "  ".join(
            cell.ljust(w) if not at else cell.rjust(w)
            for at, (cell, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
