"""What gemm_combine's spaces of both backends share: the form, the order of the sums, and who moves how many rows. Pure."""

from __future__ import annotations

from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.core.space import Parameter
from tktune.families.formulas import rank_rows, wanted_tokens

FORM = Parameter(
    "form",
    ("prereduce", "pull"),
    "launch",
    "a token's rows are summed where they are and one row is pushed, or they are pulled to the token's rank",
)
ORDER = Parameter(
    "order",
    ("ready", "remote", "token"),
    "launch",
    "sums in the order in which their rows land; the same, own tokens last; or token by token",
)
WALK = Parameter(
    "walk",
    ("experts", "columns"),
    "launch",
    "the GEMM and the sums go from expert to expert, or take all experts once for each announced run of columns",
)
SPLIT_MEANING = "of a rank that sum from the start; the others compute first"
REDUCERS_MEANING = "that add the partial rows of all ranks in the end"


def canonical(config: Config, problem: Problem, fewest_reducers: int) -> Config:
    """Pulling has no reduce; where all tokens are own, leaving own ones for last changes nothing."""
    if config["form"] == "pull" and config["num_reduce_sms"] != fewest_reducers:
        config = config.replace(num_reduce_sms=fewest_reducers)
    if config["order"] == "remote" and problem.world == 1:
        config = config.replace(order="ready")
    return config


def one_walk(config: Config) -> Config:
    """A walk over one run of columns is one over experts."""
    if config["walk"] == "columns" and config["signal_groups"] == 1:
        return config.replace(walk="experts")
    return config


def moved_rows(config: Config, problem: Problem) -> tuple[float, float, float]:
    """Expected rows that one rank's sums read and write, and its reduce reads and writes, under even routing."""
    if config["form"] == "pull":
        return float(problem.tokens * problem.top_k), float(problem.tokens), 0.0
    partial = wanted_tokens(problem)
    return rank_rows(problem), 2 * partial, partial + problem.tokens  # a slot, then the push


def groups_divide(config: Config, problem: Problem, device: DeviceClass) -> str | None:
    """Runs of announced columns are equal; more than one needs whole column tiles."""
    block, groups = config.number("COL_BLOCK"), config.number("signal_groups")
    if groups == 1 or problem.cols % (block * groups) == 0:
        return None
    return f"{problem.cols} columns in tiles of {block} cannot be announced in {groups} equal runs"
