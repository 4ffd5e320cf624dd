"""The sweep that the tuner is held against: what whoever tunes this kernel by hand would run, in full. Pure.

Three tiles that were found by hand (`bench/dispatch_probe/plan.py`), each with every way to bring rows and both ways to draw
tasks; and of each of these builds every order, raster and split. What else a space has stays at its default.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from tktune.core.config import Config
from tktune.core.space import Space

TILES: dict[str, dict[str, Any]] = {
    "wide": {},  # 128 × 256, shared by two warpgroups
    "tall": {"ROW_BLOCK": 256, "COL_BLOCK": 192, "STAGES": 3, "MMA_DEPTH": 0},
    "pingpong": {"MAIN_LOOP": "wgmma_pingpong", "COL_BLOCK": 192, "STAGES": 5, "OUT_SLOTS": 3},
}
FORMS = ("ACTIVATIONS", "TRANSPORT", "DRAW")
LAUNCHES = ("num_comm_sms", "order", "raster_rows")


def hand_builds(space: Space) -> list[Config]:
    """The build parts of the sweep that `space` has; [] for a space without these tiles."""
    return list(dict.fromkeys(map(space.build_part, hand_sweep(space))))


def hand_sweep(space: Space) -> tuple[Config, ...]:
    """Every config of the sweep, those of one build side by side."""
    if "MAIN_LOOP" not in space.default:
        return ()
    found: dict[Config, None] = {}
    for tile, form in itertools.product(TILES.values(), _values(space, FORMS)):
        for launch in _values(space, LAUNCHES):
            config = space.canonical(space.default.replace(**tile, **form, **launch))
            if space.is_feasible(config):
                found[config] = None
    return tuple(found)


def _values(space: Space, names: Sequence[str]) -> list[dict[str, Any]]:
    """Every combination of what the space has for these names."""
    swept = [p for p in space.parameters if p.name in names]
    return [
        dict(zip((p.name for p in swept), values, strict=True))
        for values in itertools.product(*(p.values for p in swept))
    ]
