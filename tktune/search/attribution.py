"""Where the winner's time goes: compute alone, communication alone at the winner's split and at its best one, the
serial baseline and the fastest library GEMM, all in the same harness and interleaved with the fused kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from tktune.core.config import Config
from tktune.gang.gang import Gang
from tktune.search.finalists import Finalist
from tktune.store.rows import AttributionRow

ROUNDS = 5
SPLIT = "num_comm_sms"


@dataclass(frozen=True)
class Attribution:
    """Medians in microseconds; None where a mode could not be measured or the family has no communication.

    `comm_us` is communication alone at the winner's split, `comm_least_us` its minimum over splits, reached at
    `comm_least_split`. Definitions: design, "Judging".
    """

    fused_us: float | None = None
    comp_us: float | None = None
    comm_us: float | None = None
    comm_least_us: float | None = None
    comm_least_split: int | None = None
    serial_us: float | None = None
    peer_us: float | None = None

    @property
    def overlap_at_split(self) -> float | None:
        return overlap_efficiency(self.comp_us, self.comm_us, self.fused_us)

    @property
    def overlap_at_least(self) -> float | None:
        return overlap_efficiency(self.comp_us, self.comm_least_us, self.fused_us)

    @property
    def exposed_us(self) -> float | None:
        """Communication that compute does not hide: fused − comp."""
        return None if self.fused_us is None or self.comp_us is None else self.fused_us - self.comp_us


def overlap_efficiency(comp_us: float | None, comm_us: float | None, fused_us: float | None) -> float | None:
    """(comp + comm − fused) ÷ min(comp, comm): 1 when the shorter one is hidden whole, 0 when nothing is."""
    if comp_us is None or comm_us is None or fused_us is None or min(comp_us, comm_us) <= 0:
        return None
    return (comp_us + comm_us - fused_us) / min(comp_us, comm_us)


def splits_of(winner: Config, points: Sequence[Config]) -> list[Config]:
    """The feasible configs of the winner's build that differ from it at most in their split, by split."""
    if SPLIT not in winner:
        return []
    others = [name for name in winner if name != SPLIT]
    same = [point for point in points if point.only(others) == winner.only(others)]
    return sorted(same, key=lambda point: point.number(SPLIT))


def attribute(
    gang: Gang,
    winner: Finalist,
    points: Sequence[Config],
    seed: int,
    iterations: int,
    time_is_up: Callable[[], bool],
    by_best: bool = False,
) -> tuple[Attribution | None, list[AttributionRow], list[str]]:
    """Measure every mode of the winner in interleaved rounds; `points` are the feasible configs of its build.

    With `by_best` only the best launch of each round counts, as it did for the finalists of a disturbed machine.
    A mode that the family refuses is left out; one that fails too, with a sentence in the third result. Raises
    `GangError` when no gang can be had.
    """
    splits = splits_of(winner.config, points)
    runs: dict[tuple[str, Config], list[float]] = {("fused", winner.config): [], ("comp", winner.config): []}
    if splits:
        runs |= {("comm", point): [] for point in splits}
        runs["serial", winner.config] = []
    runs["peer", winner.config] = []
    notes: list[str] = []
    for number in range(ROUNDS):
        order = list(runs)
        for mode, config in reversed(order) if number % 2 else order:
            outcome = gang.load(winner.artifact.path, winner.artifact.sha256, winner.build)
            if outcome.ok:
                outcome = gang.time(config, mode, seed, iterations)
            if outcome.ok:
                runs[mode, config] += [min(outcome.worst_us)] if by_best else outcome.worst_us
            else:
                del runs[mode, config]
                if outcome.status.startswith("refused:"):
                    continue  # the family has no such mode
                notes.append(f"{mode} of the winner could not be measured: {outcome.sentence}")
        if number and time_is_up():
            break
    times = {run: median(samples) for run, samples in runs.items() if samples}
    rows = [
        AttributionRow(
            winner.config,
            winner.artifact.digest,
            mode,
            config.number(SPLIT) if SPLIT in config else None,
            times[mode, config],
            tuple(runs[mode, config]),
        )
        for mode, config in times
    ]
    return attribution_of(rows, winner.config), rows, notes


def attribution_of(rows: Sequence[AttributionRow], winner: Config) -> Attribution | None:
    """Put stored rows of one session together; None when they do not tell the fused time."""
    split = winner.get(SPLIT)
    alone = {row.mode: row.time_us for row in rows if row.split is None or row.split == split}
    if "fused" not in alone:
        return None
    comm = {row.split: row.time_us for row in rows if row.mode == "comm" and row.split is not None}
    least = min(comm, key=lambda split: (comm[split], split)) if comm else None
    return Attribution(
        alone["fused"],
        alone.get("comp"),
        alone.get("comm"),
        None if least is None else comm[least],
        least,
        alone.get("serial"),
        alone.get("peer"),
    )
