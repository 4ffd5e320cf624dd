"""Building a batch of locked digests: compile by ninja, check, publish. Takes no locks and remembers nothing."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from tktune.build import commands, facts, failures, ninja_batch, resources
from tktune.build.artifact import Artifact, altered, read_manifest
from tktune.build.folder import CacheFolder
from tktune.build.toolchain import Toolchain
from tktune.core.build_spec import BuildSpec
from tktune.core.errors import ArtifactError


@dataclass(frozen=True)
class Failure:
    """A compile that gave no artifact: one sentence, the compiler's output, what it took."""

    sentence: str
    log: Path
    seconds: float
    peak_bytes: int


@dataclass
class Order:
    """A digest to build, and every asked-for spec (with its place among them) that becomes it."""

    digest: str
    toolchain: Toolchain
    specs: list[tuple[int, BuildSpec]]

    @property
    def spec(self) -> BuildSpec:
        return self.specs[0][1]

    @property
    def template(self) -> str:
        """What compiles of like cost share: kind, arch and source."""
        return re.sub(r"[^A-Za-z0-9_.+-]", "_", f"{self.spec.kind}-{self.spec.arch}-{self.spec.source.stem}")

    @property
    def file_name(self) -> str:
        return f"artifact{commands.SUFFIX[self.spec.kind]}"


def build_batch(
    folder: CacheFolder,
    orders: Sequence[Order],
    jobs: int | None,
    note: Callable[[str], None],
    cancel: threading.Event | None = None,
) -> Generator[tuple[Order, Artifact | Failure], None, None]:
    """Compile `orders` and yield each with its published artifact, or why there is none, as it comes.

    The caller holds the lock of every digest. Compiles that were killed for want of memory are tried once more
    with half as many at once. Once `cancel` is set the compilers are stopped and no more come. Raises `CacheError` (disk full, cache not writable, out of memory twice) and
    `ToolchainError`; nothing unfinished stays behind, whatever ends it.
    """
    measured = {order.template: folder.measured(order.template) for order in orders}
    peak = max(
        measured[order.template].peak_bytes or resources.UNMEASURED_PEAK_BYTES[order.spec.kind]
        for order in orders
    )
    parallel = jobs or resources.job_count(resources.usable_cores(), resources.free_bytes(), peak)
    left = {order.digest: order for order in orders}
    with _private(folder) as batch:
        for attempt in (1, 2):
            starved: dict[str, Order] = {}
            steps = [_step(o, batch, resources.timeout_s(measured[o.template])) for o in left.values()]
            with contextlib.closing(ninja_batch.run(steps, batch, parallel, cancel)) as results:
                for result in results:
                    order = left[result.digest]
                    if result.code and failures.for_want_of_disk(result.log):
                        raise failures.disk_full(folder.root)
                    if not result.timed_out and failures.for_want_of_memory(result.code, result.log):
                        starved[order.digest] = order
                        continue
                    yield order, _settled(folder, order, result, batch / order.digest)
                    os.utime(batch)  # a batch at work is never stale
                    seen = measured[order.template]
                    measured[order.template] = seen.widened(result.peak_bytes, result.seconds)
            for template, seen in measured.items():
                if seen.peak_bytes:
                    folder.record_measured(template, seen)
            if not starved or (cancel is not None and cancel.is_set()):
                return
            if attempt == 2:
                raise failures.memory_exhausted(next(iter(starved.values())).spec.name, parallel)
            left, parallel = starved, max(1, parallel // 2)
            note(
                f"{len(starved)} compiles were killed for want of memory; trying again with {parallel} at once."
            )


def _settled(
    folder: CacheFolder, order: Order, result: ninja_batch.StepResult, place: Path
) -> Artifact | Failure:
    """Publish a compile that succeeded; keep the log of one that failed."""
    sentence = _verdict(order, result, place)
    if not sentence:
        try:
            return _published(folder, order, result, place / "publish")
        except ArtifactError as error:
            sentence = f"{order.spec.name} does not compile: {error.sentence}"
    log = folder.failed_log(order.digest)
    log.write_text(f"# {order.spec.name}\n# {sentence}\n{result.log}")
    return Failure(sentence, log, result.seconds, result.peak_bytes)


def _published(folder: CacheFolder, order: Order, result: ninja_batch.StepResult, place: Path) -> Artifact:
    made = place / order.file_name
    content = made.read_bytes()
    if content[:4] != b"\x7fELF":
        raise ArtifactError("the compiler made something that is no ELF file.")
    artifact = Artifact(
        digest=order.digest,
        path=made,
        sha256=hashlib.sha256(content).hexdigest(),
        bytes=len(content),
        facts=facts.cubin_facts(result.log, made) if order.spec.kind == "cubin" else {},
        toolchain_digest=order.toolchain.digest,
        built_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        seconds=round(result.seconds, 3),
        peak_bytes=result.peak_bytes,
        toolchain={
            **asdict(order.toolchain),
            "path": str(order.toolchain.path),
            "flags": list(order.toolchain.flags),
        },
        describes={
            "name": order.spec.name,
            "kind": order.spec.kind,
            "arch": order.spec.arch,
            "source": str(order.spec.source),
            "defines": order.spec.defines,
            "flags": commands.flags(order.spec, order.toolchain),
        },
    )
    folder.publish(place, order.digest, artifact.manifest())
    standing = read_manifest(folder.artifact(order.digest))  # ours, or that of whoever was first
    if reason := altered(standing):
        raise ArtifactError(f"what was published {reason}.")
    return standing


def _verdict(order: Order, result: ninja_batch.StepResult, place: Path) -> str:
    """Why there is nothing to publish, as one sentence; empty when there is."""
    name = order.spec.name
    if result.timed_out:
        return f"{name} did not compile within {result.seconds:.0f} s and was stopped."
    if result.code:
        return failures.failure_sentence(name, result.code, result.log)
    if not (place / "publish" / order.file_name).is_file():
        return f"{name} does not compile: the compiler reported success and made no file."
    return ""


def _step(order: Order, batch: Path, timeout_s: float) -> ninja_batch.Step:
    place = batch / order.digest
    argv = commands.compile_argv(order.spec, order.toolchain, place / "publish" / order.file_name)
    return ninja_batch.Step(order.digest, place, tuple(argv), timeout_s)


@contextlib.contextmanager
def _private(folder: CacheFolder) -> Iterator[Path]:
    """A private folder for one batch; whatever was not published from it is removed again."""
    batch: Path | None = None
    try:
        batch = folder.private_folder()
        yield batch
    except OSError as error:
        raise failures.not_writable(folder.root, error) from error
    finally:
        if batch is not None:
            shutil.rmtree(batch, ignore_errors=True)
