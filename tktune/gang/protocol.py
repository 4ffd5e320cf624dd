"""The words between the driver and its ranks: numbered commands and exactly one reply to each, as JSON lines.

Nothing here starts a process, judges a reply or imports a family.
"""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.families.base import RankSeat

# The fixed sequence. `prepare` seats the rank: its workbench is made and its own symmetric memory is sized, and
# when all ranks have replied, peers may be mapped. `load` opens one artifact, `gate` and `time` launch it. `leave` gives
# the seat up: what was the problem's is gone, the process and its device context stay for the next `prepare`.
COMMANDS = ("prepare", "load", "gate", "time", "report", "leave")
DOING = {
    "prepare": "taking its seat",
    "leave": "leaving its seat",
    "load": "loading",
    "gate": "gating",
    "time": "timing",
    "report": "reporting",
}

# launch: the launch was aborted or out of its spin limit. refused: a named rule refused the config.
# exception: anything else that was raised.
FailureKind = Literal["launch", "refused", "exception"]


class ProtocolBroken(Exception):
    """A message that is not one reply to the command that was sent, or not a command."""


@dataclass(frozen=True)
class Command:
    """One numbered command; `args` are plain JSON values and the same on every rank, except in `prepare`."""

    number: int
    name: str
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """Why a rank could not do a command. `code` is what a status names after "fault:" or "refused:"."""

    kind: FailureKind
    code: str
    sentence: str


@dataclass(frozen=True)
class Reply:
    """A rank's one reply: a body of plain JSON values, or a failure."""

    number: int
    rank: int
    body: Mapping[str, Any] = field(default_factory=dict)
    failure: Failure | None = None


def encode_command(command: Command) -> bytes:
    message = {"number": command.number, "command": command.name, "args": dict(command.args)}
    return json.dumps(message).encode() + b"\n"


def decode_command(line: bytes) -> Command:
    """Raises `ProtocolBroken` for anything but a command of the fixed set."""
    try:
        message = json.loads(line)
        command = Command(int(message["number"]), str(message["command"]), dict(message["args"]))
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolBroken(f"not a command: {line[:80]!r}") from error
    if command.name not in COMMANDS:
        raise ProtocolBroken(f"no such command: {command.name!r}")
    return command


def encode_reply(reply: Reply) -> bytes:
    """Raises TypeError or ValueError when the body is not plain (numpy scalars and paths are made plain)."""
    message: dict[str, Any] = {"number": reply.number, "rank": reply.rank, "body": dict(reply.body)}
    if reply.failure is not None:
        message["failure"] = dataclasses.asdict(reply.failure)
    return json.dumps(message, default=_plain).encode() + b"\n"


def decode_reply(line: bytes, number: int, rank: int) -> Reply:
    """The reply of `rank` to command `number`. Raises `ProtocolBroken` for anything else."""
    try:
        message = json.loads(line)
        failure = Failure(**message["failure"]) if "failure" in message else None
        reply = Reply(int(message["number"]), int(message["rank"]), dict(message["body"]), failure)
    except (ValueError, KeyError, TypeError) as error:
        raise ProtocolBroken(f"not a reply: {line[:80]!r}") from error
    if (reply.number, reply.rank) != (number, rank):
        raise ProtocolBroken(
            f"a reply of rank {reply.rank} to command {reply.number} came from rank {rank} during {number}"
        )
    return reply


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "__fspath__"):
        return str(value)
    raise TypeError(f"a reply cannot carry {type(value).__name__}")


def seat_to_json(seat: RankSeat) -> dict[str, Any]:
    return {
        "problem": dataclasses.asdict(seat.problem),
        "device": dataclasses.asdict(seat.device),
        "policy": dataclasses.asdict(seat.policy),
        "rank": seat.rank,
        "world": seat.world,
        "symmetric_fds": list(seat.symmetric_fds),
        "control_fd": seat.control_fd,
        "spin_limit_s": seat.spin_limit_s,
        "device_index": seat.device_index,
    }


def seat_from_json(value: Mapping[str, Any]) -> RankSeat:
    policy = dict(value["policy"])
    policy["routing_seeds"] = tuple(policy["routing_seeds"])
    return RankSeat(
        problem=Problem(**value["problem"]),
        device=DeviceClass(**value["device"]),
        policy=Policy(**policy),
        rank=int(value["rank"]),
        world=int(value["world"]),
        symmetric_fds=tuple(value["symmetric_fds"]),
        control_fd=int(value["control_fd"]),
        spin_limit_s=float(value["spin_limit_s"]),
        device_index=int(value["device_index"]),
    )


def config_from_json(value: Mapping[str, Any]) -> Config:
    return Config(value)


class Channel:
    """One end of the control socket, cut into lines."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._buffer = bytearray()
        self.ended = False

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, line: bytes) -> None:
        """Raises OSError when the other end is gone."""
        self._socket.sendall(line)

    def receive(self) -> list[bytes]:
        """Wait for bytes and return the complete lines, perhaps none; at end of file `ended` becomes true."""
        try:
            chunk = self._socket.recv(1 << 16)
        except ConnectionError:
            chunk = b""
        if not chunk:
            self.ended = True
            return []
        self._buffer += chunk
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer = bytearray(rest)
        return lines

    def close(self) -> None:
        self._socket.close()
