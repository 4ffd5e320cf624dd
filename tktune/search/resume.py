"""What earlier runs left for a key: verdicts that stand, configs that are quarantined, time already spent.

Reads rows that the store returned; writes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

from tktune.core import status
from tktune.core.config import Config
from tktune.store.rows import STARTED, EventRow, TrialRow

# Ends without a verdict after which a config is never issued again (design: Gang protocol).
QUARANTINE_AFTER = 2
# Kinds of events. A run's "verifying" that neither of the others follows was cut short.
VERIFYING, VERIFIED, REFUTED = "verifying", "verified", "refuted"


@dataclass(frozen=True)
class Known:
    """Rows of this key that still speak for the artifact a config would get today.

    `final`: the last verdict per config. `ends`: how often a config ended without one. `vanished`: those of them
    that only ever ended because the driver or the host did. `interrupted`: those that the user stopped in their midst.
    `spent_s`: wall seconds that earlier runs spent searching.
    """

    final: Mapping[Config, TrialRow]
    ends: Mapping[Config, int]
    vanished: frozenset[Config]
    spent_s: float
    last_ended_at: float
    interrupted: tuple[Config, ...] = ()

    @property
    def quarantined(self) -> frozenset[Config]:
        return frozenset(
            config
            for config, count in self.ends.items()
            if count >= QUARANTINE_AFTER and config not in self.final
        )

    @property
    def closed(self) -> frozenset[Config]:
        """Configs that are not issued again."""
        return self.quarantined | frozenset(self.final)


def counts_against(end: str) -> bool:
    """Whether an end counts towards quarantine. A trial that the user stopped does not."""
    return not status.is_final(end) and end not in (STARTED, status.ABANDONED)


def recall(
    rows: Iterable[TrialRow],
    members: Collection[Config],
    digest_of: Callable[[Config], str],
    searched_s: Mapping[str, float],
) -> Known:
    """Sort rows by what they mean today: `members` is the feasible set, `digest_of` a config's artifact digest.

    Rows of another artifact (sources, flags or compiler changed) and of configs outside the set do not count.
    `searched_s` has the seconds of runs that ended in order; the others count from first to last trial.
    """
    final: dict[Config, TrialRow] = {}
    ends: dict[Config, int] = defaultdict(int)
    blamed: set[Config] = set()
    interrupted: dict[Config, None] = {}
    span: dict[str, tuple[float, float]] = {}
    last = 0.0
    for row in sorted(rows, key=lambda row: row.id):
        if row.config not in members or row.artifact_digest != digest_of(row.config):
            continue
        if row.ended_at is not None:
            first, latest = span.get(row.run_id, (row.started_at, row.ended_at))
            span[row.run_id] = (min(first, row.started_at), max(latest, row.ended_at))
        last = max(last, row.ended_at or 0.0)
        if row.status != STARTED and status.is_final(row.status):
            final[row.config] = row
        elif counts_against(row.status):
            ends[row.config] += 1
            if row.status != status.LOST:
                blamed.add(row.config)
        elif row.status == status.ABANDONED:
            interrupted[row.config] = None
    spent_s = sum(searched_s.get(run_id, end - start) for run_id, (start, end) in span.items())
    vanished = frozenset(ends.keys() - blamed)
    return Known(final, dict(ends), vanished, spent_s, last, tuple(interrupted.keys() - final.keys()))


def cut_short(events: Iterable[EventRow], problem_digest: str) -> list[Config]:
    """The finalists that the last verification of this problem was measuring when its driver or host vanished.

    `events` are all events of the store, oldest first; empty when that verification came to an end.
    """
    run_id, configs = None, []
    for event in events:
        if event.kind == VERIFYING and event.detail["problem"] == problem_digest:
            run_id, configs = event.detail["run_id"], [Config(one) for one in event.detail["configs"]]
        elif event.kind in (VERIFIED, REFUTED) and event.detail.get("run_id") == run_id:
            configs = []
    return configs
