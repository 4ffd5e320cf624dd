"""Which configs a layer's two kernels run: the winner of the pair, else both kernels' own at one pad, else defaults."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tktune.core.errors import NothingFeasible
from tktune.core.problem import Problem
from tktune.moe.parts import COMBINE, DISPATCH, FAMILY_NAME, PARTS, part_config, part_problem, part_problems
from tktune.runtime.choice import Choice
from tktune.runtime.lookup import PADS, lookup

Find = Callable[[Problem, int | None], Choice]


@dataclass(frozen=True)
class LayerChoice:
    """The configs of both kernels and where they come from.

    `pair` is the choice for the layer itself when a winner of the pair is what runs, else None. Both parts have one pad.
    """

    dispatch: Choice
    combine: Choice
    pair: Choice | None = None

    @property
    def parts(self) -> dict[str, Choice]:
        return {DISPATCH: self.dispatch, COMBINE: self.combine}

    @property
    def problem(self) -> Problem:
        """The layer, at the chosen pad."""
        of = self.combine.problem
        return of.replace(family=FAMILY_NAME, hidden=of.cols, cols=of.hidden)

    def explain(self) -> str:
        """Why these configs, in sentences."""
        if self.pair is not None:
            return self.pair.explain()
        return (
            f"The pair of kernels was not tuned together for {self.problem}; tktune run on a study of the family {FAMILY_NAME} "
            f"does that. Dispatch: {self.dispatch.explain()} Combine: {self.combine.explain()}"
        )

    def as_record(self) -> dict[str, Any]:
        """In JSON values, as one rank sends it to the others."""
        return {
            **{part: choice.as_record() for part, choice in self.parts.items()},
            "pair": None if self.pair is None else self.pair.as_record(),
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> LayerChoice:
        pair = record["pair"]
        return cls(
            Choice.from_record(record[DISPATCH]),
            Choice.from_record(record[COMBINE]),
            None if pair is None else Choice.from_record(pair),
        )


def choose(layer: Problem, *, any_pad: bool, policy: str, device: Any, db: Any) -> LayerChoice:
    """The choice for `layer`, at its own pad or, with `any_pad`, at the pad that is fastest. Reads, never tunes.

    Raises as `tktune.lookup` does.
    """

    def find(problem: Problem, pad: int | None) -> Choice:
        return lookup(
            problem.family,
            hidden=problem.hidden,
            cols=problem.cols,
            experts=problem.experts,
            top_k=problem.top_k,
            tokens=problem.tokens,
            world=problem.world,
            dtype=problem.dtype,
            weight_layout=problem.weight_layout,
            routing=problem.routing,
            pad=pad,
            policy=policy,
            device=device,
            db=db,
            finish=problem.finish,
        )

    pair = find(layer, None if any_pad else layer.pad)
    if pair.provenance != "default":
        return _of_pair(pair)
    pads = [layer.pad]
    if any_pad:  # those that the kernels' own winners have, and the usual one
        pads = [find(problem, None).problem.pad for problem in part_problems(layer).values()] + [PADS[0]]
    return _of_kernels(layer, list(dict.fromkeys(pads)), find)


def _of_pair(pair: Choice) -> LayerChoice:
    parts = []
    for part in PARTS:
        one = dataclasses.replace(
            pair,
            config=part_config(pair.config, part),
            time_us=None,
            problem=part_problem(pair.problem, part),
            artifact_digest=None,
            measured_on=None if pair.measured_on is None else part_problem(pair.measured_on, part),
        )
        parts.append(one)
    return LayerChoice(parts[0], parts[1], pair)


_RANKS = {"exact": 0, "near": 1, "default": 2}


def _of_kernels(layer: Problem, pads: Sequence[int], find: Find) -> LayerChoice:
    """The best pad is the one whose worse provenance is best, then the one whose kernels take the least time together."""
    best: tuple[tuple[int, float, int], LayerChoice] | None = None
    failure: NothingFeasible | None = None
    for number, pad in enumerate(pads):
        try:
            one = LayerChoice(*(find(p, pad) for p in part_problems(layer.replace(pad=pad)).values()))
        except NothingFeasible as error:
            failure = failure or error
            continue
        times = [choice.time_us or 0.0 for choice in one.parts.values()]
        rank = (max(_RANKS[choice.provenance] for choice in one.parts.values()), sum(times), number)
        if best is None or rank < best[0]:
            best = (rank, one)
    if best is None:
        assert failure is not None
        raise failure
    return best[1]
