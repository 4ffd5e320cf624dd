"""A rank process (`python -m tktune.gang.rank`): sits down, then answers each command with exactly one reply.

This is the one place that catches Exception. A rank decides nothing: it never skips a command, retries or judges.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import resource
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tktune.core.errors import ConstraintRefused, LaunchFailed, TktuneError
from tktune.families.base import MODES, Workbench, family
from tktune.gang.protocol import (
    Channel,
    Command,
    Failure,
    ProtocolBroken,
    Reply,
    config_from_json,
    decode_command,
    encode_reply,
    seat_from_json,
)

PR_SET_PDEATHSIG = 1
LONGEST_SENTENCE = 2000


def die_with(parent: int) -> None:
    """Be killed when the thread that spawned this process ends; leave at once if it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


class RankWork:
    """What a rank holds between commands: its number and the family's workbench."""

    def __init__(self) -> None:
        self.rank = -1
        self.workbench: Workbench | None = None

    def do(self, command: Command) -> Mapping[str, Any]:
        """The body of the reply; raises whatever the family raises."""
        args = command.args
        if command.name == "prepare":
            return self._prepare(args)
        if self.workbench is None:
            raise ProtocolBroken(f"{command.name} came before prepare")
        if command.name == "leave":
            return self._leave()
        if command.name == "load":
            config = config_from_json(args["build_part"])
            facts = self.workbench.load(Path(args["artifact"]), args["sha256"], config)
            return {"facts": dict(facts)}
        if command.name == "gate":
            config = config_from_json(args["config"])
            verdict = self.workbench.gate(config, args["routing"], args["seed"], args["sequence"])
            return {
                "passed": bool(verdict.passed),
                "worst_error": float(verdict.worst_error),
                "tolerance": float(verdict.tolerance),
                "sentence": verdict.sentence[:LONGEST_SENTENCE],
            }
        if command.name == "time":
            if args["mode"] not in MODES:
                raise ProtocolBroken(f"no such mode: {args['mode']!r}")
            config = config_from_json(args["config"])
            us = self.workbench.time(config, args["mode"], args["seed"], args["iterations"], args["sequence"])
            return {"us": [float(one) for one in us]}
        return self._report()

    def _prepare(self, args: Mapping[str, Any]) -> dict[str, Any]:
        if self.workbench is not None:
            raise ProtocolBroken("this rank already has its seat")
        self.rank = int(args["rank"])
        seat = seat_from_json(args)
        self.workbench = family(seat.problem.family).workbench(seat)
        return {"pid": os.getpid(), "imported": _heavy_modules()}

    def _leave(self) -> dict[str, Any]:
        """Give up the seat. What the workbench held must be gone before the next one is sized."""
        self.close()
        self.workbench = None
        gc.collect()
        return {}

    def _report(self) -> dict[str, Any]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {
            "cpu_s": used.ru_utime + used.ru_stime,
            "peak_rss_bytes": used.ru_maxrss * 1024,
            "preemptions": used.ru_nivcsw,
            "imported": _heavy_modules(),
        }

    def close(self) -> None:
        if self.workbench is not None:
            self.workbench.close()


def answer(work: RankWork, command: Command) -> bytes:
    """Do one command and encode its one reply, whatever happens in it."""
    failure: Failure
    try:
        body = work.do(command)
        return encode_reply(Reply(command.number, work.rank, body))
    except LaunchFailed as error:
        failure = Failure("launch", error.code, _shortened(str(error)))
    except ConstraintRefused as error:
        failure = Failure("refused", error.rule, _shortened(str(error)))
    except Exception as error:  # noqa: BLE001 - the one place that turns it into a reply
        traceback.print_exc()
        failure = Failure("exception", type(error).__name__, _shortened(_said(error)))
    return encode_reply(Reply(command.number, work.rank, {}, failure))


def _said(error: Exception) -> str:
    """The project's own errors speak for themselves; others get their type and the line they come from."""
    if isinstance(error, TktuneError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _shortened(sentence: str) -> str:
    return " ".join(sentence.split())[:LONGEST_SENTENCE]


def _heavy_modules() -> list[str]:
    return [name for name in ("numpy", "torch", "sqlalchemy", "optuna", "cuda") if name in sys.modules]


def serve(channel: Channel) -> None:
    """Answer commands in order until end of file."""
    work = RankWork()
    while True:
        lines = channel.receive()
        if channel.ended:
            work.close()
            return
        for line in lines:
            reply = answer(work, decode_command(line))
            try:
                channel.send(reply)
            except OSError:
                return  # the driver is gone


def main(arguments: list[str]) -> None:
    """`arguments`: the driver's process id, and the control socket's file descriptor."""
    die_with(int(arguments[0]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    channel = Channel(socket.socket(fileno=int(arguments[1])))
    serve(channel)


if __name__ == "__main__":
    main(sys.argv[1:])
