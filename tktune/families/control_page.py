"""The driver-owned memory every rank of a gang shares with it: the abort word and one spin report a rank.

It lives in a memfd, so it outlives a trapped device and a dead rank. No numpy, no torch, no decisions.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from dataclasses import dataclass

SLOT_BYTES = 128
_ABORT = struct.Struct("I")
_REPORT = struct.Struct("iii16s24siqq")  # tkt_spin_report of csrc/abi.h
_HEARTBEAT = struct.Struct("Q")
_HEARTBEAT_AT = SLOT_BYTES - _HEARTBEAT.size


@dataclass(frozen=True)
class SpinReport:
    """What the wait that gave up saw: `word[index]` should have reached `expected` and held `seen`."""

    rank: int
    block: int
    role: str
    word: str
    index: int
    expected: int
    seen: int

    @property
    def sentence(self) -> str:
        """Who waited for what, in plain words."""
        return (
            f"Rank {self.rank}'s {self.role} block {self.block} waited for {self.word}[{self.index}] to reach "
            f"{self.expected} and saw {self.seen}."
        )


class ControlPage:
    """The abort word at byte 0, then a 128-byte slot for each rank: its spin report, and a heartbeat at the end.

    `ControlPage.create(world)` makes the memfd (the driver); `ControlPage(fd)` maps one that was inherited (a
    rank). Either owns its mapping; the creator also owns `fd`.
    """

    def __init__(self, fd: int, *, owns_fd: bool = False) -> None:
        self.fd = fd
        self._owns_fd = owns_fd
        self._memory = mmap.mmap(fd, os.fstat(fd).st_size)
        anchor = ctypes.c_char.from_buffer(self._memory)
        self._base = ctypes.addressof(anchor)
        del anchor

    @classmethod
    def create(cls, world: int) -> ControlPage:
        fd = os.memfd_create("tktune-control")
        os.ftruncate(fd, SLOT_BYTES * (1 + world))
        return cls(fd, owns_fd=True)

    @property
    def world(self) -> int:
        return len(self._memory) // SLOT_BYTES - 1

    @property
    def aborted(self) -> bool:
        return bool(_ABORT.unpack_from(self._memory, 0)[0])

    @property
    def abort_address(self) -> int:
        """The address of the uint32 abort word in this process."""
        return self._base

    def address(self, rank: int) -> int:
        """The address of `rank`'s spin report in this process."""
        return self._base + self._slot(rank)

    def abort(self) -> None:
        """Tell every launch of the gang to return."""
        _ABORT.pack_into(self._memory, 0, 1)

    def clear(self) -> None:
        """Forget the abort word and all spin reports; only while no launch runs."""
        self._memory[:] = bytes(len(self._memory))

    def report(self, rank: int) -> SpinReport | None:
        """The spin report of `rank`, None when it left none."""
        is_set, *fields = _REPORT.unpack_from(self._memory, self._slot(rank))
        if not is_set:
            return None
        who, block, role, word, index, expected, seen = fields
        return SpinReport(who, block, _text(role), _text(word), index, expected, seen)

    def beat(self, rank: int, count: int) -> None:
        _HEARTBEAT.pack_into(self._memory, self._slot(rank) + _HEARTBEAT_AT, count)

    def heartbeat(self, rank: int) -> int:
        found: int = _HEARTBEAT.unpack_from(self._memory, self._slot(rank) + _HEARTBEAT_AT)[0]
        return found

    def close(self) -> None:
        self._memory.close()
        if self._owns_fd:
            os.close(self.fd)

    def _slot(self, rank: int) -> int:
        return SLOT_BYTES * (1 + rank)


def _text(field: bytes) -> str:
    return field.split(b"\0", 1)[0].decode(errors="replace")
