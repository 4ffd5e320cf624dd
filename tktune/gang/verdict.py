"""From what became of every rank during one command to one status and one sentence. Pure: no process, no clock."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tktune.core import status
from tktune.families.control_page import SpinReport
from tktune.gang.protocol import DOING, Failure, Reply

SECOND_END = "It may be tried once more; a second such end quarantines the config."


@dataclass(frozen=True)
class RankEnd:
    """What became of one rank during one command.

    `late`: it had not replied at the deadline. `death`: how its process ended by itself, "" while it lived.
    `broken`: it sent something that is not its one reply. `stopped`: it was found stopped at the deadline.
    """

    rank: int
    reply: Reply | None = None
    late: bool = False
    death: str = ""
    broken: str = ""
    stopped: bool = False
    log_tail: str = ""

    @property
    def failure(self) -> Failure | None:
        return None if self.reply is None else self.reply.failure


@dataclass(frozen=True)
class Verdict:
    """A status, why, and what follows from it (`way_out`)."""

    status: str
    said: str = ""
    way_out: str = ""

    @property
    def sentence(self) -> str:
        return f"{self.said} {self.way_out}".strip()


def judge(
    command: str,
    ends: Sequence[RankEnd],
    reports: Sequence[SpinReport],
    *,
    deadline_s: float,
    spin_limit_s: float,
    return_s: float,
) -> Verdict:
    """One status for one command of the whole gang. `return_s` is what ranks had after the abort word was set.

    What is likelier the cause outweighs what it causes: a death, a late rank, a refusal or an exception, a rank
    that stayed silent after the abort, a spin limit, an abort.
    """
    waits = _waits(reports, spin_limit_s)
    dead = [end for end in ends if end.death]
    if dead:
        said = "; ".join(_died(end, len(ends), command) for end in dead)
        return Verdict(status.CRASHED, _join(said, waits), SECOND_END)
    for end in ends:
        if end.broken:
            said = f"Rank {end.rank} broke the protocol while {DOING[command]}: {end.broken}"
            return Verdict(status.fault("protocol"), _join(said), SECOND_END)
    late = [end for end in ends if end.late]
    if late:
        said = _still(late, command, f"after {deadline_s:g} s")
        return Verdict(status.timeout(command), _join(said, waits), SECOND_END)
    failed = [(end, end.failure) for end in ends if end.failure is not None]
    for kind in ("refused", "exception"):
        for end, failure in failed:
            if failure.kind == kind:
                said = f"Rank {end.rank} failed while {DOING[command]}: {failure.sentence}"
                if kind == "refused":
                    return Verdict(status.refused(_word(failure.code)), _join(said))
                return Verdict(status.fault(_word(failure.code)), _join(said, waits), SECOND_END)
    silent = [end for end in ends if end.reply is None]
    if silent:
        said = _still(silent, command, f"{return_s:g} s after the gang was told to abort")
        return Verdict(status.timeout(command), _join(said, waits), SECOND_END)
    if failed:
        return _launch_failed(command, failed, reports, waits)
    return Verdict(status.OK)


def judge_gate(replies: Sequence[Mapping[str, Any]], routing: str) -> Verdict:
    """`wrong` when any rank's output differs from its reference."""
    bad = [(rank, reply) for rank, reply in enumerate(replies) if not reply["passed"]]
    if not bad:
        return Verdict(status.OK)
    rank, worst = max(bad, key=lambda one: _badness(one[1]["worst_error"]))
    error, tolerance = worst["worst_error"], worst["tolerance"]
    how = "is not a number" if math.isnan(error) else f"differs by {error:.3g} and {tolerance:.3g} is allowed"
    said = f"Rank {rank}'s output under the routing {routing} {how}"
    where = worst["sentence"]
    return Verdict(status.WRONG, _join(said, where), "A wrong config is never served; look at its kernel.")


def worst_error(replies: Sequence[Mapping[str, Any]]) -> float | None:
    """The largest relative error of any rank; None when one of them is not a number."""
    errors = [float(reply["worst_error"]) for reply in replies]
    return max(errors) if all(math.isfinite(error) for error in errors) else None


def judge_samples(replies: Sequence[Mapping[str, Any]], iterations: int) -> Verdict:
    """Every rank must give one positive, finite time for each iteration."""
    for rank, reply in enumerate(replies):
        us = reply["us"]
        if len(us) != iterations or not all(math.isfinite(one) and one > 0 for one in us):
            said = f"Rank {rank} was asked for {iterations} times and gave {len(us)}, or one that is no time"
            return Verdict(status.fault("samples"), _join(said), SECOND_END)
    return Verdict(status.OK)


def _launch_failed(
    command: str, failed: Sequence[tuple[RankEnd, Failure]], reports: Sequence[SpinReport], waits: str
) -> Verdict:
    reported = {report.rank for report in reports}
    codes = [(end, failure, _launch_code(end, failure, reported)) for end, failure in failed]
    end, failure, code = next((one for one in codes if one[2] != "aborted"), codes[0])
    said = f"Rank {end.rank}'s launch ended without a result while {DOING[command]}"
    if code != "spin_limit" or not waits:  # who waited for what says it better
        said = f"{said}: {failure.sentence}"
    return Verdict(status.fault(_word(code)), _join(said, waits), SECOND_END)


def _launch_code(end: RankEnd, failure: Failure, reported: set[int]) -> str:
    """A launch names its own code; one that does not is known by the spin report it left."""
    if failure.code:
        return failure.code
    return "spin_limit" if end.rank in reported else "aborted"


def _died(end: RankEnd, world: int, command: str) -> str:
    log = f" (its log ends: {end.log_tail})" if end.log_tail else ""
    return f"Rank {end.rank} of {world} died while {DOING[command]}: {end.death}{log}"


def _still(silent: Sequence[RankEnd], command: str, when: str) -> str:
    who = [f"rank {end.rank} (stopped by a signal)" if end.stopped else f"rank {end.rank}" for end in silent]
    said = f"{_listed(who)} {'was' if len(who) == 1 else 'were'} still {DOING[command]} {when}"
    log = next((f" (the log of rank {end.rank} ends: {end.log_tail})" for end in silent if end.log_tail), "")
    return said[0].upper() + said[1:] + log


def _waits(reports: Sequence[SpinReport], spin_limit_s: float) -> str:
    """Who waited for what, from the spin reports."""
    if not reports:
        return ""
    return f"{' '.join(one.sentence for one in reports)} Waits are bounded by {spin_limit_s:g} s"


def _word(code: str) -> str:
    """A code as a status may carry it."""
    return re.sub(r"[^A-Za-z0-9_.+-]+", "_", code) or "unnamed"


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _badness(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _join(*sentences: str) -> str:
    ended = [one if one.endswith((".", "!", "?")) else f"{one}." for one in sentences if one]
    return " ".join(ended)
