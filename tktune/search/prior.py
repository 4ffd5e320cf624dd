"""What is expected of each row before anything is measured here: a cost model, corrected by what was measured elsewhere.

Elsewhere is another problem of the family, another device class or another toolchain. Only expectations are made here;
how far they are believed, and how they are unlearnt, is `search.trend`'s affair.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tktune.core import status
from tktune.core.config import Config, Value
from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.families.base import Family
from tktune.search.coordinates import FeasibleRows, Floats, columns_of
from tktune.search.outlook import Outlook, View
from tktune.search.pool import Pools
from tktune.search.recording import Recording
from tktune.search.trend import Trend

if TYPE_CHECKING:
    from tktune.store.results import Store
    from tktune.store.rows import TrialKey

Part = tuple[Value, ...]  # a config's values of the parameters that two places share

_FEWEST = 8  # times that are worth learning from
_MOST_PLACES = 3  # the nearest ones
_CHUNK = 4096  # rows predicted at once
# Distances add up; a place at distance d has the weight 2^-d. A factor of two in a size is a distance of one.
_SIZES = {"hidden": 1.0, "cols": 1.0, "experts": 1.0, "top_k": 1.0, "tokens": 1.0, "world": 2.0}
_WORDS = {"routing": 0.5, "pad": 0.5, "ep_world": 0.5, "ep_rank": 0.5, "finish": 0.5}
_ALIKE = ("family", "dtype", "weight_layout")  # without these in common nothing is learnt
_OTHER_DEVICE, _OTHER_ARCH = 1.0, 2.0


@dataclass(frozen=True)
class Elsewhere:
    """Times in microseconds that were measured elsewhere, and what the cost model said of them there, where it did.

    `failed` configs did not build, launch or pass there. `weight` says how much this place counts beside others.
    """

    times_us: Mapping[Config, float]
    estimate_us: Mapping[Config, float] = field(default_factory=dict)
    failed: frozenset[Config] = frozenset()
    weight: float = 1.0
    name: str = ""


def log_prior(
    rows: Sequence[Config],
    estimate_us: Mapping[Config, float] | Floats | None,
    elsewhere: Sequence[Elsewhere] = (),
) -> Floats:
    """(rows,): expected log microseconds of each row up to a constant, NaN where nothing is known of it. `estimate_us` is what
    a cost model says, by config or in the order of the rows.

    A place corrects the cost model by the ratio of what was measured there to what the model said there. Parameters
    are matched by name: the ratio of a row is that of the config with the same values of the parameters that both
    have, the fastest if there are several; rows that nobody measured there are interpolated from those that were,
    unless they have a value that does not occur there. Such rows have the cost model alone (NaN without one); rows that
    failed wherever they were tried have NaN. Where there is no cost model a ratio is the time itself.
    """
    if isinstance(estimate_us, np.ndarray):
        base: Floats = np.log(estimate_us)
    else:
        known = estimate_us or {}
        base = np.log([known.get(row, math.nan) for row in rows])
    useful = [place for place in elsewhere if len(place.times_us) >= _FEWEST]
    if not useful or not rows:
        return base
    modelled = bool(np.isfinite(base).any())
    total, weight, failed = (np.zeros(len(rows)) for _ in range(3))
    by_name = columns_of(rows)
    for place in useful:
        ratio, fell = _ratios(by_name, len(rows), place, modelled=modelled)
        total += place.weight * np.nan_to_num(ratio)
        weight += place.weight * np.isfinite(ratio)
        failed += fell
    correction = total / np.where(weight > 0, weight, math.nan)
    if not modelled:
        return correction
    return np.where((failed > 0) & (weight == 0), math.nan, base + np.nan_to_num(correction))


def family_prior(
    family: Family,
    rows: Sequence[Config],
    problem: Problem,
    device: DeviceClass,
    elsewhere: Sequence[Elsewhere] = (),
) -> Floats:
    """`log_prior` with the family's own cost model."""
    return log_prior(rows, {row: family.cost_us(row, problem, device) for row in rows}, elsewhere)


def of_recording(recording: Recording, weight: float = 1.0) -> Elsewhere:
    """What a recording tells other places."""
    trials = recording.trials.values()
    return Elsewhere(
        {t.config: t.time_us for t in trials if t.timed and t.time_us is not None},
        {t.config: t.model_us for t in trials if t.model_us is not None},
        frozenset(t.config for t in trials if not t.timed),
        weight,
        recording.name,
    )


def in_store(store: Store, key: TrialKey, family: Family) -> list[Elsewhere]:
    """The places in a store that are nearest to the one filed under `key`: the same place of another toolchain comes first.

    Only places of the same backend, policy, dtype and weight layout count.
    """
    here = store.key_facts(key)
    apart: dict[TrialKey, float] = {}
    for other in set(store.keys()) - {key}:
        there = store.key_facts(other)
        far = distance(there.problem, there.device, here.problem, here.device)
        if far is not None and there.policy.key == here.policy.key:
            apart[other] = far
    found: list[Elsewhere] = []
    for other in sorted(apart, key=lambda other: (apart[other], other.toolchain_id, other.problem_id)):
        place = _stored(store, other, family, 2.0 ** -apart[other])
        if len(place.times_us) >= _FEWEST and len(found) < _MOST_PLACES:
            found.append(place)
    return found


def _stored(store: Store, key: TrialKey, family: Family, weight: float) -> Elsewhere:
    facts = store.key_facts(key)
    times: dict[Config, float] = {}
    failed = set()
    for row in store.trials(key):
        if row.status in (status.OK, status.CENSORED) and row.time_us is not None:
            times[row.config] = row.time_us
        elif status.is_final(row.status):
            failed.add(row.config)
    estimates = {config: family.cost_us(config, facts.problem, facts.device) for config in times}
    return Elsewhere(
        times, estimates, frozenset(failed - times.keys()), weight, f"{facts.problem} on {facts.device}"
    )


def distance(there: Problem, there_on: DeviceClass, here: Problem, here_on: DeviceClass) -> float | None:
    """How far another problem on another device class is from ours, 0 for the same; None where nothing is learnt."""
    one, other = there.key, here.key
    if there_on.backend != here_on.backend or any(one[name] != other[name] for name in _ALIKE):
        return None
    apart = sum(
        weight * abs(math.log2(float(one[name]) / float(other[name]))) for name, weight in _SIZES.items()
    )
    apart += sum(weight for name, weight in _WORDS.items() if one.get(name) != other.get(name))
    if there_on.key != here_on.key:
        apart += _OTHER_DEVICE if there_on.arch == here_on.arch else _OTHER_ARCH
    return apart


def _ratios(
    by_name: Mapping[str, Sequence[Value]], count: int, place: Elsewhere, *, modelled: bool
) -> tuple[Floats, NDArray[np.bool_]]:
    """Log ratio of each of `count` rows, centred, NaN where the place says nothing of it; and whether the row failed there."""
    nothing = np.full(count, math.nan), np.zeros(count, bool)
    there = next(iter(place.times_us))
    names = [name for name in by_name if name in there]
    if not names:
        return nothing
    part = _part(names)
    ratio: dict[Part, float] = {}
    fastest: dict[Part, float] = {}
    for config, time_us in place.times_us.items():
        model_us = place.estimate_us.get(config) if modelled else 1.0
        if model_us is not None and time_us < fastest.get(part(config), math.inf):
            fastest[part(config)], ratio[part(config)] = time_us, math.log(time_us / model_us)
    if not ratio:
        return nothing
    fallen = {*map(part, place.failed)} - ratio.keys()
    occur = [{values[i] for values in ratio} for i in range(len(names))]
    shared = [by_name[name] for name in names]
    parts: list[Part] = list(zip(*shared, strict=True))
    within = np.ones(count, bool)
    for column, known in zip(shared, occur, strict=True):
        within &= np.fromiter(map(known.__contains__, column), bool, count)
    asked = [
        one
        for one in dict.fromkeys(itertools.compress(parts, within))
        if one not in ratio and one not in fallen
    ]
    answers = ratio | dict(zip(asked, _interpolated(ratio, asked), strict=True))
    found = np.array([answers.get(one, math.nan) for one in parts])
    fell = np.array([one in fallen for one in parts]) if fallen else nothing[1]
    return found - float(np.median(list(ratio.values()))), fell


def _part(names: Sequence[str]) -> Callable[[Mapping[str, Value]], Part]:
    return lambda config: tuple(config[name] for name in names)


def _interpolated(ratio: Mapping[Part, float], asked: Sequence[Part]) -> Floats:
    """By the search's own model of log time, which returns to the mean far from what was measured."""
    if not asked:
        return np.zeros(0)
    rows = FeasibleRows.of_columns(list(zip(*ratio, *asked, strict=True)), len(ratio) + len(asked))
    outlook = Outlook(View(np.inf, 0.0), rows, Trend(rows, None), Pools(rows, np.random.default_rng(0)), 0)
    targets = outlook.look(dict(enumerate(ratio.values())), ())
    wanted = np.arange(len(ratio), len(rows))
    chunks = [wanted[i : i + _CHUNK] for i in range(0, len(wanted), _CHUNK)]
    return np.concatenate([outlook.mean(targets, chunk) for chunk in chunks])
