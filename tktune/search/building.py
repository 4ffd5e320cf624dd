"""Artifacts for the driver: ahead of measuring, or strictly before it on the CPU backend; outcomes come one by one."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

from tktune.build.artifact import BuildOutcome
from tktune.build.cache import ArtifactCache
from tktune.build.resources import usable_cores
from tktune.core.build_spec import BuildSpec
from tktune.core.config import Config
from tktune.search.events import BuildDone, BuildStarted, Listener

_POLL_S = 0.2
_MOST_BATCHES = 8  # under way at once; each is one ninja
Finished = tuple[Config, BuildOutcome]


class Bell:
    """What a waiting driver hears: a build ended, or a trial did."""

    def __init__(self) -> None:
        self._rung = threading.Event()

    def ring(self) -> None:
        self._rung.set()

    def wait(self, seconds: float = _POLL_S) -> None:
        """Until it rings, or for `seconds`, so that the driver's thread hears signals."""
        self._rung.wait(seconds)
        self._rung.clear()


class Builder:
    """Builds in threads of its own, so that the driver's thread hears signals and tells events.

    With `ahead`, what is ordered is built while the driver measures. Without, the driver waits for it at once
    (`build`), so that building and timing never overlap. `jobs` compilers are kept busy; free memory may allow fewer.

    >>> builder.order({place.build: place.spec for place in places})                # doctest: +SKIP
    >>> builder.wait(bell)                                                          # doctest: +SKIP
    >>> for build, outcome in builder.finished(): ...                               # doctest: +SKIP
    """

    def __init__(self, cache: ArtifactCache, listener: Listener, *, ahead: bool) -> None:
        self.cache = cache
        self.ahead = ahead
        self.jobs = usable_cores()
        self.bell = Bell()
        self._listener = listener
        self._threads = ThreadPoolExecutor(_MOST_BATCHES, thread_name_prefix="tktune-build")
        self._cancel = threading.Event()
        self._done: queue.SimpleQueue[BuildOutcome] = queue.SimpleQueue()
        self._batches: list[Future[list[BuildOutcome]]] = []
        self._aside: list[Finished] = []  # of `finished`, not asked for by `build`
        self._ordered: dict[tuple[str, tuple[tuple[str, str], ...]], Config] = {}

    @property
    def under_way(self) -> int:
        """Builds that were ordered and have not come out of `finished`."""
        return len(self._ordered)

    @property
    def room(self) -> int:
        """Compilers that have nothing to do."""
        return max(0, self.jobs - self.under_way) if len(self._batches) < _MOST_BATCHES else 0

    def order(self, specs: Mapping[Config, BuildSpec]) -> None:
        """Begin to build these."""
        if not specs:
            return
        self._listener.on_event(BuildStarted(tuple(specs)))
        self._ordered |= {_key(spec): build for build, spec in specs.items()}
        self._begin(list(specs.values()))

    def finished(self) -> list[Finished]:
        """What has ended since the last call. Raises what the cache raised (`CacheError`, `ToolchainError`)."""
        ended = [batch for batch in self._batches if batch.done()]
        self._batches = [batch for batch in self._batches if batch not in ended]
        found, self._aside = [*self._aside, *self._told()], []
        for batch in ended:
            batch.result()
        return found

    def wait(self) -> None:
        """Until a build ends or the bell rings for something else, a moment at most."""
        self.bell.wait()

    def build(
        self, specs: Mapping[Config, BuildSpec], stopped: Callable[[], bool] = lambda: False
    ) -> dict[Config, BuildOutcome]:
        """Build these and wait for them, whatever else is under way; once `stopped` says so, what is not built yet
        ends as cancelled. Raises as `finished` does."""
        self.order(specs)
        found: dict[Config, BuildOutcome] = {}
        others: list[Finished] = []
        while True:
            for build, outcome in self.finished():
                if build in specs:
                    found[build] = outcome
                else:
                    others.append((build, outcome))
            if len(found) == len(specs):
                self._aside = others
                return {build: found[build] for build in specs}
            if stopped():
                self._cancel.set()
            self.wait()

    def cancel(self) -> None:
        """Stop every compiler that is at work, and forget what was ordered; what is ordered later is built as ever."""
        self._cancel.set()
        wait(self._batches)
        self._told()
        self._batches, self._aside = [], []
        self._ordered.clear()
        self._cancel = threading.Event()

    def close(self) -> None:
        """Stop what is under way, and wait until it has."""
        self._cancel.set()
        self._threads.shutdown(cancel_futures=True)

    # What a replay does otherwise.

    def _begin(self, specs: list[BuildSpec]) -> None:
        cancel = self._cancel
        batch = self._threads.submit(self.cache.build, specs, on_done=self._heard, cancel=cancel)
        batch.add_done_callback(lambda _: self.bell.ring())
        self._batches.append(batch)

    def _told(self) -> list[Finished]:
        found: list[Finished] = []
        while not self._done.empty():
            found += self._match(self._done.get())
        return found

    # Below.

    def _heard(self, outcome: BuildOutcome) -> None:
        self._done.put(outcome)
        self.bell.ring()

    def _match(self, outcome: BuildOutcome) -> list[Finished]:
        build = self._ordered.pop(_key(outcome.spec), None)
        if build is None:
            return []
        if not outcome.cancelled:
            self._listener.on_event(
                BuildDone(build, outcome.digest, outcome.seconds, outcome.cached, outcome.error_sentence)
            )
        return [(build, outcome)]


def _key(spec: BuildSpec) -> tuple[str, tuple[tuple[str, str], ...]]:
    return spec.name, tuple(sorted(spec.defines.items()))
