"""A report as Markdown that also reads well as plain text. Shows facts of `model`; computes and reads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tktune.moe.parts import is_layer
from tktune.report.model import Attribution, ProblemReport, Report, RunTime, SpacePicture, lookup_command
from tktune.report.text import bar, count_text, ratio_text, seconds_text, time_text

TOP = 10


def markdown(report: Report) -> str:
    """The whole report."""
    parts = [f"# {report.title}", ""]
    parts += [f"Made {report.made_at} by {report.made_by} from `{report.database}`.", ""]
    parts += [f"- {note}" for note in report.notes] + ([""] if report.notes else [])
    if len(report.problems) > 1:
        parts += [_overview(report.problems), ""]
    for number, problem in enumerate(report.problems, 1):
        parts += [_problem(number, problem), ""]
    parts += ["## Make it again", "", "```", report.command, "```"]
    return "\n".join(parts).rstrip() + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]], right: Sequence[int] = ()) -> str:
    """A Markdown table whose source is aligned too; the columns in `right` hold numbers."""
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in [header, *rows]]
    widths = [max(3, *(len(row[i]) for row in cells)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        return (
            "| "
            + " | ".join(c.rjust(widths[i]) if i in right else c.ljust(widths[i]) for i, c in enumerate(row))
            + " |"
        )

    rule = "|".join(
        "-" * (widths[i] + 1) + ":" if i in right else "-" * (widths[i] + 2) for i in range(len(header))
    )
    return "\n".join([line(cells[0]), f"|{rule}|", *map(line, cells[1:])])


def verdict(problem: ProblemReport) -> str:
    """One sentence: the winner against the default."""
    winner, default, speedup = problem.winner, problem.default, problem.speedup
    if winner is None:
        return "No winner yet: no finalist has been verified."
    if default is None or speedup is None:
        return f"Winner: {time_text(winner.time_us)}; the default has not been verified."
    if winner.config == default.config:
        return f"The default is the winner: {time_text(winner.time_us)}. Nothing verified beats it beyond the tie band."
    return (
        f"Winner: {time_text(winner.time_us)}, {ratio_text(speedup)} as fast as the default "
        f"({time_text(default.time_us)})."
    )


def _overview(problems: Sequence[ProblemReport]) -> str:
    rows = []
    for number, p in enumerate(problems, 1):
        winner, default = p.winner, p.default
        rows.append(
            [
                number,
                p.problem,
                time_text(default.time_us if default else None),
                time_text(winner.time_us if winner else None),
                ratio_text(p.speedup),
                winner.config if winner else "–",
            ]
        )
    return table(["#", "problem", "default", "winner", "ratio", "winning config"], rows, right=(0, 2, 3, 4))


def _problem(number: int, p: ProblemReport) -> str:
    parts = [f"## {number}. {p.problem}", "", f"**{verdict(p)}**", ""]
    if p.winner is not None:
        parts += [f"    {p.winner.config}", ""]
    parts += [_circumstances(p), ""]
    if p.finalists:
        parts += ["### Finalists", "", _finalists(p), ""]
    if p.attribution is not None:
        parts += ["### Where the time goes", "", _attribution(p.attribution), ""]
    if p.splits:
        parts += ["### Split", "", _splits(p), ""]
    if p.top:
        parts += [f"### Fastest {min(TOP, len(p.top))} in the search", "", _top(p), ""]
    if p.importances:
        parts += ["### What matters", "", _importances(p), ""]
    if p.space is not None:
        parts += ["### Space", "", _waterfall(p.space), ""]
    parts += ["### Statuses", ""]
    parts += [
        table(["status", "configs"], p.statuses, right=(1,)) if p.statuses else "Nothing was tried yet."
    ]
    if p.failures:
        parts += ["", "### What failed", "", _failed(p)]
    parts += ["", f"Ask for it: `{lookup_command(p.problem, p.device, p.policy.name)}`"]
    return "\n".join(parts)


def _circumstances(p: ProblemReport) -> str:
    policy = p.policy
    seeds = ", ".join(map(str, policy.routing_seeds))
    when = f"{p.first_at} to {p.last_at}" if p.first_at != p.last_at else p.first_at
    verified = f", verified {p.verified_at}" if p.verified_at else ""
    spent = "" if p.run_time is None else f"\n- The last run: {_run_time(p.run_time)}"
    return "\n".join(
        [
            f"- Device: {p.device} ({p.device.backend} {p.device.arch}, {p.device.sm_count} SMs, "
            f"{p.device.smem_optin_bytes} bytes of shared memory, {p.device.interconnect})",
            f"- Toolchain: {p.toolchain}",
            f"- Policy: {policy.name}: {policy.launch_mode} launch, {policy.cache_state} cache, "
            f"{policy.iterations} iterations (first {policy.first_iterations}), clocks {policy.clocks}, "
            f"routing seeds {seeds}",
            *(["- Default: the winners of both kernels, each found alone"] if is_layer(p.problem) else []),
            f"- When: {when or '–'}{verified}",
            f"- Tried: {count_text(p.configs_tried, 'config')}"
            + (f" of {p.space.feasible} feasible" if p.space else "")
            + f", from {count_text(p.builds, 'build')}"
            + spent,
        ]
    )


def _run_time(run: RunTime) -> str:
    """Where its seconds went."""
    if run.spent is not None:
        said = run.spent.sentence
        return said[0].lower() + said[1:].removesuffix(".")
    gangs = "" if run.gangs == 1 else f" of {run.gangs} gangs"
    return (
        f"ranks gated or timed for {run.busy_share:.0%} of {seconds_text(run.wall_s)}{gangs}, and for "
        f"{run.busy_share_built:.0%} of the {seconds_text(run.built_s)} without waiting for builds "
        f"({run.gating_s:.1f} s gating, {run.timing_s:.1f} s timing, {run.finals_s:.1f} s finalists and attribution; "
        f"{run.loading_s:.1f} s loading, {run.waiting_s:.1f} s waiting for builds, the rest starting ranks and deciding)"
    )


def _finalists(p: ProblemReport) -> str:
    best = min(v.time_us for v in p.finalists)
    rows = [
        [
            v.role,
            time_text(v.time_us),
            ratio_text(v.time_us / best),
            v.samples,
            v.config,
            _chosen(v.chosen, v.reason),
        ]
        for v in p.finalists
    ]
    text = table(["role", "time", "to fastest", "samples", "config", "verdict"], rows, right=(1, 2, 3))
    band = (
        ""
        if p.tie_band is None
        else f" of {p.tie_band:.1%} (the measured noise is {p.noise or 0:.1%}, and the band at least 1%)"
    )
    return (
        f"{text}\n\nFinalists that differ by less than the tie band{band} count as equal; of these the default "
        "is chosen, else what takes the fewest resources, else what comes first by digest."
    )


def _chosen(chosen: bool, reason: str) -> str:
    return f"winner: {reason}" if chosen and reason else "winner" if chosen else reason or "–"


def _attribution(a: Attribution) -> str:
    best = (
        "comm* (its best split)" if a.comm_best_split is None else f"comm* (best split: {a.comm_best_split})"
    )
    rows = [
        ("fused", a.fused_us, "the winner"),
        ("comp", a.comp_us, "compute alone, all SMs, data in place"),
        ("comm", a.comm_us, "communication alone at the winner's split"),
        (best, a.comm_best_us, "the fastest communication alone"),
        ("serial", a.serial_us, "communication, then compute, each on all SMs"),
        ("peer", a.peer_us, "the fastest library GEMM alone on the same rows"),
    ]
    measured = [(name, time_us, meaning) for name, time_us, meaning in rows if time_us is not None]
    longest = max((time_us for _, time_us, _ in measured), default=0.0)
    text = table(
        ["part", "time", "", "meaning"],
        [[name, time_text(t), bar(t, longest, 20), meaning] for name, t, meaning in measured],
        right=(1,),
    )
    lines = []
    if a.overlap_at_split is not None:
        lines.append(
            f"- Overlap efficiency: {a.overlap_at_split:.0%} at the winner's split"
            + ("" if a.overlap_at_best is None else f", {a.overlap_at_best:.0%} against comm*")
        )
    if max(a.overlap_at_split or 0, a.overlap_at_best or 0) > 1:
        lines.append("- More than 100% cannot be: the machine was not quiet while this was measured")
    if a.exposed_us is not None and a.exposed_us > 0:
        lines.append(f"- Exposed communication: {time_text(a.exposed_us)}")
    elif a.exposed_us is not None:
        lines.append(f"- Exposed communication: none, fused is {time_text(-a.exposed_us)} faster than comp")
    return text + ("\n\n" + "\n".join(lines) if lines else "")


def _splits(p: ProblemReport) -> str:
    longest = max(s.best_us for s in p.splits)
    rows = [
        [s.num_comm_sms, time_text(s.best_us), bar(s.best_us, longest, 30), time_text(s.median_us), s.configs]
        for s in p.splits
    ]
    return table(["num_comm_sms", "best", "", "median", "configs"], rows, right=(0, 1, 3, 4))


def _top(p: ProblemReport) -> str:
    rows = []
    for place, timed in enumerate(p.top[:TOP], 1):
        low_high = timed.quartiles_us
        spread = "–" if low_high is None else f"{low_high[0]:.1f}–{low_high[1]:.1f}"
        rows.append([place, time_text(timed.time_us), spread, timed.samples, timed.config])
    return table(["#", "median", "quartiles, µs", "samples", "config"], rows, right=(0, 1, 2, 3))


def _importances(p: ProblemReport) -> str:
    rows = [
        [
            i.parameter,
            f"{i.spread:.0%}",
            "  ".join(f"{value}: {time_us:.0f}" for value, time_us, _ in i.medians_us),
        ]
        for i in p.importances
    ]
    text = table(["parameter", "range", "median by value, µs"], rows, right=(1,))
    return text + "\n\nRange: how much slower the worst value's median is than the best value's."


def _failed(p: ProblemReport) -> str:
    rows = [[f.status, f.configs, f.config, f.sentence or "–"] for f in p.failures]
    return table(["status", "configs", "for example", "why"], rows, right=(1,))


def _waterfall(space: SpacePicture) -> str:
    rows: list[Sequence[Any]] = [["all", "", space.total, "every combination of values"]]
    rows += [[row.name, f"−{row.removed}", row.left, row.meaning] for row in space.waterfall if row.removed]
    return table(["constraint", "removed", "left", "meaning"], rows, right=(1, 2))
