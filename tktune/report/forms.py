"""A report as plain JSON values, and as CSV with one row a problem. Shows facts of `model`; computes nothing."""

from __future__ import annotations

import csv
import dataclasses
import io
from typing import Any

from tktune.report.model import Attribution, ProblemReport, Report, RunTime, TimedConfig, Verified

SUMMARY_COLUMNS = (
    "problem",
    "device",
    "policy",
    "toolchain",
    "winner",
    "winner_us",
    "default",
    "default_us",
    "speedup",
    "comp_us",
    "comm_us",
    "comm_best_us",
    "serial_us",
    "peer_us",
    "overlap_at_split",
    "overlap_at_best",
    "exposed_us",
    "feasible",
    "tried",
    "builds",
    "verified_at",
)


def report_object(report: Report) -> dict[str, Any]:
    """The report as an object of JSON's own types."""
    return {
        "title": report.title,
        "made_at": report.made_at,
        "made_by": report.made_by,
        "database": report.database,
        "command": report.command,
        "notes": list(report.notes),
        "problems": [_problem(problem) for problem in report.problems],
    }


def report_csv(report: Report) -> str:
    """One row a problem; times in microseconds, empty where unknown."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(SUMMARY_COLUMNS)
    for p in report.problems:
        a = p.attribution or Attribution()
        row = {
            "problem": str(p.problem),
            "device": f"{p.device.backend} {p.device.arch}",
            "policy": p.policy.name,
            "toolchain": p.toolchain,
            "winner": p.winner.config.json if p.winner else None,
            "winner_us": p.winner.time_us if p.winner else None,
            "default": p.default.config.json if p.default else None,
            "default_us": p.default.time_us if p.default else None,
            "speedup": p.speedup,
            "feasible": p.space.feasible if p.space else None,
            "tried": p.configs_tried,
            "builds": p.builds,
            "verified_at": p.verified_at,
            **_attribution(a),
        }
        writer.writerow(["" if row[name] is None else row[name] for name in SUMMARY_COLUMNS])
    return text.getvalue()


def _problem(p: ProblemReport) -> dict[str, Any]:
    return {
        "problem": p.problem.key,
        "device": {**p.device.key, "display_name": p.device.display_name},
        "policy": {**p.policy.key, "routing_seeds": list(p.policy.routing_seeds)},
        "toolchain": p.toolchain,
        "winner": _verified(p.winner),
        "default": _verified(p.default),
        "speedup": p.speedup,
        "tie_band": p.tie_band,
        "noise": p.noise,
        "finalists": [_verified(finalist) for finalist in p.finalists],
        "attribution": None if p.attribution is None else _attribution(p.attribution),
        "space": None
        if p.space is None
        else {
            "total": p.space.total,
            "feasible": p.space.feasible,
            "waterfall": [
                {"constraint": row.name, "meaning": row.meaning, "removed": row.removed, "left": row.left}
                for row in p.space.waterfall
            ],
        },
        "statuses": dict(p.statuses),
        "failures": [
            {"status": f.status, "configs": f.configs, "config": dict(f.config), "sentence": f.sentence}
            for f in p.failures
        ],
        "tried": p.configs_tried,
        "builds": p.builds,
        "top": [_timed(timed) for timed in p.top],
        "importances": [
            {
                "parameter": i.parameter,
                "spread": i.spread,
                "values": [
                    {"value": value, "median_us": time_us, "configs": count}
                    for value, time_us, count in i.medians_us
                ],
            }
            for i in p.importances
        ],
        "splits": [
            {
                "num_comm_sms": s.num_comm_sms,
                "best_us": s.best_us,
                "median_us": s.median_us,
                "configs": s.configs,
            }
            for s in p.splits
        ],
        "first_at": p.first_at,
        "last_at": p.last_at,
        "verified_at": p.verified_at,
        "run_time": None if p.run_time is None else _run_time(p.run_time),
    }


def _run_time(run: RunTime) -> dict[str, Any]:
    return {**dataclasses.asdict(run), "busy_share": run.busy_share, "busy_share_built": run.busy_share_built}


def _verified(verified: Verified | None) -> dict[str, Any] | None:
    if verified is None:
        return None
    return {
        "role": verified.role,
        "config": dict(verified.config),
        "time_us": verified.time_us,
        "samples": verified.samples,
        "chosen": verified.chosen,
        "reason": verified.reason,
    }


def _timed(timed: TimedConfig) -> dict[str, Any]:
    return {
        "config": dict(timed.config),
        "time_us": timed.time_us,
        "samples": timed.samples,
        "quartiles_us": None if timed.quartiles_us is None else list(timed.quartiles_us),
        "artifact_digest": timed.artifact_digest,
        "status": timed.status,
    }


def _attribution(a: Attribution) -> dict[str, Any]:
    return {
        "fused_us": a.fused_us,
        "comp_us": a.comp_us,
        "comm_us": a.comm_us,
        "comm_best_us": a.comm_best_us,
        "comm_best_split": a.comm_best_split,
        "serial_us": a.serial_us,
        "peer_us": a.peer_us,
        "overlap_at_split": a.overlap_at_split,
        "overlap_at_best": a.overlap_at_best,
        "exposed_us": a.exposed_us,
    }
