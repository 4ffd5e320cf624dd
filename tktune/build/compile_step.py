"""One compile, run by ninja as its own small process: time limit, peak memory, death with its owner.

A script without imports of tktune, so that it starts in 15 ms. Argument 1 names a JSON job:
{"argv", "tmp", "log", "result", "timeout_s", "digest"}; argument 2 is the read end of a pipe that the owner
holds open: end of file means that the owner is gone, and the compile is stopped.
"""

import json
import os
import select
import signal
import sys
import time


def main() -> int:
    with open(sys.argv[1]) as file:  # noqa: PTH123 — pathlib would double the start-up time
        job = json.load(file)
    lifeline = int(sys.argv[2])
    began = time.monotonic()
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    environment = {**os.environ, "TMPDIR": job["tmp"]}
    child = os.posix_spawn(
        job["argv"][0],
        job["argv"],
        environment,
        setsid=True,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, job["log"], flags, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
            (os.POSIX_SPAWN_CLOSE, lifeline),
        ],
    )

    def stop_compile() -> None:
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:
            os.kill(child, signal.SIGKILL)

    def stopped(_signal: int, _frame: object) -> None:
        stop_compile()
        os._exit(1)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stopped)
    pidfd = os.pidfd_open(child)
    watch = select.poll()
    watch.register(pidfd, select.POLLIN)
    watch.register(lifeline, select.POLLIN)
    ready = [fd for fd, _ in watch.poll(job["timeout_s"] * 1000)]
    timed_out = not ready
    orphaned = bool(ready) and pidfd not in ready
    if timed_out or orphaned:
        stop_compile()
    _, status, usage = os.wait4(child, 0)
    if orphaned:
        return 1
    result = {
        "code": os.waitstatus_to_exitcode(status),
        "timed_out": timed_out,
        "seconds": time.monotonic() - began,
        "peak_bytes": usage.ru_maxrss * 1024,  # of the largest process below the compiler driver
    }
    with open(job["result"], "w") as file:  # noqa: PTH123
        json.dump(result, file)
    print(f"tktune-compiled {job['digest']}", flush=True)
    return 0 if result["code"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
