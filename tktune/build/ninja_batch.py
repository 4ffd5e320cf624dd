"""One batch of compiles as one ninja file in a private folder. Publishes nothing and judges nothing."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tktune.build.failures import disk_full, for_want_of_disk
from tktune.core.errors import ToolchainError

_STEP = Path(__file__).with_name("compile_step.py")
_DONE = "tktune-compiled "
_GRACE_S = 5.0
_NICENESS = "10"
_LOOK_S = 0.05  # how often a cancel is looked for while compilers are silent

# Variables that would change what a compiler makes without being part of the digest.
_UNSAID = (
    *("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH", "LIBRARY_PATH", "GCC_EXEC_PREFIX", "COMPILER_PATH"),
    *(
        "NVCC_PREPEND_FLAGS",
        "NVCC_APPEND_FLAGS",
        "DEPENDENCIES_OUTPUT",
        "SUNPRO_DEPENDENCIES",
        "CCC_OVERRIDE_OPTIONS",
    ),
)


@dataclass(frozen=True)
class Step:
    """One compile: `argv` writes into `folder`/publish, its log is `folder`/publish/build.log."""

    digest: str
    folder: Path
    argv: tuple[str, ...]
    timeout_s: float

    @property
    def publish(self) -> Path:
        return self.folder / "publish"

    @property
    def log(self) -> Path:
        return self.publish / "build.log"


@dataclass(frozen=True)
class StepResult:
    """How a compile ended: exit code (−n: killed by signal n), wall seconds, bytes of its largest process."""

    digest: str
    code: int
    timed_out: bool
    seconds: float
    peak_bytes: int
    log: str


def run(
    steps: Sequence[Step], batch: Path, parallel: int, cancel: threading.Event | None = None
) -> Generator[StepResult, None, None]:
    """Run `steps` by ninja, at most `parallel` at once, and yield each result as it comes.

    Closing the iterator early, an exception in its consumer, or `cancel` stops every compiler below it; after
    a cancel the results end early. When this process dies the compilers stop as well. Raises `ToolchainError` when ninja itself fails, `CacheError` when the disk
    is full.
    """
    _write(steps, batch)
    alive, owner = os.pipe()
    environment = {key: value for key, value in os.environ.items() if key not in _UNSAID}
    ninja = subprocess.Popen(
        [*_behind(), *_ninja(), "-C", str(batch), "-f", "build.ninja", "-j", str(parallel), "-k", "0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**environment, "LC_ALL": "C", "TKTUNE_LIFELINE": str(alive)},
        pass_fds=(alive,),
        start_new_session=True,
    )
    by_digest = {step.digest: step for step in steps}
    said: list[str] = []
    try:
        assert ninja.stdout is not None
        for line in _lines(ninja.stdout.fileno(), cancel):
            digest = line.removeprefix(_DONE).strip()
            if line.startswith(_DONE) and digest in by_digest:
                yield _result(by_digest.pop(digest))
            else:
                said.append(line)
        if cancel is not None and cancel.is_set():
            return
        ninja.wait()
        if by_digest:
            words = "".join(said)
            if for_want_of_disk(words) or any(for_want_of_disk(_text(s.log)) for s in by_digest.values()):
                raise disk_full(batch.parent.parent)
            raise ToolchainError(
                f"ninja ended ({ninja.returncode}) without building {len(by_digest)} of {len(steps)} artifacts: "
                f"{words.strip()[-300:]}",
                "Run: python -m ninja --version, and reinstall ninja if that fails.",
            )
    finally:
        os.close(owner)  # every step sees end of file and stops its compiler
        os.close(alive)
        if ninja.poll() is None:
            ninja.send_signal(signal.SIGTERM)
            try:
                ninja.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(ninja.pid, signal.SIGKILL)
                ninja.wait()
        if ninja.stdout is not None:
            ninja.stdout.close()


def _lines(fd: int, cancel: threading.Event | None) -> Iterator[str]:
    """The lines that come from `fd` until its end, or until `cancel`."""
    rest = b""
    while cancel is None or not cancel.is_set():
        if cancel is not None and not select.select([fd], [], [], _LOOK_S)[0]:
            continue
        some = os.read(fd, 1 << 16)
        if not some:
            if rest:
                yield rest.decode(errors="replace")
            return
        *whole, rest = (rest + some).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace") + "\n"


def _write(steps: Sequence[Step], batch: Path) -> None:
    lines = [
        "ninja_required_version = 1.5",
        "rule compile",
        f"  command = {_escaped([sys.executable, '-I', '-S', str(_STEP)])} $in $$TKTUNE_LIFELINE",
        "  description = $out",
    ]
    for step in steps:
        step.publish.mkdir(parents=True, exist_ok=True)
        (step.folder / "tmp").mkdir(exist_ok=True)
        job = {
            "digest": step.digest,
            "argv": list(step.argv),
            "tmp": str(step.folder / "tmp"),
            "log": str(step.log),
            "result": str(step.folder / "result.json"),
            "timeout_s": step.timeout_s,
        }
        (step.folder / "job.json").write_text(json.dumps(job))
        (step.folder / "result.json").unlink(missing_ok=True)
        lines.append(f"build {step.folder.name}/result.json: compile {step.folder.name}/job.json")
    (batch / "build.ninja").write_text("\n".join(lines) + "\n")


def _escaped(words: Sequence[str]) -> str:
    return shlex.join(words).replace("$", "$$")


def _behind() -> list[str]:
    """Compilers stand back behind whoever measures beside them: a driver, its ranks."""
    nice = shutil.which("nice")
    return [] if nice is None else [nice, "-n", _NICENESS]


def _ninja() -> list[str]:
    try:
        import ninja
    except ImportError as error:
        raise ToolchainError("The ninja package is not installed.", "Run: pip install ninja.") from error
    program = Path(ninja.BIN_DIR) / "ninja"
    return [str(program)] if os.access(program, os.X_OK) else [sys.executable, "-m", "ninja"]


def _result(step: Step) -> StepResult:
    fields = json.loads((step.folder / "result.json").read_text())
    return StepResult(
        digest=step.digest,
        code=fields["code"],
        timed_out=fields["timed_out"],
        seconds=fields["seconds"],
        peak_bytes=fields["peak_bytes"],
        log=_text(step.log),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
