"""One lock a digest, held by the kernel for us: a killed holder frees it, no stale lock file blocks anybody."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from types import TracebackType

from tktune.core.errors import CacheError


class DigestLock:
    """An exclusive flock on `path`. `try_acquire` never waits; leaving the context frees it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = -1

    def try_acquire(self) -> bool:
        """Whether the lock is ours now. Raises `CacheError` where the file system has no locks."""
        while True:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(fd)
                if error.errno in (errno.EWOULDBLOCK, errno.EAGAIN):
                    return False
                raise CacheError(
                    f"The file system of {self.path.parent} cannot lock files ({error.strerror}).",
                    "Set TKTUNE_CACHE_DIR to a folder on a local disk.",
                ) from error
            if self._still_named(fd):
                self._fd = fd
                return True
            os.close(fd)  # a cleaner removed this file between open and lock

    def remove(self) -> None:
        """Delete the lock's file; only its holder may."""
        if self._fd >= 0:
            self.path.unlink(missing_ok=True)

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> DigestLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _still_named(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), self.path.stat())
        except FileNotFoundError:
            return False
