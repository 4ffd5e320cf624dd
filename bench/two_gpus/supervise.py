"""Rank processes of a bench, watched: each has its deadline, one that dies ends them all, and a sentence says why.
Nothing here knows what they do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

LOOK_EVERY_S = 0.1
REAP_S = 20.0
TAIL_BYTES = 1500


@dataclass(frozen=True)
class Watch:
    """How long ranks may take, and how long the others may after one has ended badly or the time is up."""

    deadline_s: float
    farewell_s: float = 10.0


def run_ranks(
    commands: Sequence[Sequence[str]],
    environment: Mapping[str, str],
    fds: Sequence[int],
    watch: Watch,
    tell_to_stop: Callable[[], None],
    doing: Callable[[int], str],
) -> list[str]:
    """Run command r as rank r, all at once, until all have ended. One sentence for each thing that went wrong.

    Ranks keep this process's stdout; what they write to stderr is kept and its end is quoted. `tell_to_stop` is called
    once, when the first has ended badly or the time is up; those that still live `farewell_s` later are killed.
    `doing(r)` says what rank r was at.
    """
    with contextlib.ExitStack() as life:
        logs = [life.enter_context(tempfile.TemporaryFile()) for _ in commands]
        ranks: list[subprocess.Popen[bytes]] = []
        life.callback(_kill, ranks)
        for command, log in zip(commands, logs, strict=True):
            ranks.append(
                subprocess.Popen(command, env=environment, pass_fds=fds, stderr=log, start_new_session=True)
            )
        said = _watch(ranks, watch, tell_to_stop, doing)
        _kill(ranks)
        return [
            f"{sentence}{_tail(logs[rank].fileno())}" if rank is not None else sentence
            for rank, sentence in said
        ]


def _watch(
    ranks: Sequence[subprocess.Popen[bytes]],
    watch: Watch,
    tell_to_stop: Callable[[], None],
    doing: Callable[[int], str],
) -> list[tuple[int | None, str]]:
    said: dict[int | None, str] = {}
    end, told = time.monotonic() + watch.deadline_s, False
    while any(rank.poll() is None for rank in ranks):
        for number, rank in enumerate(ranks):
            if rank.poll() not in (None, 0) and number not in said:
                said[number] = f"Rank {number} {_end(rank.returncode)} while it {doing(number)}."
        if time.monotonic() > end and not told:
            slow = [str(number) for number, rank in enumerate(ranks) if rank.poll() is None]
            was = "; ".join(f"rank {number} {doing(int(number))}" for number in slow)
            said[None] = f"The ranks did not end within {watch.deadline_s:g} s: {was}."
        if said and not told:
            told, end = True, time.monotonic() + watch.farewell_s
            tell_to_stop()
        elif told and time.monotonic() > end:
            break
        time.sleep(LOOK_EVERY_S)
    for number, rank in enumerate(ranks):
        if number in said or rank.poll() == 0:
            continue
        if rank.poll() is None:
            said.setdefault(number, f"Rank {number} was killed: it {doing(number)} and did not stop.")
        else:
            said[number] = f"Rank {number} {_end(rank.returncode)} while it {doing(number)}."
    return list(said.items())


def _end(code: int) -> str:
    if code >= 0:
        return f"left with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _kill(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """SIGKILL to whatever lives, and reap it."""
    for rank in ranks:
        if rank.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.pid, signal.SIGKILL)
    for rank in ranks:
        with contextlib.suppress(subprocess.TimeoutExpired):
            rank.wait(REAP_S)


def _tail(fd: int) -> str:
    """The end of a log in one line."""
    size = os.fstat(fd).st_size
    text = os.pread(fd, TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f" Its log ends: {' | '.join(lines[-3:])}" if lines else ""
