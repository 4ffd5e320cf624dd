"""Artifacts for the driver, a batch at a time: ahead of measuring, or strictly before it on the CPU backend."""

from __future__ import annotations

import queue
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for

from tktune.build.artifact import BuildOutcome
from tktune.build.cache import ArtifactCache
from tktune.core.build_spec import BuildSpec
from tktune.core.config import Config
from tktune.search.events import BuildDone, BuildStarted, Listener

_POLL_S = 0.2


class Builder:
    """Builds batches in a thread of its own, so that the driver's thread hears signals and tells events.

    With `ahead`, a batch begins at once and measuring goes on meanwhile; without, it begins when it is waited
    for, so that building and timing never overlap.
    """

    def __init__(self, cache: ArtifactCache, listener: Listener, *, ahead: bool) -> None:
        self.cache = cache
        self.ahead = ahead
        self._listener = listener
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tktune-build")

    def start(self, specs: Mapping[Config, BuildSpec]) -> Batch:
        """A batch of build parts and what to build for them."""
        batch = Batch(specs, self)
        if self.ahead:
            batch.begin()
        return batch

    def submit(self, batch: Batch) -> Future[list[BuildOutcome]]:
        self._listener.on_event(BuildStarted(tuple(batch.specs)))
        return self._thread.submit(self.cache.build, list(batch.specs.values()), on_done=batch.done.put)

    def tell(self, build: Config, outcome: BuildOutcome) -> None:
        self._listener.on_event(
            BuildDone(build, outcome.digest, outcome.seconds, outcome.cached, outcome.error_sentence)
        )

    def close(self) -> None:
        """Waits for a batch that is under way."""
        self._thread.shutdown(cancel_futures=True)


class Batch:
    """One batch under way."""

    def __init__(self, specs: Mapping[Config, BuildSpec], builder: Builder) -> None:
        self.specs = dict(specs)
        self.done: queue.SimpleQueue[BuildOutcome] = queue.SimpleQueue()
        self._builder = builder
        self._future: Future[list[BuildOutcome]] | None = None
        self._build_of = {(spec.name, tuple(sorted(spec.defines.items()))): b for b, spec in specs.items()}

    def begin(self) -> None:
        if self._future is None:
            self._future = self._builder.submit(self)

    def wait(self) -> dict[Config, BuildOutcome]:
        """The outcome of every build part. Raises what the cache raised (`CacheError`, `ToolchainError`)."""
        self.begin()
        assert self._future is not None
        while wait_for([self._future], timeout=_POLL_S).not_done:
            self._pass_on()
        self._pass_on()
        return dict(zip(self.specs, self._future.result(), strict=True))

    def _pass_on(self) -> None:
        while not self.done.empty():
            outcome = self.done.get()
            spec = outcome.spec
            build = self._build_of.get((spec.name, tuple(sorted(spec.defines.items()))))
            if build is not None:
                self._builder.tell(build, outcome)
