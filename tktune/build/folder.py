"""The cache's folder on disk: who may write it, where things lie, and how they are published so that no reader
ever sees half an artifact. Compiles nothing."""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tktune.build.artifact import MANIFEST_NAME
from tktune.build.failures import not_writable
from tktune.build.locks import DigestLock
from tktune.build.resources import Measured, read_measured
from tktune.core.errors import CacheError

_ROOMS = ("artifacts", "building", "locks", "failed", "quarantine", "measured")
STALE_S = 3600.0


class CacheFolder:
    """Paths and moves inside one cache root. Every place is on one file system, so that renames are atomic."""

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()

    def exists(self) -> bool:
        return self.root.is_dir()

    def check(self) -> None:
        """Raises `CacheError` when the folder is not ours alone to write; code is loaded from it."""
        try:
            status = self.root.stat()
        except FileNotFoundError:
            return
        except OSError as error:
            raise CacheError(
                f"The artifact cache {self.root} cannot be read ({error.strerror}).",
                "Set TKTUNE_CACHE_DIR to a folder of your own.",
            ) from error
        if not stat.S_ISDIR(status.st_mode):
            raise CacheError(
                f"The artifact cache {self.root} is not a folder.", "Set TKTUNE_CACHE_DIR to one."
            )
        if status.st_uid != os.geteuid():
            raise CacheError(
                f"The artifact cache {self.root} belongs to another user (uid {status.st_uid}).",
                "Set TKTUNE_CACHE_DIR to a folder of your own.",
            )
        if status.st_mode & 0o022:
            raise CacheError(
                f"The artifact cache {self.root} can be written by others (mode {status.st_mode & 0o777:04o}), "
                "who could plant code there.",
                f"Run: chmod go-w {self.root}, after checking what is in it, or set TKTUNE_CACHE_DIR.",
            )

    def create(self) -> None:
        """Make the folder (mode 0700) and its rooms. Raises `CacheError`."""
        try:
            if not self.root.is_dir():
                self.root.parent.mkdir(parents=True, exist_ok=True)
                self.root.mkdir(mode=0o700, exist_ok=True)
            self.check()
            for room in _ROOMS:
                (self.root / room).mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise not_writable(self.root, error) from error

    def artifact(self, digest: str) -> Path:
        return self.root / "artifacts" / digest

    def failed_log(self, digest: str) -> Path:
        return self.root / "failed" / f"{digest}.log"

    def lock(self, digest: str) -> DigestLock:
        return DigestLock(self.root / "locks" / f"{digest}.lock")

    def digests(self) -> Iterator[str]:
        """Digests of everything published, sorted."""
        room = self.root / "artifacts"
        if room.is_dir():
            yield from sorted(entry.name for entry in os.scandir(room) if entry.is_dir())

    def private_folder(self) -> Path:
        """A new folder that nobody else uses, on the cache's file system."""
        return Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=self.root / "building"))

    def publish(self, folder: Path, digest: str, manifest: dict[str, Any]) -> bool:
        """Write the manifest into `folder`, make all of it durable, and give it its name in one rename.

        Returns whether ours was published; False when another process was first, whose artifact then stands.
        """
        (folder / MANIFEST_NAME).write_text(json.dumps(manifest, indent=1, sort_keys=True))
        for path in sorted(folder.iterdir()):
            path.chmod(0o600)
            _sync(path)
        _sync(folder)
        target = self.artifact(digest)
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():
                raise
            return False
        _sync(target.parent)
        return True

    def quarantine(self, digest: str) -> Path | None:
        """Move a bad artifact aside; None when it cannot be moved (a read-only cache) or is gone already."""
        place = self.root / "quarantine" / f"{digest}.{time.time_ns()}"
        try:
            place.parent.mkdir(mode=0o700, exist_ok=True)
            self.artifact(digest).rename(place)
        except OSError:
            return None
        return place

    def remove_artifact(self, digest: str) -> None:
        """Take the name away first, then the content: readers see all of it or nothing."""
        grave = self.private_folder()
        self.artifact(digest).rename(grave / digest)
        shutil.rmtree(grave, ignore_errors=True)

    def remove_stale(self, older_than_s: float = STALE_S) -> int:
        """Remove private folders of builders that died: older than an hour. Returns how many."""
        return self._remove_old("building", older_than_s)

    def remove_leftovers(self, older_than_s: float) -> int:
        """Remove logs of failed builds and quarantined artifacts older than that. Returns how many."""
        return sum(self._remove_old(room, older_than_s) for room in ("failed", "quarantine"))

    def measured(self, template: str) -> Measured:
        return read_measured(self.root / "measured" / f"{template}.json")

    def record_measured(self, template: str, measured: Measured) -> None:
        place = self.root / "measured" / f"{template}.json"
        draft = place.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(json.dumps(asdict(measured)))
        draft.replace(place)

    def _remove_old(self, room: str, older_than_s: float) -> int:
        removed = 0
        folder = self.root / room
        for entry in list(os.scandir(folder)) if folder.is_dir() else []:
            try:
                old = time.time() - entry.stat(follow_symlinks=False).st_mtime > older_than_s
            except FileNotFoundError:
                continue
            if not old:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                Path(entry.path).unlink(missing_ok=True)
            removed += 1
        return removed


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
