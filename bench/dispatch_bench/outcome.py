"""From the ranks' files to the result: what is written as JSON and what is printed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from two_gpus.driver import by_rank, mode_title, shared_modes

from dispatch_bench.judged import Judged, curve, hand_name, judge, slowest, table
from dispatch_bench.wanted import Wanted
from tktune.core.problem import Problem
from tktune.search.attribution import SPLIT


def shape_text(problem: Problem) -> str:
    return f"{problem.hidden} × {problem.cols}, {problem.experts} experts, top-{problem.top_k}, {problem.tokens} tokens"


def results(
    cases: Sequence[Wanted], found: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[tuple[int, str, Judged]]]:
    """JSON of every case that all ranks finished, and (case, mode, judged) of each of its modes."""
    shown, judged = [], []
    for number, case in enumerate(cases):
        of_ranks = by_rank(found, number)
        if not of_ranks:
            continue
        modes = {}
        for mode in shared_modes(of_ranks):
            one = judge(
                case.winner.number(SPLIT),
                slowest([rank["modes"][mode]["rounds"] for rank in of_ranks]),
                slowest([rank["modes"][mode]["last"] for rank in of_ranks]),
                case.cost,
                case.hand,
            )
            judged.append((number, mode, one))
            after = [rank["modes"][mode]["wrong_after"] for rank in of_ranks]
            modes[mode] = {**one.object(), "wrong_after_timing": [said for said in after if said]}
        shown.append(
            {
                "problem": case.problem.key,
                "real_rows": [rank["real_rows"] for rank in of_ranks],
                "padded_rows": [rank["padded_rows"] for rank in of_ranks],
                "provenance": case.provenance,
                "winner": dict(case.winner),
                "default": dict(case.default),
                "grouped_gemm_winner": None if case.gemm is None else dict(case.gemm),
                "notes": case.notes,
                "wrong": [rank["wrong"] for rank in of_ranks],
                "seconds": of_ranks[0]["seconds"],
                "hand_sweep": hand_times(case, of_ranks),
                "modes": modes,
            }
        )
    return shown, judged


def hand_times(case: Wanted, of_ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Microseconds of each config of the sweep that is made by hand, slowest rank, from its few launches."""
    times = [rank.get("hand_us", {}) for rank in of_ranks]
    named = {hand_name(number): str(config) for number, config in enumerate(case.hand)}
    return {
        named[name]: round(max(one[name] for one in times), 1)
        for name in times[0]
        if all(name in t for t in times)
    }


def summary(cases: Sequence[Wanted], judged: Sequence[tuple[int, str, Judged]]) -> str:
    parts = []
    for mode in dict.fromkeys(mode for _, mode, _ in judged):
        rows = [
            (shape_text(cases[number].problem), cases[number].problem.routing, one)
            for number, of_mode, one in judged
            if of_mode == mode
        ]
        parts.append(f"{mode_title(mode)}\n\n{table(rows)}\n")
        for shape, routing, one in rows:
            if one.claim is not None:
                parts.append(f"{shape}, {routing}, sweep: {curve(one)}\n  {one.claim.sentence}")
    return "\n".join(parts)
