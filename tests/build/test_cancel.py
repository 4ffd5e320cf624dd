"""A cancelled batch: compilers die with all their processes, at once, and what was whole stays while nothing half is kept."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tktune.build.artifact import BuildOutcome

# Answer 1 compiles; the others start a process of their own and never end.
HANG = 'case "$*" in *ANSWER=1*) ;; *) sleep 600 & echo $! >> "$HERE/below"; wait;; esac'


class Build(threading.Thread):
    """A build in a thread of its own, as the driver runs it."""

    def __init__(self, cache, specs, jobs: int | None = None) -> None:
        super().__init__()
        self.cancel, self.outcomes = threading.Event(), []
        self._build = lambda: cache.build(specs, jobs, on_done=self.told.append, cancel=self.cancel)
        self.told: list[BuildOutcome] = []

    def run(self) -> None:
        self.outcomes = self._build()

    def stop(self) -> float:
        began = time.monotonic()
        self.cancel.set()
        self.join(20)
        assert not self.is_alive()
        return time.monotonic() - began


def lines(path: Path) -> list[int]:
    return [int(line) for line in path.read_text().splitlines()] if path.exists() else []


def lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def test_a_cancel_kills_compilers_and_what_they_started_and_keeps_what_was_whole(
    cache, sources, fake_compiler, until
):
    fake = fake_compiler(HANG)
    build = Build(cache, [sources.spec(n) for n in (1, 2, 3, 4, 5)], jobs=3)
    build.start()
    until(lambda: len(lines(fake.folder / "below")) == 3 and len(build.told) == 1)
    assert build.stop() < 3.0
    first, *rest = build.outcomes
    assert first.ok and not first.cancelled
    assert all(one.cancelled and not one.ok and "was stopped" in one.error_sentence for one in rest)
    assert sorted(one.spec.name for one in build.told) == sorted(one.spec.name for one in build.outcomes)
    until(lambda: not any(map(lives, lines(fake.folder / "below") + lines(fake.folder / "count"))))
    assert [entry.digest for entry in cache.entries()] == [first.digest] and cache.verify() == []
    assert list((cache.root / "building").iterdir()) == []


def test_a_cancelled_build_is_no_failure_and_succeeds_later(cache, sources, fake_compiler, until):
    fake = fake_compiler(HANG)
    build = Build(cache, [sources.spec(2)])
    build.start()
    until(lambda: bool(lines(fake.folder / "below")))
    build.stop()
    (fake.folder / "g++").unlink()
    (outcome,) = cache.build([sources.spec(2)], cancel=threading.Event())
    assert outcome.ok and not outcome.cached


def test_a_cancel_does_not_wait_for_who_else_builds(cache, sources, fake_compiler):
    fake = fake_compiler()
    with cache.folder.lock(cache.digest(sources.spec(1))) as lock:
        cache.build([sources.spec(7)])  # so that the folder exists
        assert lock.try_acquire()
        build = Build(cache, [sources.spec(1)])
        build.start()
        assert build.stop() < 3.0
    assert build.outcomes[0].cancelled and fake.compiles == 1


def test_a_cancel_before_the_start_compiles_nothing(cache, sources, fake_compiler):
    fake, cancel = fake_compiler(), threading.Event()
    cancel.set()
    outcomes = cache.build([sources.spec(1), sources.spec(2)], cancel=cancel)
    assert [one.cancelled for one in outcomes] == [True, True] and fake.compiles == 0


@pytest.mark.parametrize("moment_s", [0.0, 0.01, 0.03, 0.08, 0.2, 0.5])
def test_at_whatever_moment_it_comes_nothing_half_is_left(cache, sources, moment_s):
    build = Build(cache, [sources.spec(n) for n in range(4)])
    build.start()
    time.sleep(moment_s)
    build.stop()
    assert cache.verify() == [] and len(build.outcomes) == 4
    assert {one.digest for one in build.outcomes if one.ok} == {one.digest for one in cache.entries()}
    assert all(one.ok or one.cancelled for one in build.outcomes)
    assert list((cache.root / "building").iterdir()) == []


def test_what_is_held_is_known_without_reading_it(cache, sources):
    digest = cache.digest(sources.spec(1))
    assert not cache.holds(digest)
    cache.build([sources.spec(1)])
    assert cache.holds(digest)
