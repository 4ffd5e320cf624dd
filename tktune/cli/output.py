"""How commands speak: JSON on demand, plain text otherwise, errors as one sentence on stderr."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from tktune.core.errors import WorkError


def print_error(sentence: str, way_out: str, as_json: bool) -> None:
    """One line on stderr: the sentence and the way out, or an object with both."""
    if as_json:
        line = json.dumps({"error": sentence, "way_out": way_out}, ensure_ascii=False)
    else:
        line = " ".join(f"{sentence} {way_out}".split())
    print(line, file=sys.stderr, flush=True)


def print_json(value: Any) -> None:
    """`value` as indented JSON on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False))


def print_line(value: Any) -> None:
    """`value` as one line of JSON on stdout, at once."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def make_writable(path: Path) -> None:
    """Make the folder of `path`, before long work whose result goes there. Raises `WorkError` with the way out."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):  # rights alone do not say it of every file system
            reason = "it is a folder" if path.is_dir() else ""
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise WorkError(f"{path} cannot be written: {reason}.", "Choose another place.")


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` whole or not at all, making its folder. Raises `WorkError` with the way out."""
    scratch = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(text, encoding="utf-8")
        scratch.replace(path)
    except OSError as error:
        raise WorkError(
            f"{path} cannot be written: {error.strerror or error}.", "Choose another place."
        ) from error
