"""Compares what `tktune doctor --json` measured with recorded link facts, point by point.

    tktune doctor --measure --json > new.json
    python bench/link_compare.py new.json [--recorded bench/results/link_2026-11-29.json] [--tolerance 0.15]

Exit code 1 when a point lies outside the tolerance.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tktune.families.link_model import LinkFacts
from tktune.report.text import aligned

RECORDED = Path(__file__).resolve().parent / "results" / "link_2026-11-29.json"
Point = tuple[str, float, float]  # what, measured, recorded


def points(measured: LinkFacts, recorded: LinkFacts) -> Iterator[Point]:
    """Every number that both have."""
    for old in recorded.curves:
        new = measured.curve(old.way, old.fan, old.row_bytes)
        if new is None:
            continue
        rates = dict(zip(new.sms, new.gb_s, strict=True))
        for sms, rate in zip(old.sms, old.gb_s, strict=True):
            if sms in rates:
                yield f"{old.way} to {old.fan}, {old.row_bytes} B, {sms} SMs, GB/s", rates[sms], rate
    singles = [
        ("copy engine, GB/s", "copy_engine_gb_s"),
        ("round trip, us", "round_trip_us"),
        ("launch, us", "launch_us"),
    ]
    for what, name in singles:
        new_value, old_value = getattr(measured, name), getattr(recorded, name)
        if new_value is not None and old_value is not None:
            yield what, new_value, old_value


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measured", type=Path)
    parser.add_argument("--recorded", type=Path, default=RECORDED)
    parser.add_argument("--tolerance", type=float, default=0.15)
    words = parser.parse_args()
    try:
        measured = LinkFacts.from_json(json.loads(words.measured.read_text())["link"]["facts"])
        recorded = LinkFacts.from_json(json.loads(words.recorded.read_text())["facts"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(
            f"no link facts in these files ({error}); make the first with `tktune doctor --measure --json`"
        )
    found = list(points(measured, recorded))
    outside = [point for point in found if abs(point[1] / point[2] - 1) > words.tolerance]
    rows = [[what, f"{new:.4g}", f"{old:.4g}", f"{new / old:.2f}"] for what, new, old in outside]
    print(aligned([["outside", "measured", "recorded", "ratio"], *rows], right=(1, 2, 3)))
    print(f"{len(found) - len(outside)} of {len(found)} points are within {100 * words.tolerance:.0f} %")
    return 1 if outside or not found else 0


if __name__ == "__main__":
    sys.exit(main())
