"""What a machine's link and SMs were measured to do, as facts that cost models ask: how long rows take to arrive, and
what SMs given away cost. Pure: it knows no store, no device and no kernel.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from tktune.core.canonical import canonical_json

FORM = 1  # of the JSON
# How rows were moved, by the SMs of every rank at once. Bulk copies but for plain_*, which are loads and stores of
# threads. pull: peer → own, in order; push: own → peer; own: own → own; scatter: one load of a peer's row, `fan` stores
# to own rows in no order; scatter_own: the same from own memory.
WAYS = ("pull", "push", "own", "plain_pull", "plain_push", "scatter", "scatter_own")
PEER_WAYS = ("pull", "push", "plain_pull", "plain_push", "scatter")

Points = Sequence[tuple[float, float]]
F = TypeVar("F")


@dataclass(frozen=True)
class Curve:
    """One way by number of SMs: bytes stored a second on the slowest rank, in units of 1e9 (a load is not counted).

    `sms` rise. `slots` rows of `row_bytes` (or their worth in pieces) were on their way in each block; 0: not known.
    """

    way: str
    fan: int
    row_bytes: int
    slots: int
    sms: tuple[int, ...]
    gb_s: tuple[float, ...]

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip((0, *self.sms), self.sms, strict=False))
        if self.way not in WAYS or self.fan < 1 or self.row_bytes < 1 or not self.sms or not rising:
            raise ValueError(f"no curve: {self.way} {self.fan} {self.row_bytes} {self.sms}")
        if len(self.gb_s) != len(self.sms) or not all(math.isfinite(r) and r > 0 for r in self.gb_s):
            raise ValueError(f"rates are positive, one for each number of SMs: {self.gb_s}")

    def at(self, sms: float) -> float:
        """1e9 bytes a second of `sms` SMs: linear between what was measured, and no more beyond it."""
        return _along([(0.0, 0.0), *zip(self.sms, self.gb_s, strict=True)], sms)


@dataclass(frozen=True)
class LinkFacts:
    """What `tktune doctor` measured, of `world` ranks that all worked at once.

    `copy_engine_gb_s`: of the copy engine, peer → own. `round_trip_us`: a signal to the peer and one back. `launch_us`:
    host time of one launch. `gemm_us`: (SMs given away, microseconds of one grouped GEMM on the others). Empty or
    None where there was nothing to measure.
    """

    world: int
    sm_count: int
    curves: tuple[Curve, ...]
    copy_engine_gb_s: float | None = None
    round_trip_us: float | None = None
    launch_us: float | None = None
    gemm_us: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        numbers = [self.copy_engine_gb_s, self.round_trip_us, self.launch_us, *(us for _, us in self.gemm_us)]
        if not all(n is None or (math.isfinite(n) and n > 0) for n in numbers):
            raise ValueError(f"no positive number among {numbers}")
        given = [count for count, _ in self.gemm_us]
        if given != sorted(set(given)) or (given and not 0 <= given[0] <= given[-1] < self.sm_count):
            raise ValueError(f"SMs given away rise from 0 and leave some: {given}")

    # As JSON.

    def to_json(self) -> dict[str, Any]:
        return {"form": FORM, **dataclasses.asdict(self)}

    @property
    def json(self) -> str:
        return canonical_json(self.to_json())

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LinkFacts:
        """Raises `ValueError` for anything but what `to_json` makes of this form."""
        fields = dict(value)
        if fields.pop("form", None) != FORM:
            raise ValueError(f"link facts of form {value.get('form')!r}; {FORM} is known")
        try:
            curves = tuple(
                Curve(**{**curve, "sms": tuple(curve["sms"]), "gb_s": tuple(curve["gb_s"])})
                for curve in fields.pop("curves")
            )
            gemm_us = tuple((int(count), float(us)) for count, us in fields.pop("gemm_us"))
            return cls(curves=curves, gemm_us=gemm_us, **fields)
        except (KeyError, TypeError) as error:
            raise ValueError(f"link facts lack or add a field: {error}") from error

    # As answers.

    def curve(self, way: str, fan: int = 1, row_bytes: int | None = None) -> Curve | None:
        """The curve of exactly this; with `row_bytes` None, the one of the rows that most ways were measured with."""
        wanted = self.usual_row_bytes if row_bytes is None else row_bytes
        for curve in self.curves:
            if (curve.way, curve.fan, curve.row_bytes) == (way, fan, wanted):
                return curve
        return None

    @property
    def usual_row_bytes(self) -> int:
        return _most_seen(self.curves) if self.curves else 0

    def stored_gb_s(self, way: str, sms: float, fan: float, row_bytes: float) -> float | None:
        """1e9 bytes stored a second, between what was measured; None where `way` was not.

        A row costs its load and `fan` stores, so time a row is linear in the fan; so it is in the row's length, beyond
        a fixed part. Beyond the last measured fan the last slope goes on, beyond the measured lengths the rate stays.
        """
        found = [curve for curve in self.curves if curve.way == way]
        if not found or sms <= 0:
            return None
        usual = _most_seen(found)
        by_fan = sorted((c.fan, c) for c in found if c.row_bytes == usual)
        loaded = [(float(n), n / c.at(sms)) for n, c in by_fan]  # time of a loaded byte
        byte_time = _along(_rising(loaded), max(1.0, fan), slope_goes_on=True)
        shared = min((n for n, _ in by_fan), key=lambda n: -sum(c.fan == n for c in found))
        base = next(c for n, c in by_fan if n == shared)
        by_length = sorted((c.row_bytes, _row_ratio(c, base, sms)) for c in found if c.fan == shared)
        row_time = _proportional(_rising(by_length), row_bytes)
        usual_time = _proportional(_rising(by_length), usual)
        longer = (row_time / row_bytes) / (usual_time / usual)
        return max(1.0, fan) / (byte_time * longer)

    def gather_us(
        self, remote_bytes: float, own_bytes: float, row_bytes: int, fan: float, sms: int
    ) -> float | None:
        """Microseconds until `sms` SMs have stored `remote_bytes` that come from peers and `own_bytes` from here.

        Each row is loaded once and stored `fan` times on average. The longer of what the link takes for its part and
        what the SMs take for all, as if all were near; None where this was not measured.
        """
        near = self.stored_gb_s("scatter_own", sms, fan, row_bytes)
        far = self.stored_gb_s("scatter", sms, fan, row_bytes) if remote_bytes > 0 else near
        if near is None or far is None:
            return None
        moving = max(remote_bytes / far, (remote_bytes + own_bytes) / near) / 1e3
        first = self.round_trip_us or 0.0  # nothing arrives sooner than a question to the peer takes
        return moving + (first if remote_bytes > 0 else 0.0)

    def dispatch_us(
        self, fetched_bytes: float, gathered_bytes: float, row_bytes: int, sms: int, world: int
    ) -> float | None:
        """Microseconds to fetch `fetched_bytes` from all ranks evenly and store each row wherever it is wanted.

        Fewer `gathered_bytes` than fetched ones: this rank's own rows stay where they are.
        """
        question = (fetched_bytes, gathered_bytes, row_bytes, sms, world)
        if question not in self._answered:
            fan = max(1.0, gathered_bytes / fetched_bytes) if fetched_bytes > 0 else 1.0
            far = min(gathered_bytes, fetched_bytes * fan * (world - 1) / world)
            self._answered[question] = self.gather_us(far, gathered_bytes - far, row_bytes, fan, sms)
        return self._answered[question]

    @cached_property
    def _answered(self) -> dict[tuple[float, ...], float | None]:
        """A space asks the same few questions for each of its configs."""
        return {}

    def lost_share(self, given_away: int) -> float | None:
        """The share of its speed, 0 … 1, that the GEMM loses without `given_away` SMs; None where not measured."""
        if len(self._slower) < 2 or self._slower[0][0] != 0:
            return None
        ratio = _along(self._slower, given_away, slope_goes_on=True)
        return 1 - 1 / max(1.0, ratio)

    @cached_property
    def _slower(self) -> list[tuple[float, float]]:
        """(SMs given away, time over that without giving any)."""
        return _rising([(float(count), us / self.gemm_us[0][1]) for count, us in self.gemm_us])


def link_facts(value: Mapping[str, Any] | None) -> LinkFacts | None:
    """Stored facts as an object; None where there are none, or of a form that this version does not know."""
    if value is None:
        return None
    try:
        return LinkFacts.from_json(value)
    except ValueError:
        return None


def first_known(values: Iterable[Mapping[str, Any]]) -> LinkFacts | None:
    """The first of several stored facts that this version knows the form of: the newest, where they are newest first."""
    return next((facts for facts in map(link_facts, values) if facts is not None), None)


def informed(family: F, facts: LinkFacts | None) -> F:
    """The family with a cost model that uses measured facts; the family itself where it has none, or none are given."""
    with_link: Callable[[LinkFacts], F] | None = getattr(family, "with_link", None)
    return family if facts is None or with_link is None else with_link(facts)


def _most_seen(curves: Sequence[Curve]) -> int:
    """The length of the rows that most points were measured with."""
    sizes = [curve.row_bytes for curve in curves for _ in curve.sms]
    return max(sorted(set(sizes)), key=sizes.count)


def _row_ratio(curve: Curve, base: Curve, sms: float) -> float:
    """Time of one of `curve`'s rows over that of one of `base`'s; where both were measured, and between."""
    both = [count for count in curve.sms if count in base.sms] or curve.sms
    ratios = [
        (float(count), curve.row_bytes / curve.at(count) * base.at(count) / base.row_bytes) for count in both
    ]
    return _along(ratios, sms)


def _along(points: Points, x: float, slope_goes_on: bool = False) -> float:
    """Linear between points with rising x; level before the first, and after the last unless its slope goes on."""
    if x <= points[0][0] or len(points) == 1:
        return points[0][1]
    at = min(bisect_left(points, (x,)), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    if x > x1 and not slope_goes_on:
        return y1
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _proportional(points: Points, x: float) -> float:
    """Linear between points, through the origin before the first, in proportion after the last."""
    if x >= points[-1][0]:
        return points[-1][1] * x / points[-1][0]
    return _along([(0.0, 0.0), *points], x)


def _rising(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points whose y never falls: noise may not make more work look faster."""
    highest = -math.inf
    found = []
    for x, y in points:
        highest = max(highest, y)
        found.append((x, highest))
    return found
