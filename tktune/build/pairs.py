"""Pairs: an artifact that compiles nothing and names, in a short JSON text, artifacts of the same cache that run one
after the other. It has a digest, a SHA-256 and a manifest like any other, so that it is stored, served and verified alike.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tktune.build import failures
from tktune.build.artifact import Artifact, BuildOutcome, altered, read_manifest
from tktune.build.folder import CacheFolder
from tktune.core.build_spec import BuildSpec
from tktune.core.canonical import canonical_json, digest
from tktune.core.errors import ArtifactError

if TYPE_CHECKING:
    from tktune.build.cache import ArtifactCache

_FORMAT = 1
_FILE_NAME = "artifact.json"
_WAIT_S = 0.01


@dataclass(frozen=True)
class Part:
    """An artifact that a pair names, where it should lie; `sha256` is the one recorded when the pair was made."""

    digest: str
    path: Path
    sha256: str


def pair_digest(digests: Sequence[str]) -> str:
    """The name of a pair: it covers everything that the names of its parts cover, in their order."""
    return digest({"format": _FORMAT, "kind": "pair", "parts": list(digests)})


def parts_of(path: Path, sha256: str) -> tuple[Part, ...]:
    """The artifacts that the pair at `path` names. Raises `ArtifactError` when it is not what was made."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error}.", "Build it again.") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ArtifactError(
            f"{path} is not what was made.", "Run `tktune cache verify`, then build it again."
        )
    try:
        said = json.loads(content)
        if said["format"] != _FORMAT:
            raise ArtifactError(f"{path} is a pair of another version.", "Build it again.")
        room = path.parent.parent
        return tuple(
            Part(one["digest"], room / one["digest"] / Path(one["file"]).name, one["sha256"])
            for one in said["parts"]
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path} is no pair of artifacts.", "Build it again.") from error


def build(
    cache: ArtifactCache,
    specs: Sequence[BuildSpec],
    jobs: int | None,
    on_done: Callable[[BuildOutcome], None] | None,
    cancel: threading.Event | None,
) -> list[BuildOutcome]:
    """As `ArtifactCache.build`, where some of `specs` are pairs: their parts are built first, each once."""
    flat: list[BuildSpec] = []
    places: list[range] = []
    for spec in specs:
        places.append(range(len(flat), len(flat) + max(1, len(spec.parts))))
        flat += spec.parts or (spec,)
    built = cache.build(flat, jobs, None, cancel)
    outcomes = []
    for spec, place in zip(specs, places, strict=True):
        of_parts = [built[index] for index in place]
        outcome = _paired(cache, spec, of_parts) if spec.parts else of_parts[0]
        outcomes.append(outcome)
        if on_done is not None:
            on_done(outcome)
    return outcomes


def with_parts(folder: CacheFolder, digests: Collection[str]) -> frozenset[str]:
    """`digests`, and those of the parts of every pair among them."""
    kept = set(digests)
    for name in digests:
        with contextlib.suppress(ArtifactError):
            kept.update(read_manifest(folder.artifact(name)).describes.get("parts", ()))
    return frozenset(kept)


def _paired(cache: ArtifactCache, spec: BuildSpec, of_parts: Sequence[BuildOutcome]) -> BuildOutcome:
    name = pair_digest([outcome.digest for outcome in of_parts])
    seconds = sum(outcome.seconds for outcome in of_parts)
    peak = max(outcome.peak_bytes for outcome in of_parts)
    cached = all(outcome.cached for outcome in of_parts)
    for outcome in of_parts:
        if outcome.artifact is None:
            return BuildOutcome(
                spec, name, None, seconds, peak, cached, outcome.error_sentence, outcome.log, outcome.rejected,
                outcome.cancelled,
            )  # fmt: skip
    parts = [outcome.artifact for outcome in of_parts if outcome.artifact is not None]
    with cache.folder.lock(name) as lock:
        while not lock.try_acquire():
            time.sleep(_WAIT_S)
        standing = cache.find(name)
        if standing is not None and _names(standing, parts):
            return BuildOutcome(spec, name, standing, seconds, peak, cached)
        if standing is not None:
            cache.folder.remove_artifact(name)  # a part was built anew and is another file now
        made = _published(cache.folder, spec, name, parts, seconds, peak)
    mismatches = tuple(sentence for outcome in of_parts for sentence in outcome.mismatches)
    return BuildOutcome(spec, name, made, seconds, peak, cached, mismatches=mismatches)


def _names(pair: Artifact, parts: Sequence[Artifact]) -> bool:
    wanted = [part.sha256 for part in parts]
    return [part.sha256 for part in parts_of(pair.path, pair.sha256)] == wanted


def _published(
    folder: CacheFolder, spec: BuildSpec, name: str, parts: Sequence[Artifact], seconds: float, peak: int
) -> Artifact:
    content = canonical_json(
        {
            "format": _FORMAT,
            "parts": [{"digest": p.digest, "file": p.path.name, "sha256": p.sha256} for p in parts],
        }
    ).encode()
    batch: Path | None = None
    try:
        batch = folder.private_folder()
        place = batch / "publish"
        place.mkdir(mode=0o700)
        made = place / _FILE_NAME
        made.write_bytes(content)
        artifact = Artifact(
            digest=name,
            path=made,
            sha256=hashlib.sha256(content).hexdigest(),
            bytes=len(content),
            facts=_facts(parts),
            toolchain_digest=parts[0].toolchain_digest,
            built_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            seconds=round(seconds, 3),
            peak_bytes=peak,
            toolchain=parts[0].toolchain,
            describes={"name": spec.name, "kind": spec.kind, "parts": [p.digest for p in parts]},
        )
        folder.publish(place, name, artifact.manifest())
    except OSError as error:
        raise failures.not_writable(folder.root, error) from error
    finally:
        if batch is not None:
            shutil.rmtree(batch, ignore_errors=True)
    standing = read_manifest(folder.artifact(name))
    if reason := altered(standing):
        raise ArtifactError(f"What was published as {name[:12]} {reason}.", "Run: tktune cache verify.")
    return standing


def _facts(parts: Sequence[Artifact]) -> dict[str, int]:
    """What decides ties: shared memory and registers of all parts together."""
    names = {"smem_bytes", "registers"}.intersection(*(part.facts for part in parts))
    return {name: sum(int(part.facts[name]) for part in parts) for name in sorted(names)}
