"""The set of the dispatch probe that compares who brings the rows: blocks of their own, as before and with slots freed
when they are read, warps beside each block's computing, and both. No CUDA here.
"""

from __future__ import annotations

import itertools
from typing import Any

from tktune.core.problem import Problem

TALL = {"ROW_BLOCK": 256, "COL_BLOCK": 192, "STAGES": 3, "MMA_DEPTH": 0, "DRAW": "dispenser"}
VARIANTS: dict[str, dict[str, Any]] = {
    "old gathered": TALL,  # built from the sources of before (--old)
    "tall gathered": TALL,
    "pingpong-4 gathered": {
        "MAIN_LOOP": "wgmma_pingpong",
        "COL_BLOCK": 192,
        "STAGES": 4,
        "OUT_SLOTS": 3,
        "DRAW": "dispenser",
    },
}
BEST_SPLITS = {"A": 12, "B": 24, "C": 32, "D": 32, "small": 16}  # of blocks alone (bench/NOTES.md)
FINE_PIECES = {"A": 4, "B": 4, "C": 8, "D": 2}  # of a row, in slots of half the size
TOKEN: dict[str, Any] = {"order": "token", "opening": 0}
OPENED: dict[str, Any] = {"order": "token", "opening": 1}
MIXED: dict[str, Any] = {"order": "mixed", "opening": 1}


def blocks_alone(shape: str) -> list[dict[str, Any]]:
    """Rows by blocks of their own, at splits around the best."""
    best = BEST_SPLITS[shape]
    return [{**order, "num_comm_sms": c} for order in (MIXED, OPENED) for c in (best * 3 // 4, best)]


def beside(shape: str, problem: Problem) -> list[dict[str, Any]]:
    """Rows by warps beside the computing, with few blocks of their own or none; before it, blocks bring none, one wave,
    or rows until their first tile can begin.
    """
    made: list[dict[str, Any]] = [
        {**order, "num_comm_sms": split, "beside": 2}
        for split, order in itertools.product((0, 4), (TOKEN, OPENED, MIXED))
    ]
    made += [
        {**order, "num_comm_sms": split, "beside": 2, "opening": 0, "openers": warps}
        for order, split, warps in itertools.product((TOKEN, MIXED), (0, 4), (1, 2, 4, 8, 12))
    ]
    for warps in (2, 4, 8):
        few = {"of_warp": 1, "unread": 0, "openers": warps}
        made += [{**TOKEN, "num_comm_sms": c, "beside": 2, **few} for c in (0, 8)]
        made += [{**TOKEN, "num_comm_sms": 0, "beside": 1, "openers": warps}]
        made += [{**TOKEN, "num_comm_sms": 0, "beside": 2, "openers": warps, "wave": 2}]
        made += [{**TOKEN, "num_comm_sms": BEST_SPLITS[shape] * 3 // 4, "openers": warps}]
    return made


def launches(name: str, shape: str, problem: Problem) -> list[dict[str, Any]]:
    if name.startswith("old"):  # its `pending` are rows that hold their slot
        return [{**launch, "pending": 1} for launch in blocks_alone(shape)]
    return [*blocks_alone(shape), *beside(shape, problem)]


def gated(name: str, shape: str, problem: Problem) -> list[dict[str, Any]]:
    """What is checked before anything is timed: every launch on the small shape, then one in four."""
    all_of_them = launches(name, shape, problem)
    if shape == "small" or name.startswith("old"):
        return all_of_them
    return [*all_of_them[::4], all_of_them[-1]]


def parts(name: str, shape: str) -> list[tuple[str, dict[str, Any]]]:
    """Modes and launches that say what a fused time is made of: `ungated` has its rows in place, and waits for none."""
    if name != "tall gathered":
        return []
    made = [
        {**TOKEN, "num_comm_sms": 0, "beside": 2},
        {**OPENED, "num_comm_sms": 0, "beside": 2},
        {**TOKEN, "num_comm_sms": 0, "beside": 2, "openers": 2},
        {**TOKEN, "num_comm_sms": 0, "beside": 2, "openers": 8},
        {**OPENED, "num_comm_sms": BEST_SPLITS[shape]},
    ]
    return [*[("ungated", launch) for launch in made], ("ungated", {**TOKEN, "num_comm_sms": 0})]
