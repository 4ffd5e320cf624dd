"""Microseconds of repeated work on one GPU: L2 flushed before every iteration, CUDA events around the work alone.

Whatever is compared goes through here: winners, defaults and library kernels alike.
"""

from __future__ import annotations

import torch

from tktune.families.cuda.driver import current_stream, synchronize
from tktune.families.cuda.launch import Work

PREFILL_BYTES = 1 << 28  # keeps the device busy for about 0.1 ms while the host enqueues the first iterations


class Stopwatch:
    """Times work on torch's current stream of device `index`.

    Before each iteration `flush_bytes` are written (0: the cache stays warm). Warm-up iterations are made exactly
    like timed ones. The host waits once, at the end, so that the device never waits for it.
    """

    def __init__(self, index: int, flush_bytes: int) -> None:
        self._index = index
        device = torch.device("cuda", index)
        self._flush = torch.empty(flush_bytes // 4, dtype=torch.int32, device=device) if flush_bytes else None
        self._prefill = torch.empty(PREFILL_BYTES // 4, dtype=torch.int32, device=device)
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def time(self, work: Work, iterations: int, warmup: int, before: Work | None = None) -> list[float]:
        """Microseconds of each timed iteration; `before` runs untimed just before each, after the flush.

        Raises `DeviceError` when a launch failed.
        """
        total = warmup + iterations
        while len(self._events) < total:
            self._events.append((_event(), _event()))
        stream = current_stream(self._index)
        self._prefill.fill_(0)
        for number, (start, end) in enumerate(self._events[:total]):
            if self._flush is not None:
                self._flush.fill_(number)
            if before is not None:
                before(stream)
            start.record()
            work(stream)
            end.record()
        synchronize(stream)
        return [1000.0 * start.elapsed_time(end) for start, end in self._events[warmup:total]]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
