"""Where tktune's own sources are, and where its database and cache live by default."""

from __future__ import annotations

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def csrc_root() -> Path:
    """The kernels' sources: inside an installed package, or beside it in a checkout."""
    installed = _PACKAGE / "csrc"
    return installed if installed.is_dir() else _PACKAGE.parent / "csrc"


def studies_root() -> Path:
    """The study files that ship with tktune."""
    installed = _PACKAGE / "studies"
    return installed if installed.is_dir() else _PACKAGE.parent / "studies"


def database_url() -> str:
    """`TKTUNE_DB` (a SQLAlchemy URL), or SQLite under `$XDG_DATA_HOME/tktune/tktune.db`."""
    url = os.environ.get("TKTUNE_DB")
    if url:
        return url if "://" in url else f"sqlite:///{Path(url).expanduser().absolute()}"
    base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return f"sqlite:///{base / 'tktune' / 'tktune.db'}"


def cache_root() -> Path:
    """`TKTUNE_CACHE_DIR`, or `$XDG_CACHE_HOME/tktune`."""
    named = os.environ.get("TKTUNE_CACHE_DIR")
    if named:
        return Path(named).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tktune"
