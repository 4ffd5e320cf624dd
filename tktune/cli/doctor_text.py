"""How `tktune doctor` puts what it found: the table of a link, its topology, and one sentence of advice. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tktune.report.text import aligned, count_text

if TYPE_CHECKING:
    from tktune.core.topology_cuda import Pair, Topology
    from tktune.families.link_model import LinkFacts

SATURATED = 0.95  # of the fastest that the link was seen to go
WAY_NAMES = {
    "pull": "bulk pull",
    "push": "bulk push",
    "own": "bulk, own memory",
    "plain_pull": "ld/st pull",
    "plain_push": "ld/st push",
    "scatter": "scatter",
    "scatter_own": "scatter, own memory",
}


@dataclass(frozen=True)
class Check:
    """One thing looked at. `ok` None: it is absent and may be. `advice` says what to do when it is not ok."""

    name: str
    ok: bool | None
    found: str
    advice: str = ""


@dataclass(frozen=True)
class KnownLink:
    """Link facts with where they come from. `measured_at`: seconds since the epoch; `missing`: what just failed."""

    facts: LinkFacts
    driver: str
    toolchain: str
    host: str
    measured_at: float
    seconds: float = 0.0  # that measuring took just now; 0 when the facts are older
    gates: int = 0
    missing: tuple[str, ...] = ()

    @property
    def provenance(self) -> str:
        """When, where and under what it was measured."""
        gpus = count_text(self.facts.world, "GPU")
        when = datetime.fromtimestamp(self.measured_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
        took = f", took {self.seconds:.0f} s" if self.seconds else ""
        return (
            f"measured {when} on {self.host} ({gpus} at once, driver {self.driver}, {self.toolchain}{took})"
        )

    def to_json(self) -> dict[str, Any]:
        plain = {k: v for k, v in asdict(self).items() if k != "facts"}
        return {
            **plain,
            "missing": list(self.missing),
            "facts": self.facts.to_json(),
            "advice": advice(self.facts),
        }


# The link.


def link_table(facts: LinkFacts) -> str:
    """Every curve, a line each, by number of SMs; then the single numbers."""
    columns = sorted({count for curve in facts.curves for count in curve.sms})
    rows = [["GB/s stored by SMs", "row × rows in flight", *map(str, columns)]]
    for curve in facts.curves:
        fan = f" to {curve.fan}" if curve.way.startswith("scatter") else ""
        flight = f"{curve.row_bytes} B × {curve.slots}" if curve.slots else ""
        by_sms = dict(zip(curve.sms, curve.gb_s, strict=True))
        cells = [f"{by_sms[count]:.0f}" if count in by_sms else "" for count in columns]
        rows.append([WAY_NAMES[curve.way] + fan, flight, *cells])
    parts = [aligned(rows, right=range(2, 2 + len(columns)))] if facts.curves else []
    singles = [
        (facts.copy_engine_gb_s, "copy engine {:.0f} GB/s"),
        (facts.round_trip_us, "signal round trip {:.2f} µs"),
        (facts.launch_us, "one launch {:.1f} µs of host time"),
    ]
    found = [text.format(value) for value, text in singles if value is not None]
    if found:
        parts.append(", ".join(found))
    slower = [(count, facts.gemm_us[0][1], us) for count, us in facts.gemm_us[1:]]
    if slower:
        told = ", ".join(f"{count} SMs {100 * (us / whole - 1):+.1f} %" for count, whole, us in slower)
        parts.append(f"a grouped GEMM of {slower[0][1]:.0f} µs without {told}")
    return "\n".join(parts)


def saturated_from(points: Sequence[tuple[int, float]]) -> int:
    """The fewest SMs that reach `SATURATED` of the best rate."""
    best = max(rate for _, rate in points)
    return min(count for count, rate in points if rate >= SATURATED * best)


def advice(facts: LinkFacts) -> str:
    """One sentence: from how many SMs the link is full, what storing rows to more places costs, what SMs cost."""
    parts = []
    curve = facts.curve("pull")
    if curve is not None:
        enough = saturated_from(list(zip(curve.sms, curve.gb_s, strict=True)))
        if enough < curve.sms[-1]:
            parts.append(
                f"from {count_text(enough, 'SM')} on the link is saturated ({curve.at(enough):.0f} GB/s)"
            )
        else:
            parts.append(
                f"{count_text(enough, 'SM')} do not saturate the link yet ({curve.at(enough):.0f} GB/s)"
            )
    else:
        own = facts.curve("own")
        enough = own.sms[-1] // 4 if own is not None and own.sms[-1] >= 4 else 1
        if own is not None:
            parts.append(f"{count_text(enough, 'SM')} copy {own.at(enough):.0f} GB/s within the GPU")
    way = "scatter" if curve is not None else "scatter_own"
    one, more = facts.curve(way, 1), facts.curve(way, 4)
    if one is not None and more is not None:
        longer = 4 / more.at(enough) * one.at(enough)
        parts.append(
            f"storing each row in 4 places takes {longer:.1f} × as long as in one "
            f"({more.at(enough):.0f} GB/s gathered there)"
        )
    lost = facts.lost_share(8)
    if lost is not None:
        parts.append(f"8 SMs given away slow a GEMM by {100 * lost / (1 - lost):.1f} %")
    if not parts:
        return ""
    sentence = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]
    return f"{sentence[0].upper()}{sentence[1:]}."


# The topology.


def topology_lines(found: Topology) -> list[str]:
    """Which GPUs reach which: one line for all pairs that are alike."""
    ordered = sorted(found.pairs, key=lambda pair: (_kind(pair), pair.a, pair.b))
    lines = []
    for kind, group in groupby(ordered, key=_kind):
        pairs = list(group)
        if len(pairs) == len(found.pairs):
            who = "both GPUs" if found.gpus == 2 else f"all {found.gpus} GPUs"
        else:
            who = ", ".join(f"{pair.a}→{pair.b}" for pair in pairs)
        lines.append(f"{who}: {kind}")
    return lines


def _kind(pair: Pair) -> str:
    if not pair.access:
        return "no peer access, through host memory"
    return f"peer access over {pair.over}, {'native' if pair.native_atomics else 'no native'} atomics"


def topology_json(found: Topology) -> Mapping[str, Any]:
    pairs = [{**asdict(pair), "over": pair.over} for pair in found.pairs]
    return {"gpus": found.gpus, "driver": found.driver, "pairs": pairs}
