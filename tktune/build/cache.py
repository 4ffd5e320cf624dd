"""The artifact cache: build what is missing, once, and hand out only what is exactly what was built."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from tktune.build import commands, facts, pairs, toolchain
from tktune.build.artifact import LOG_NAME, Artifact, BuildOutcome, altered, read_manifest
from tktune.build.builder import Failure, Order, build_batch
from tktune.build.digest import artifact_digest
from tktune.build.folder import CacheFolder
from tktune.build.locks import DigestLock
from tktune.build.reading import once
from tktune.build.toolchain import Toolchain
from tktune.core.build_spec import BuildSpec
from tktune.core.errors import ArtifactError

_AT_ONCE = 256  # digests locked and built in one ninja run; bounds open files
_WAIT_S = 0.05


@dataclass(frozen=True)
class BadArtifact:
    """An artifact that is not what was built; `reason` is the rest of a sentence."""

    digest: str
    path: Path
    reason: str


@dataclass(frozen=True)
class Collected:
    """What a clean-up removed."""

    digests: tuple[str, ...]
    bytes: int
    leftovers: int


_Judge = Callable[[BuildSpec], BuildOutcome]


class ArtifactCache:
    """Artifacts under `root`, each in a folder named by its digest.

    Any number of processes may use one root. `on_note` receives sentences on things found and mended (a bad
    artifact put aside); they also collect in `notes`. Nothing is created on disk before the first `build`.

        cache = ArtifactCache(cache_root())
        for outcome in cache.build(specs):
            print(outcome.artifact.path if outcome.ok else outcome.error_sentence)
    """

    def __init__(self, root: Path, on_note: Callable[[str], None] | None = None) -> None:
        self.folder = CacheFolder(root)
        self.notes: list[str] = []
        self._on_note = on_note
        self._failed: dict[str, Failure] = {}
        self._swept = False

    @property
    def root(self) -> Path:
        return self.folder.root

    def toolchain(self, spec: BuildSpec) -> Toolchain:
        """The compiler that would build `spec` here. Raises `ToolchainError`."""
        first = spec.parts[0] if spec.parts else spec
        kind = commands.toolchain_kind(first)
        return once(("toolchain", kind, first.arch), lambda: toolchain.detect(kind, first.arch))

    def digest(self, spec: BuildSpec) -> str:
        """The name of the artifact `spec` becomes here. Raises `ToolchainError`, `ArtifactError`."""
        if spec.parts:
            return pairs.pair_digest([self.digest(part) for part in spec.parts])
        return artifact_digest(spec, self.toolchain(spec))

    def find(self, digest: str) -> Artifact | None:
        """The published artifact, verified against its recorded SHA-256, or None.

        One that is truncated or altered is moved to `quarantine/` with a note, and is missing from then on.
        Raises `CacheError` when others may write the cache.
        """
        self.folder.check()
        place = self.folder.artifact(digest)
        if not place.is_dir():
            return None
        try:
            artifact = read_manifest(place)
            reason = altered(artifact)
        except ArtifactError:
            reason = "has no readable manifest"
        if not reason:
            with contextlib.suppress(OSError):
                os.utime(place)  # last use, for gc
            return artifact
        if not place.is_dir():
            return None  # removed by another process meanwhile
        aside = self.folder.quarantine(digest)
        moved = f"moved to {aside}" if aside else "left where it is, since the cache cannot be written"
        self._note(f"The artifact {digest[:12]} {reason}; {moved}.")
        return None

    def holds(self, digest: str) -> bool:
        """Whether an artifact of this name is published; not whether it is sound (`find`). Costs one look at the disk."""
        return self.folder.artifact(digest).is_dir()

    def build(
        self,
        specs: Sequence[BuildSpec],
        jobs: int | None = None,
        on_done: Callable[[BuildOutcome], None] | None = None,
        cancel: threading.Event | None = None,
    ) -> list[BuildOutcome]:
        """One outcome a spec, in order; what is published already is not compiled again.

        Each outcome also goes to `on_done` as soon as it is known. `jobs` bounds the compilers at once (default:
        cores and free memory decide). A digest another process is building is waited for and reused. A failed
        compile is an outcome, and is not tried again by this cache object. Once `cancel` is set, from whichever
        thread, every compiler is killed with all its processes, nothing half made stays, and what is not built
        yet ends as `cancelled`. Raises `CacheError` (folder refused,
        disk full, out of memory twice), `ToolchainError`, `ArtifactError` (a source is missing); what was
        published until then stays.
        """
        self._prepare()
        if any(spec.parts for spec in specs):
            return pairs.build(self, specs, jobs, on_done, cancel)
        outcomes: dict[int, BuildOutcome] = {}

        def deliver(order: Order, judged: _Judge) -> None:
            for index, spec in order.specs:
                outcomes[index] = judged(spec)
                if on_done is not None:
                    on_done(outcomes[index])

        waiting = self._orders(specs)
        while waiting and not _set(cancel):
            with contextlib.ExitStack() as held:
                mine: list[tuple[Order, DigestLock]] = []
                busy: list[Order] = []
                for order in waiting:
                    if self._deliver_known(order, deliver):
                        continue
                    lock = held.enter_context(self.folder.lock(order.digest))
                    if len(mine) >= _AT_ONCE or not lock.try_acquire():
                        busy.append(order)
                    elif not self._deliver_known(order, deliver):  # published while we asked for the lock
                        mine.append((order, lock))
                locks = {order.digest: lock for order, lock in mine}
                if mine:
                    orders = [order for order, _ in mine]
                    batch = build_batch(self.folder, orders, jobs, self._note, cancel)
                    with contextlib.closing(batch) as finished:
                        for order, result in finished:
                            if isinstance(result, Failure):
                                self._failed[order.digest] = result
                            deliver(order, _judge(order.digest, result, cached=False))
                            locks[order.digest].release()
            waiting = busy
            if waiting and not mine:
                time.sleep(_WAIT_S)  # others build these; holding nothing, so no two processes can block
        for index, spec in enumerate(specs):
            if index not in outcomes:
                outcomes[index] = _cancelled(spec, self.digest(spec))
                if on_done is not None:
                    on_done(outcomes[index])
        return [outcomes[index] for index in range(len(specs))]

    def entries(self) -> list[Artifact]:
        """Every published artifact with a readable manifest, by digest; contents are not verified."""
        self.folder.check()
        found: list[Artifact] = []
        for digest in self.folder.digests():
            with contextlib.suppress(ArtifactError):
                found.append(read_manifest(self.folder.artifact(digest)))
        return found

    def verify(self) -> list[BadArtifact]:
        """Every published artifact that is not what was built. Moves nothing; `find` does."""
        self.folder.check()
        bad: list[BadArtifact] = []
        for digest in self.folder.digests():
            place = self.folder.artifact(digest)
            try:
                artifact = read_manifest(place)
            except ArtifactError:
                bad.append(BadArtifact(digest, place, "has no readable manifest"))
                continue
            if reason := altered(artifact):
                bad.append(BadArtifact(digest, artifact.path, reason))
        return bad

    def gc(
        self,
        keep_digests: Collection[str] = (),
        older_than_s: float | None = None,
        max_bytes: int | None = None,
    ) -> Collected:
        """Remove artifacts not kept that were last used longer ago than `older_than_s`, then the least recently
        used ones until at most `max_bytes` remain; and what dead builders, failures and quarantine left behind.
        A pair that is kept keeps its parts."""
        if not self.folder.exists():
            return Collected((), 0, 0)
        self.folder.create()
        keep_digests = pairs.with_parts(self.folder, keep_digests)
        leftovers = self.folder.remove_stale()
        leftovers += self.folder.remove_leftovers(older_than_s if older_than_s is not None else 7 * 86400.0)
        sizes: dict[str, tuple[float, int]] = {}
        for digest in self.folder.digests():
            place = self.folder.artifact(digest)
            with contextlib.suppress(FileNotFoundError):
                sizes[digest] = place.stat().st_mtime, sum(f.stat().st_size for f in place.iterdir())
        total = sum(size for _, size in sizes.values())
        removed: list[str] = []
        freed = 0
        for digest, (used_at, size) in sorted(sizes.items(), key=lambda item: item[1]):
            old = older_than_s is not None and time.time() - used_at > older_than_s
            over = max_bytes is not None and total - freed > max_bytes
            if digest in keep_digests or not (old or over):
                continue
            with self.folder.lock(digest) as lock:
                if lock.try_acquire():
                    self.folder.remove_artifact(digest)
                    lock.remove()
                    removed.append(digest)
                    freed += size
        return Collected(tuple(removed), freed, leftovers)

    def _prepare(self) -> None:
        self.folder.create()
        if not self._swept:
            self._swept = True
            self.folder.remove_stale()

    def _orders(self, specs: Sequence[BuildSpec]) -> list[Order]:
        orders: dict[str, Order] = {}
        for index, spec in enumerate(specs):
            compiler = self.toolchain(spec)
            digest = artifact_digest(spec, compiler)
            orders.setdefault(digest, Order(digest, compiler, [])).specs.append((index, spec))
        return list(orders.values())

    def _deliver_known(self, order: Order, deliver: Callable[[Order, _Judge], None]) -> bool:
        known = self._failed.get(order.digest) or self.find(order.digest)
        if known is None:
            return False
        deliver(order, _judge(order.digest, known, cached=True))
        return True

    def _note(self, sentence: str) -> None:
        self.notes.append(sentence)
        if self._on_note is not None:
            self._on_note(sentence)


def _set(cancel: threading.Event | None) -> bool:
    return cancel is not None and cancel.is_set()


def _cancelled(spec: BuildSpec, digest: str) -> BuildOutcome:
    sentence = f"{spec.name} was not built: the build was stopped."
    return BuildOutcome(spec, digest, None, error_sentence=sentence, cancelled=True)


def _judge(digest: str, result: Artifact | Failure, *, cached: bool) -> _Judge:
    """What one asked-for spec gets out of the build of its digest."""

    def judged(spec: BuildSpec) -> BuildOutcome:
        seconds = 0.0 if cached else result.seconds
        if isinstance(result, Failure):
            return BuildOutcome(
                spec,
                digest,
                None,
                seconds,
                result.peak_bytes,
                cached,
                error_sentence=result.sentence,
                log=result.log,
            )
        objection = facts.objections(spec, result.facts)
        return BuildOutcome(
            spec,
            digest,
            None if objection else result,
            seconds,
            result.peak_bytes,
            cached,
            error_sentence=objection,
            log=result.path.parent / LOG_NAME,
            rejected=bool(objection),
            mismatches=facts.contradictions(spec, result.facts),
        )

    return judged
