"""Which files of ours a source includes, and their SHA-256. System headers belong to the compiler's identity."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tktune.build.reading import once
from tktune.core.errors import ArtifactError

_INCLUDE = re.compile(rb"^[ \t]*#[ \t]*include(?:_next)?[ \t]*([^\r\n]*)", re.MULTILINE)
_NAMED = re.compile(rb'"([^"\n]+)"|<([^>\n]+)>')
_SETTLED_NS = 2_000_000_000

_Stamp = tuple[int, int, int] | None


@dataclass
class _Closure:
    """Files (resolved) with their SHA-256, and every place that was looked at: unchanged places, unchanged closure."""

    files: dict[str, str] = field(default_factory=dict)
    seen: dict[str, _Stamp] = field(default_factory=dict)
    hashes: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # by the folder they are seen from

    def stands(self) -> bool:
        return all(_stamp(path) == stamp for path, stamp in self.seen.items())

    def settled(self) -> bool:
        """Whether no file was touched just now, so that an edit to come cannot carry the same time stamp."""
        newest = max((stamp[0] for stamp in self.seen.values() if stamp), default=0)
        return time.time_ns() - newest > _SETTLED_NS


_known: dict[tuple[str, tuple[str, ...]], _Closure] = {}


def include_closure(source: Path, include_dirs: Sequence[Path] = ()) -> list[Path]:
    """`source` and every file it includes, directly or not, sorted; paths are resolved.

    A name is looked for beside the file that includes it (quotes only), then in `include_dirs`; names found in
    neither are system headers. Includes under a false #if count too: a larger closure is only stricter. Raises
    `ArtifactError` for a missing source and for an include whose name a macro computes.
    """
    return [Path(path) for path in sorted(_closure(source, include_dirs).files)]


def closure_hashes(source: Path, include_dirs: Sequence[Path] = ()) -> list[tuple[str, str]]:
    """(path relative to the source's folder, SHA-256) of every file of the closure, sorted."""
    base, closure = str(source.parent), _closure(source, include_dirs)
    if base not in closure.hashes:
        real = os.path.realpath(base)
        named = ((os.path.relpath(path, real), sha256) for path, sha256 in closure.files.items())
        closure.hashes[base] = sorted(named)
    return closure.hashes[base]


def _closure(source: Path, include_dirs: Sequence[Path]) -> _Closure:
    key = os.path.abspath(source), tuple(os.path.abspath(folder) for folder in include_dirs)  # noqa: PTH100
    return once(("closure", *key), lambda: _looked_at(*key))


def _looked_at(source: str, folders: tuple[str, ...]) -> _Closure:
    known = _known.get((source, folders))
    if known is not None and known.stands():
        return known
    found = _walk(source, folders)
    if found.settled():
        _known[source, folders] = found
    return found


def _walk(source: str, folders: Sequence[str]) -> _Closure:
    found = _Closure()
    if not _is_file(source, found):
        raise ArtifactError(f"The source {source} does not exist.", "Check the family's build_spec.")
    waiting = [source]
    while waiting:
        path = waiting.pop()
        real = os.path.realpath(path)
        if real in found.files:
            continue
        text = Path(real).read_bytes()
        found.files[real] = hashlib.sha256(text).hexdigest()
        for name in _names(real, text):
            beside = [os.path.dirname(path)] if name.startswith('"') else []  # noqa: PTH120
            for folder in [*beside, *folders]:
                target = os.path.join(folder, name[1:-1])  # noqa: PTH118
                if _is_file(target, found):
                    waiting.append(target)
                    break
    return found


def _names(path: str, text: bytes) -> list[str]:
    """The included names with their quotes or brackets."""
    names: list[str] = []
    for match in _INCLUDE.finditer(text):
        named = _NAMED.match(match.group(1))
        if named is None:
            raise ArtifactError(
                f"{path} includes a name that a macro computes: {match.group(1).decode(errors='replace')}.",
                "Name the file in quotes, so that its content can be part of the digest.",
            )
        names.append(named.group(0).decode())
    return names


def _is_file(path: str, found: _Closure) -> bool:
    found.seen[path] = stamp = _stamp(path)
    return stamp is not None and os.path.isfile(path)  # noqa: PTH113


def _stamp(path: str) -> _Stamp:
    try:
        status = os.stat(path)  # noqa: PTH116 — a digest is asked for thousands of times; Path would double its cost
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
