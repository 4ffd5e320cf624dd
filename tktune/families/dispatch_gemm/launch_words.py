"""What a config's words for the order of rows mean as numbers of a launch, for a problem and a number of blocks."""

from __future__ import annotations

from tktune.core.config import Config
from tktune.core.problem import Problem
from tktune.families.cuda import dispatch_globals as mirror
from tktune.families.formulas import ceil_div, round_up

WAVE = 2  # tokens of a draw: few, so that they stay in order; the next draw is under way meanwhile


def token_rows(addresses: tuple[int, ...], section_bytes: int) -> tuple[int, ...]:
    """Where each rank's own rows lie: in its own section of its own memory."""
    return tuple(at + rank * section_bytes for rank, at in enumerate(addresses))


def head_of(config: Config, problem: Problem, computing: int) -> int:
    """Rows that are fetched slot by slot first: none, all, or those of the tiles that compute blocks begin with."""
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
    return 1 if opening_of(config) else WAVE
