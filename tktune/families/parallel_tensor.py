"""Symmetric memory of the CPU backend: one buffer a rank, mapped by every rank, so that a peer's row is an address.

Buffers live in memfds that a driver hands out, or in shared-memory files that ranks of a process group open and
then unlink. torch is imported only in `from_group`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tktune.core.errors import GangError

if TYPE_CHECKING:
    import numpy.typing as npt


class ParallelTensor:
    """Buffers of `bytes` bytes, one a rank. `local` is this rank's address, `peer(r)` the address of rank r's.

    >>> fds = ParallelTensor.create_fds(world=2, nbytes=4096)
    >>> one, two = (ParallelTensor.attach(fds, rank) for rank in range(2))
    >>> one.array(0, "int32", (4,))[:] = 7
    >>> int(two.array(0, "int32", (4,))[3])
    7
    """

    def __init__(self, mappings: Sequence[mmap.mmap], rank: int) -> None:
        self.rank = rank
        self.world = len(mappings)
        self.bytes = len(mappings[rank])
        self._mappings = list(mappings)
        self._addresses = [ctypes.addressof(ctypes.c_char.from_buffer(mapping)) for mapping in mappings]

    @staticmethod
    def create_fds(world: int, nbytes: int = 0) -> tuple[int, ...]:
        """One memfd a rank, `nbytes` long (0: whoever attaches makes it as long as it needs)."""
        fds = tuple(os.memfd_create(f"tktune-rank-{rank}") for rank in range(world))
        for fd in fds:
            os.ftruncate(fd, nbytes)
        return fds

    @classmethod
    def attach(cls, fds: Sequence[int], rank: int, nbytes: int = 0) -> ParallelTensor:
        """Map every rank's memfd, first growing those shorter than `nbytes`. The fds stay the caller's."""
        mappings = []
        for fd in fds:
            if os.fstat(fd).st_size < nbytes:
                os.ftruncate(fd, nbytes)
            mappings.append(mmap.mmap(fd, nbytes or os.fstat(fd).st_size))
        return cls(mappings, rank)

    @classmethod
    def from_group(cls, group: Any, nbytes: int) -> ParallelTensor:
        """The same among the ranks of a torch.distributed group (a CPU backend such as gloo) on one host.

        Each rank makes a file under a random name, all open all, then each unlinks its own: nothing is left
        behind, however the ranks end later.
        """
        import torch
        import torch.distributed as dist

        rank, world = dist.get_rank(group), dist.get_world_size(group)
        token = torch.frombuffer(bytearray(secrets.token_bytes(16)), dtype=torch.uint8)
        dist.broadcast(token, src=dist.get_global_rank(group, 0), group=group)
        shm = Path("/dev/shm")
        folder = shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())
        names = [folder / f"tktune-{bytes(token.tolist()).hex()}-{r}" for r in range(world)]
        mine, failure = _map(names[rank], nbytes, os.O_CREAT | os.O_EXCL)
        failed = _anywhere(group, failure)  # every file is there, or all give up
        mappings = []
        if not failed:
            for name in names:
                mapping, failure = _map(name, nbytes)
                if mapping is None:
                    break
                mappings.append(mapping)
            failed = _anywhere(group, failure)  # everybody has mapped every file, or all give up
        if mine is not None:
            names[rank].unlink()
        if failed:
            said = f": {failure}" if failure else " on another rank"
            raise GangError(
                f"Symmetric memory of {nbytes} bytes cannot be had{said}.", f"Free some of {folder}."
            )
        return cls(mappings, rank)

    @property
    def local(self) -> int:
        """The address of this rank's buffer."""
        return self._addresses[self.rank]

    def peer(self, rank: int) -> int:
        """The address, in this process, of `rank`'s buffer."""
        return self._addresses[rank]

    def buffer(self, rank: int) -> mmap.mmap:
        """`rank`'s bytes as a writable buffer (for `torch.frombuffer`, `numpy.frombuffer`)."""
        return self._mappings[rank]

    def array(self, rank: int, dtype: str, shape: tuple[int, ...], offset: int = 0) -> npt.NDArray[Any]:
        """A numpy view of `rank`'s buffer from byte `offset`; no copy."""
        import math

        import numpy as np

        flat = np.frombuffer(self._mappings[rank], dtype, math.prod(shape), offset)
        return flat.reshape(shape)

    def close(self) -> None:
        """Drop the mappings; the memory goes when the last view of it does."""
        self._mappings.clear()
        self._addresses.clear()


def _map(path: Path, nbytes: int, flags: int = 0) -> tuple[mmap.mmap | None, OSError | None]:
    """The file mapped, or why not; a file that could not be filled is removed."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except OSError as error:
        return None, error
    try:
        if flags:
            os.posix_fallocate(fd, 0, nbytes)
        return mmap.mmap(fd, nbytes), None
    except OSError as error:
        if flags:
            path.unlink()
        return None, error
    finally:
        os.close(fd)


def _anywhere(group: Any, failure: OSError | None) -> bool:
    """Whether any rank of the group has failed. Every rank comes here, whatever became of it."""
    import torch
    import torch.distributed as dist

    failed = torch.tensor([failure is not None], dtype=torch.int32)
    dist.all_reduce(failed, group=group)
    return bool(failed.item())
