"""One rank process as the driver sees it: spawned, spoken to, killed, reaped, and how it ended in plain words.

Nothing here knows commands beyond their bytes; what an end means for a config is decided in `verdict`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tktune.gang.protocol import Channel

LOG_TAIL_BYTES = 4096
LOG_TAIL_LINES = 3
LOG_TAIL_LENGTH = 500

# One thread of a numeric library a rank: their idle threads spin, and would disturb what is timed. Kernels are
# loaded whole, since a lazy load while a kernel spins would block.
RANK_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "CUDA_MODULE_LOADING": "EAGER",
    "PYTHONUNBUFFERED": "1",
}
# Ranks that launch one after another would deadlock (rule D6).
REMOVED_FROM_ENVIRONMENT = ("CUDA_LAUNCH_BLOCKING",)


class RankProcess:
    """A spawned rank in a session of its own, so that it can be killed with everything it started.

    `memory_fds` are inherited under their own numbers. The rank dies with the thread that made it.
    """

    def __init__(
        self, rank: int, memory_fds: Sequence[int], environment: Mapping[str, str] | None = None
    ) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the rank
        self._log_mark = 0
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tktune.gang.rank", str(os.getpid()), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=(theirs.fileno(), *memory_fds),
                env=_environment(environment or {}),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            self._log.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def stopped(self) -> bool:
        """Whether the process is stopped (SIGSTOP), so that it cannot answer."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in ("T", "t")

    def wait(self, seconds: float) -> bool:
        """Reap the process when it ends within `seconds`; whether it did."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        """SIGKILL to the rank and everything in its session's group. Reaps nothing."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Release the socket and the log; the process must have been reaped."""
        self.channel.close()
        self._log.close()

    def end(self) -> str:
        """How the process ended: "killed by SIGKILL", "exit code 3", or "" while it lives."""
        code = self._process.poll()
        if code is None:
            return ""
        if code >= 0:
            return f"exit code {code}"
        try:
            return f"killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"killed by signal {-code}"

    def mark_log(self) -> None:
        """What is in the log now belongs to an earlier command."""
        self._log_mark = os.fstat(self._log.fileno()).st_size

    def log_tail(self) -> str:
        """The end of what the rank wrote since the mark, in one line; the fatal signal and its place go first."""
        fd = self._log.fileno()
        size = os.fstat(fd).st_size
        begin = max(self._log_mark, size - LOG_TAIL_BYTES)
        text = os.pread(fd, LOG_TAIL_BYTES, begin).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        fatal = next((at for at, line in enumerate(lines) if line.startswith("Fatal Python error")), None)
        if fatal is None:
            return " | ".join(lines[-LOG_TAIL_LINES:])[:LOG_TAIL_LENGTH]
        frames = [line for line in lines[fatal:] if line.startswith("File ")]
        return " | ".join([lines[fatal], *frames[: LOG_TAIL_LINES - 1]])[:LOG_TAIL_LENGTH]


def _environment(changes: Mapping[str, str]) -> dict[str, str]:
    """The rank's environment: ours, its import path, one thread a numeric library, then the caller's changes."""
    environment = {name: value for name, value in os.environ.items() if name not in REMOVED_FROM_ENVIRONMENT}
    for name, value in RANK_ENVIRONMENT.items():
        environment.setdefault(name, value)
    path = dict.fromkeys(str(Path(entry).absolute()) for entry in sys.path)
    environment["PYTHONPATH"] = os.pathsep.join(path)
    environment.update(changes)
    return environment
