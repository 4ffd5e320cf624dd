"""What a config's words for the order of rows mean as numbers of a launch, for a problem and a number of blocks."""

from __future__ import annotations

import dataclasses

from tktune.core.config import Config
from tktune.core.problem import Problem
from tktune.families.cuda import dispatch_globals as mirror
from tktune.families.cuda.dispatch_globals import RowSlots
from tktune.families.dispatch_gemm.beside import WARPS, WORD
from tktune.families.dispatch_gemm.transport import is_indexed, is_push
from tktune.families.formulas import ceil_div, round_up

WAVE = 2  # tokens of a draw: few, so that they stay in order; the next draw is under way meanwhile


def token_rows(addresses: tuple[int, ...], section_bytes: int) -> tuple[int, ...]:
    """Where each rank's own rows lie: in its own section of its own memory."""
    return tuple(at + rank * section_bytes for rank, at in enumerate(addresses))


def head_of(config: Config, problem: Problem, computing: int) -> int:
    """Rows that are fetched slot by slot first: none, all, or those of the tiles that compute blocks begin with. Rows that are
    stored once, by index or by a peer that pushes them, have no slots to begin with.
    """
    if "head" in config:
        return config.number("head")
    if is_indexed(config) or is_push(config):
        return 0
    if config["order"] != "mixed":
        return mirror.ALL_ROWS if config["order"] == "slot" else 0
    tile_columns = ceil_div(problem.cols, config.number("COL_BLOCK"))
    rows = ceil_div(computing, tile_columns) * config.number("ROW_BLOCK")
    return round_up(rows, problem.pad)


def opening_of(config: Config) -> int:
    """Waves that each warp of a compute block brings: one, where the rows it waits for are the first of the queue."""
    return config.number("opening") if "opening" in config else int(config["order"] != "token")


def wave_of(config: Config) -> int:
    """Rows of a draw; one where compute blocks open, so that the first rows are spread over all of them."""
    if "wave" in config:
        return config.number("wave")
    return 1 if opening_of(config) or openers_of(config) else WAVE


def slots_of(config: Config, problem: Problem, smem_bytes: int, warps: int) -> RowSlots:
    """Slots of a communicating block of `warps` warps that has `smem_bytes`."""
    return _told(config, "", RowSlots.within(smem_bytes, 2 * problem.hidden, warps))


def beside_of(config: Config, problem: Problem, smem_bytes: int, gemm_bytes: int) -> RowSlots:
    """Slots of the warps that bring rows in a block whose GEMM takes `gemm_bytes` of its `smem_bytes`."""
    warps = config.number("beside") if "beside" in config else WARPS if config["order"] == WORD else 0
    return _told(config, "beside_", RowSlots.beside(smem_bytes, gemm_bytes, 2 * problem.hidden, warps))


def openers_of(config: Config) -> int:
    """Warps of a compute block that bring rows until its first tile can begin."""
    return config.number("openers") if "openers" in config else 0


def _told(config: Config, prefix: str, slots: RowSlots) -> RowSlots:
    """`slots` with what the config says of them; for probes, which know what fits."""
    told = {
        name: config.number(prefix + name)
        for name in ("of_warp", "pending", "unread", "pieces", "warps")
        if prefix + name in config
    }
    return dataclasses.replace(slots, **told)
