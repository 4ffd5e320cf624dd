"""Several recordings of one space as one: the typical trial of each config, so that no lucky sample is the optimum."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from statistics import median, median_low

from tktune.core.config import Config
from tktune.core.errors import WordsError
from tktune.search.recording import RecordedTrial, Recording


def paces(passes: Sequence[Recording]) -> list[float]:
    """By what factor each pass ran slower than the passes together: the median over configs of its time divided by the
    config's median.

    Only configs that every pass timed count. Raises `WordsError` when there are none, or no pass, or when passes are of
    different spaces.
    """
    _alike(passes)
    timed = [config for config in passes[0].trials if all(one.trials[config].timed for one in passes)]
    if not timed:
        raise WordsError("No config was timed in every pass.", "Record passes of a space that runs.")
    middle = {config: median(_us(one.trials[config]) for one in passes) for config in timed}
    return [median(_us(one.trials[config]) / middle[config] for config in timed) for one in passes]


def typical(passes: Sequence[Recording]) -> Recording:
    """One recording of all passes: of each config the median time, every pass corrected for its pace.

    A config stands as most passes saw it end: with the trial whose corrected time is the (lower) median of those that
    timed it, or, where fewer than half did, with the first that did not. Builds are those of the first pass, which made
    them. Raises as `paces`.
    """
    pace = paces(passes)
    first = passes[0]
    trials = {config: _typical([one.trials[config] for one in passes], pace) for config in first.trials}
    return dataclasses.replace(first, trials=trials)


def _typical(trials: Sequence[RecordedTrial], pace: Sequence[float]) -> RecordedTrial:
    timed = [(_us(trial) / slow, trial) for trial, slow in zip(trials, pace, strict=True) if trial.timed]
    if 2 * len(timed) < len(trials):
        return next(trial for trial in trials if not trial.timed)
    us = [one for one, _ in timed]
    nearest = median_low(us)
    stands = next(trial for one, trial in timed if one == nearest)
    return dataclasses.replace(stands, time_us=median(us))


def spread(passes: Sequence[Recording]) -> float:
    """By how much one pass differs from the typical time of a config: the median over configs and passes."""
    pace, whole = paces(passes), typical(passes)
    off: list[float] = []
    for config, trial in whole.trials.items():
        off += [
            abs(_us(one.trials[config]) / slow / _us(trial) - 1)
            for one, slow in zip(passes, pace, strict=True)
            if trial.timed and one.trials[config].timed
        ]
    return median(off)


def lead(recording: Recording) -> tuple[float, Config]:
    """By how much the optimum is faster than the next config, and that next config."""
    times = sorted((_us(t), t.config.digest, t.config) for t in recording.trials.values() if t.timed)
    (best, *_), (after, _, config) = times[0], times[min(1, len(times) - 1)]
    return after / best - 1, config


def _us(trial: RecordedTrial) -> float:
    return trial.time_us or 0.0


def _alike(passes: Sequence[Recording]) -> None:
    if not passes:
        raise WordsError("There is no pass.", "Record one first.")
    one = passes[0]
    for other in passes[1:]:
        same = (one.problem, one.device, one.policy, one.parameters, one.default)
        if same != (other.problem, other.device, other.policy, other.parameters, other.default) or (
            one.trials.keys() != other.trials.keys()
        ):
            raise WordsError("The recordings are not of the same space.", "Record all with the same study.")
