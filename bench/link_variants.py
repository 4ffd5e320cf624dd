"""What the link's rates depend on: warps and row slots of a block, stores left pending, and the size of what is read and
written. Two GPUs; a table comes last.

    python bench/link_variants.py --out OUT.json
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tktune.build.cache import ArtifactCache
from tktune.core.config import Config
from tktune.core.device_cuda import cuda_device_classes
from tktune.families.link_probe import space
from tktune.gang.gang import Gang
from tktune.gang.link_survey import DEADLINES, POLICY
from tktune.report.text import aligned

# Larger than the probe's own, so that footprints can be varied below them.
space.SOURCE_BYTES, space.TARGET_BYTES = 1 << 30, 1 << 31
_whole_rows_within = space.rows_within
_limits: dict[int, int] = {}


def _rows_within(nbytes: int, row_bytes: int) -> int:
    return _whole_rows_within(_limits.get(nbytes, nbytes), row_bytes)


space.rows_within = _rows_within

USUAL = {"warps": 4, "slots": 7, "pending": 3, "source_mb": 128, "target_mb": 256}
# (changes, bytes of a row)
VARIANTS: list[tuple[dict[str, int], int]] = [
    ({}, 8192),
    ({"slots": 6}, 8192),
    ({"slots": 3, "pending": 1}, 8192),
    ({"warps": 12, "slots": 2, "pending": 1}, 8192),
    ({"warps": 12, "slots": 1, "pending": 0}, 8192),
    ({"warps": 16, "slots": 1, "pending": 0}, 8192),
    ({"warps": 1, "slots": 24, "pending": 8}, 8192),
    ({"warps": 1, "slots": 24, "pending": 0}, 8192),
    ({"pending": 0}, 8192),
    ({"slots": 4, "pending": 2}, 14336),
    ({"warps": 15, "slots": 1, "pending": 0}, 14336),
    ({"source_mb": 16}, 8192),
    ({"source_mb": 1024}, 8192),
    ({"target_mb": 32}, 8192),
    ({"target_mb": 2048}, 8192),
    ({"source_mb": 1024, "target_mb": 2048}, 8192),
]
POINTS = [("pull", 1, 1), ("pull", 1, 8), ("scatter", 1, 8), ("scatter", 4, 8), ("scatter", 4, 32), ("scatter_own", 1, 32), ("scatter_own", 4, 32)]  # fmt: skip
PLAIN = [("plain_pull", slots, sms) for slots in (4, 8) for sms in (1, 8)]
PLAIN += [("plain_push", slots, sms) for slots in (4, 8) for sms in (1, 8)]


class Variants(space.LinkProbe):
    """The probe, told by its config how a block shares its memory."""

    def workbench(self, seat: Any) -> Any:
        from tktune.families.link_probe.launch_cuda import LinkWorkbench

        class Bench(LinkWorkbench):
            def _slots(self, config: Config, smem_bytes: int) -> tuple[int, int, int]:
                return config.number("warps"), config.number("slots"), config.number("pending")

            def time(self, config: Config, *words: Any) -> list[float]:
                _limits[space.SOURCE_BYTES] = config.number("source_mb") << 20
                _limits[space.TARGET_BYTES] = config.number("target_mb") << 20
                return super().time(config, *words)

        return Bench(seat)


FAMILY = Variants()


def measured(gang: Gang, way: str, fan: int, sms: int, row_bytes: int, **how: int) -> float:
    config = Config(way=way, fan=fan, sms=sms, row_bytes=row_bytes, **{**USUAL, **how})
    outcome = gang.time(config, "comm", 0, 5)
    if not outcome.ok:
        sys.exit(f"{config}: {outcome.sentence}")
    return space.stored_bytes(config) / statistics.median(outcome.worst_us) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    device = cuda_device_classes()[0]
    problem = dataclasses.replace(space.probe_problem(2), family="link_variants:FAMILY")
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        (built,) = ArtifactCache(Path(folder)).build([FAMILY.build_spec(space.LINK_BUILD, problem, device)])
        if built.artifact is None:
            sys.exit(built.error_sentence)
        with Gang(problem, device, POLICY, deadlines=DEADLINES) as gang:
            outcome = gang.load(built.artifact.path, built.artifact.sha256, space.LINK_BUILD)
            if not outcome.ok:
                sys.exit(outcome.sentence)
            for changes, row_bytes in VARIANTS:
                for way, fan, sms in POINTS:
                    rate = measured(gang, way, fan, sms, row_bytes, **changes)
                    found.append({**USUAL, **changes, "row_bytes": row_bytes, "way": way, "fan": fan, "sms": sms, "gb_s": round(rate, 2)})  # fmt: skip
            for way, pieces, sms in PLAIN:
                rate = measured(gang, way, 1, sms, 8192, slots=pieces)
                found.append({"way": way, "thread_pieces": pieces, "sms": sms, "gb_s": round(rate, 2)})
    out.write_text(
        json.dumps({"date": time.strftime("%Y-%m-%d"), "device": str(device), "points": found}, indent=1)
    )
    rows = [["GB/s", "row", *(f"{way} to {fan}, {sms} SMs" for way, fan, sms in POINTS)]]
    rates = iter(found)
    for changes, row_bytes in VARIANTS:
        name = " ".join(f"{key} {value}" for key, value in changes.items()) or "usual"
        rows.append([name, str(row_bytes), *(f"{next(rates)['gb_s']:.0f}" for _ in POINTS)])
    print(aligned(rows, right=range(1, 2 + len(POINTS))))
    print(
        ", ".join(
            f"{one['way']} {one['thread_pieces']} pieces, {one['sms']} SMs: {one['gb_s']:.0f}"
            for one in rates
        )
    )


if __name__ == "__main__":
    main()
