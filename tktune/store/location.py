"""Where a database is, and what its failures mean in words. Standard library only; opens no database itself
except through `connect_sqlite`.
"""

from __future__ import annotations

import ctypes
import os
import re
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from tktune.core.errors import DatabaseError

# statfs(2) magic numbers of file systems whose locks and shared mappings cannot carry a WAL.
NETWORK_FILE_SYSTEMS = {
    0x6969: "NFS",
    0x517B: "SMB",
    0xFE534D42: "SMB2",
    0xFF534D42: "CIFS",
    0x01021997: "9p",
    0x0BD00BD0: "Lustre",
    0x00C36400: "Ceph",
    0x5346414F: "AFS",
    0x73757245: "Coda",
    0x47504653: "GPFS",
    0x19830326: "BeeGFS",
    0x7461636F: "OCFS2",
    0xAAD7AAEA: "PanFS",
    0x65735546: "FUSE",
}

_MAGIC = b"SQLite format 3\0"


@dataclass(frozen=True)
class Place:
    """Where a database is. `path` is None for a server and for SQLite in memory; `shown` hides the password."""

    url: str
    kind: Literal["sqlite", "postgresql"]
    path: Path | None
    shown: str

    @property
    def in_memory(self) -> bool:
        return self.kind == "sqlite" and self.path is None


def place(url: str) -> Place:
    """Read a database URL, or the plain path of an SQLite file. Raises `DatabaseError` on any other scheme."""
    if "://" not in url:
        url = f"sqlite:///{Path(url).expanduser().absolute()}"
    scheme, _, rest = url.partition("://")
    backend = scheme.partition("+")[0]
    if scheme in ("sqlite", "sqlite+pysqlite"):
        if rest and not rest.startswith("/"):
            raise DatabaseError(
                f"The database URL {url!r} names no file.", "Write sqlite:///FILE or sqlite:////FOLDER/FILE."
            )
        name = rest[1:].partition("?")[0]
        if name in ("", ":memory:"):
            return Place(url, "sqlite", None, "the database in memory")
        return Place(url, "sqlite", Path(name).absolute(), name)
    if backend in ("postgresql", "postgres"):
        driver = "+psycopg" if "+" not in scheme else scheme[scheme.index("+") :]
        url = f"postgresql{driver}://{rest}"
        return Place(url, "postgresql", None, re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", url))
    raise DatabaseError(
        f"The database URL scheme {scheme!r} is not known.",
        "Use sqlite:////FOLDER/FILE or postgresql://USER@HOST/NAME.",
    )


def network_file_system(folder: Path) -> str | None:
    """The name of the network file system that `folder` is on, or None when it is local or cannot be told."""
    return NETWORK_FILE_SYSTEMS.get(file_system_magic(folder))


def file_system_magic(folder: Path) -> int:
    """`f_type` of statfs(2) (the first word of struct statfs on 64-bit Linux), or 0 when it cannot be read."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "statfs"):
        return 0
    buffer = (ctypes.c_long * 64)()
    if libc.statfs(os.fsencode(folder), ctypes.byref(buffer)) != 0:
        return 0
    return buffer[0] & 0xFFFFFFFF


def connect_sqlite(
    path: Path, mode: Literal["rw", "rwc"], timeout_s: float, immutable: bool = False
) -> sqlite3.Connection:
    """An SQLite connection in autocommit; "rw" never creates the file. Transactions are opened by hand.

    A write-protected file opens for reading. The file is never opened by other means in this process: closing
    such a descriptor would drop the locks SQLite holds on it (sqlite.org/howtocorrupt.html, §2.2).
    """
    options = f"mode={mode}" + ("&immutable=1" if immutable else "")
    return sqlite3.connect(
        f"file:{quote(str(path))}?{options}",
        uri=True,
        timeout=timeout_s,
        isolation_level=None,
        check_same_thread=False,
    )


def made(path: Path, shown: str) -> bool:
    """Whether there is a database file. Raises `DatabaseError` for a stub that SQLite would take for an empty one."""
    try:
        size = path.stat().st_size
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise DatabaseError(
            f"The database {shown} cannot be reached: {error.strerror}.",
            "Change the permissions of its folder, or name another database with TKTUNE_DB.",
        ) from error
    if 0 < size < len(_MAGIC):
        raise _told("SQLITE_NOTADB", shown)
    return True


def check_whole(connection: sqlite3.Connection, path: Path, shown: str) -> None:
    """Raises `DatabaseError` when the file is shorter than its pages: SQLite reads the lost tail as zeros."""
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    page_bytes = connection.execute("PRAGMA page_size").fetchone()[0]
    log = Path(f"{path}-wal")
    if log.exists() and log.stat().st_size:
        return  # the newest pages may still be in the log
    if path.stat().st_size < pages * page_bytes:
        raise _told("SQLITE_CORRUPT", shown)


def connect_for_reading(path: Path, timeout_s: float) -> sqlite3.Connection:
    """A connection that cannot change rows. Works in a folder this user cannot write when no writer is at work."""
    connection = connect_sqlite(path, "rw", timeout_s)
    try:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.OperationalError:
        connection.close()
        log = Path(f"{path}-wal")
        if log.exists() and log.stat().st_size:
            raise
        # A closed WAL database in a read-only folder has no log to replay, and none can be made.
        connection = connect_sqlite(path, "rw", timeout_s, immutable=True)
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    connection.execute("PRAGMA query_only=ON")
    return connection


_WORDS: tuple[tuple[str, str, str], ...] = (
    (
        "SQLITE_FULL",
        "The disk that holds the database {0} is full; what was stored before is safe.",
        "Free some space, or name another place with TKTUNE_DB, and run the same command again.",
    ),
    (
        "SQLITE_BUSY",
        "Another process is writing to the database {0}.",
        "Wait until it is done, or name another database with TKTUNE_DB.",
    ),
    (
        "SQLITE_LOCKED",
        "Another connection holds the database {0}.",
        "Wait until it is done, or name another database with TKTUNE_DB.",
    ),
    (
        "SQLITE_READONLY",
        "The database {0} cannot be written by this user.",
        "Change the permissions of the file and its folder, or name another database with TKTUNE_DB.",
    ),
    (
        "SQLITE_CANTOPEN",
        "The database {0} cannot be opened.",
        "Check that its folder exists and that this user may read and write it, or set TKTUNE_DB.",
    ),
    (
        "SQLITE_PERM",
        "The database {0} may not be opened by this user.",
        "Change the permissions of the file, or name another database with TKTUNE_DB.",
    ),
    (
        "SQLITE_NOTADB",
        "The file {0} is not a database; it was left untouched.",
        "Move it away, or name another database with TKTUNE_DB.",
    ),
    (
        "SQLITE_CORRUPT",
        "The database {0} is damaged; it was left untouched.",
        "Keep a copy, move it away or restore a backup, and run again.",
    ),
    (
        "SQLITE_IOERR",
        "The disk failed while the database {0} was read or written.",
        "Check the disk (dmesg, df), or name another database with TKTUNE_DB.",
    ),
)


def in_words(error: BaseException | None, shown: str) -> DatabaseError:
    """A driver's error as a sentence with the way out."""
    code = getattr(error, "sqlite_errorname", None) or ""
    for name, _, _ in _WORDS:
        if code.startswith(name):
            return _told(name, shown)
    told = " ".join(str(error).split()).rstrip(".")
    return DatabaseError(f"The database {shown} answered: {told}.", "Check it with: tktune db check.")


def _told(name: str, shown: str) -> DatabaseError:
    sentence, way_out = next((sentence, way_out) for known, sentence, way_out in _WORDS if known == name)
    return DatabaseError(sentence.format(shown), way_out)
