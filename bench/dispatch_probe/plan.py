"""What the dispatch probe runs: the shapes, the built variants and the launches of each. No CUDA here."""

from __future__ import annotations

import itertools
from typing import Any

import beside

from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.families.base import family

SHAPES = {  # bench/NOTES.md: A to D
    "A": {"hidden": 4096, "cols": 3072, "experts": 64, "top_k": 8, "tokens": 512},
    "B": {"hidden": 4096, "cols": 3072, "experts": 64, "top_k": 8, "tokens": 2048},
    "C": {"hidden": 7168, "cols": 2048, "experts": 64, "top_k": 8, "tokens": 2048},
    "D": {"hidden": 2048, "cols": 768, "experts": 128, "top_k": 8, "tokens": 2048},
}
SMALL = {"hidden": 512, "cols": 768, "experts": 16, "top_k": 4, "tokens": 200}

TILES: dict[str, dict[str, Any]] = {
    "wide": {"DRAW": "dispenser"},
    "tall": {"ROW_BLOCK": 256, "COL_BLOCK": 192, "STAGES": 3, "MMA_DEPTH": 0, "DRAW": "dispenser"},
    "pingpong": {
        "MAIN_LOOP": "wgmma_pingpong",
        "COL_BLOCK": 192,
        "STAGES": 5,
        "OUT_SLOTS": 3,
        "DRAW": "dispenser",
    },
}
VARIANTS = {
    f"{tile} {form}": {**words, "ACTIVATIONS": form}
    for tile, words in TILES.items()
    for form in ("gathered", "indexed")
}
REHEARSED: dict[str, dict[str, Any]] = {"mma_sync gathered": {"WARP_M": 64, "DRAW": "dispenser"}}
SPLITS = (4, 8, 12, 16, 24, 32)
# What a launch is told beside its split. `own_first`: experts that begin with their blocks of own rows.
LAUNCHES: dict[str, list[dict[str, Any]]] = {
    "gathered": [
        {"order": "token", "opening": 0},
        {"order": "mixed", "opening": 1},
        {"order": "slot", "opening": 1},
    ],
    "indexed": [
        {"order": "token", "opening": 0},
        {"order": "token", "opening": 1, "wave": 1},
        {"order": "token", "opening": 0, "own_first": 4},
        {"order": "token", "opening": 0, "own_first": 8},
    ],
}
# The class that rehearses sm_120a on Hopper devices.
REHEARSAL = DeviceClass("cuda", "sm_90", 110, 101376, 50331648, "nvlink", remote_atomics=False)


def problem_of(shape: str, layout: str) -> Problem:
    fields = SMALL if shape == "small" else SHAPES[shape]
    return Problem("dispatch_gemm", **fields, world=2, weight_layout=layout)


def configs_of(problem: Problem, device: DeviceClass, chosen: str) -> dict[str, Config]:
    """Each variant's default launch in the set `chosen`, without those that the space refuses for this problem."""
    space = family("dispatch_gemm").space(problem, device)
    named = VARIANTS if device.arch == "sm_90a" else REHEARSED
    if chosen == "beside":
        named = beside.VARIANTS
    made = {name: space.default.replace(**changes) for name, changes in named.items()}
    return {name: config for name, config in made.items() if not space.broken(config)}


def form_of(name: str) -> str:
    return name.split()[1]


def launches_of(form: str, splits: list[int]) -> list[dict[str, Any]]:
    return [{**launch, "num_comm_sms": c} for c, launch in itertools.product(splits, LAUNCHES[form])]
