"""Recorded spaces, and the strategies that search them: each yields the rows that it visits."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tktune.core.config import Config
from tktune.search.feasible_sampler import ModelSampler
from tktune.search.prior import Elsewhere, log_prior
from tktune.search.random import RandomSampler
from tktune.search.tpe import TpeSampler


@dataclass(frozen=True)
class Recorded:
    """A recorded space: feasible configs and their times (NaN: failed), and how it was restricted, where known."""

    name: str
    rows: tuple[Config, ...]
    times: np.ndarray
    restrictions: tuple[str, ...] = ()
    prior: np.ndarray | None = None  # log times that somebody expects
    row_of: dict[Config, int] = field(default_factory=dict)

    @property
    def best(self) -> float:
        return float(np.nanmin(self.times))

    @property
    def values(self) -> dict[str, list[Any]]:
        return {name: sorted({row[name] for row in self.rows}) for name in self.rows[0]}

    def fractions(self) -> np.ndarray:
        return np.nan_to_num(self.best / self.times)


def recorded(name: str, rows: Sequence[Config], times: np.ndarray, **more: Any) -> Recorded:
    return Recorded(name, tuple(rows), times, row_of={row: i for i, row in enumerate(rows)}, **more)


@functools.cache
def load(path: Path, elsewhere: Path | None = None) -> Recorded:
    """A recording, with that of `elsewhere` as its prior."""
    if path.suffix == ".npz":
        with np.load(path) as file:
            head, codes, times = json.loads(str(file["head"])), file["X"], file["t"]
        names, values = head["names"], head["values"]
        rows = [
            Config(zip(names, (_value(v[i]) for v, i in zip(values, code, strict=True)), strict=True))
            for code in codes
        ]
        prior = None if elsewhere is None else log_prior(rows, None, [_elsewhere(load(elsewhere))])
        return recorded(head["sid"], rows, times, restrictions=tuple(head["restrictions"]), prior=prior)
    from tktune.search.recording_form import read_recording

    found = read_recording(path)
    times = [trial.time_us if trial.timed else None for trial in found.trials.values()]
    estimates = {t.config: t.model_us for t in found.trials.values() if t.model_us is not None}
    prior = log_prior(list(found.trials), estimates) if estimates else None
    return recorded(found.name, list(found.trials), np.array([t or math.nan for t in times]), prior=prior)


def _value(value: Any) -> int | str:
    """A recorded value as a parameter's: whole numbers as such, anything else as a word."""
    if isinstance(value, str) or value != int(value):
        return str(value)
    return int(value)


def _elsewhere(space: Recorded) -> Elsewhere:
    failed = np.isnan(space.times)
    times = {row: float(t) for row, t, fell in zip(space.rows, space.times, failed, strict=True) if not fell}
    return Elsewhere(times, failed=frozenset(space.rows) - times.keys(), name=space.name)


# Strategies: each yields the rows it visits.


def sampled(maker: Callable[[Recorded, int], Any], space: Recorded, seed: int, budget: int) -> Iterator[int]:
    sampler = maker(space, seed)
    for _ in range(min(budget, len(space.rows))):
        (config,) = sampler.ask(1)
        row = space.row_of[config]
        cost = float(space.times[row])
        sampler.tell(config, None if math.isnan(cost) else cost)
        yield row


def member_of(space: Recorded) -> Callable[[dict[str, Any]], bool]:
    """A restriction that asks the recording. Kernel Tuner wants a plain function that has a source."""

    def member(parameters: dict[str, Any]) -> bool:
        return Config(parameters) in space.row_of

    return member


def kernel_tuner(strategy: str, space: Recorded, seed: int, budget: int) -> Iterator[int]:
    """Kernel Tuner in its simulation mode."""
    import kernel_tuner

    random.seed(seed)
    np.random.seed(seed)
    restrictions: Any = list(space.restrictions) or None
    if not restrictions and len(space.rows) < math.prod(map(len, space.values.values())):
        restrictions = [member_of(space)]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        cache = Path(folder) / "cache.json"
        cache.write_text(_cache_text(space))
        results, _ = kernel_tuner.tune_kernel(
            "recorded", "", (1, 1, 1), [], space.values, restrictions=restrictions, cache=str(cache),
            simulation_mode=True, strategy=strategy, strategy_options={"max_fevals": budget}, quiet=True,
        )  # fmt: skip
    yield from (space.row_of[Config({name: result[name] for name in space.values})] for result in results)


@functools.cache
def _cached_text(name: str, rows: tuple[Config, ...], times: tuple[float, ...]) -> str:
    names = sorted(rows[0])
    spent = ("compile_time", "verification_time", "benchmark_time", "strategy_time", "framework_time")
    entries = {}
    for row, cost in zip(rows, times, strict=True):
        failed = math.isnan(cost)
        entry: dict[str, Any] = {n: row[n] for n in names} | dict.fromkeys(spent, 0.0)
        entry |= {"time": "RuntimeFailedConfig" if failed else cost, "timestamp": "2026-01-01 00:00:00+00:00"}
        entry |= {"__error__": "RuntimeFailedConfig"} if failed else {"times": [cost]}
        entries[",".join(str(row[n]) for n in names)] = entry
    values = {n: sorted({row[n] for row in rows}) for n in names}
    head = {"device_name": name, "kernel_name": "recorded", "problem_size": [1, 1, 1], "objective": "time"}
    return json.dumps(head | {"tune_params_keys": names, "tune_params": values, "cache": entries})


def _cache_text(space: Recorded) -> str:
    return _cached_text(space.name, space.rows, tuple(map(float, space.times)))


def believing(space: Recorded, seed: int) -> ModelSampler:
    return ModelSampler(space.rows, seed, space.prior)


def misled(space: Recorded, seed: int) -> ModelSampler:
    """With the prior reversed."""
    assert space.prior is not None
    return ModelSampler(space.rows, seed, -space.prior)


def misled_by_truth(space: Recorded, seed: int) -> ModelSampler:
    """With the order of the recorded times reversed as a prior."""
    return ModelSampler(space.rows, seed, -np.log(space.times))


STRATEGIES: dict[str, Callable[[Recorded, int, int], Iterator[int]]] = {
    "tktune": functools.partial(sampled, lambda space, seed: ModelSampler(space.rows, seed)),
    "optuna_tpe": functools.partial(sampled, lambda space, seed: TpeSampler(space.rows, seed)),
    "random": functools.partial(sampled, lambda space, seed: RandomSampler(space.rows, seed)),
    "kt_adaptive_tabu_greywolf": functools.partial(kernel_tuner, "adaptive_tabu_greywolf"),
    "kt_genetic_algorithm": functools.partial(kernel_tuner, "genetic_algorithm"),
    "tktune_with_prior": functools.partial(sampled, believing),
    "tktune_prior_reversed": functools.partial(sampled, misled),
    "tktune_truth_reversed": functools.partial(sampled, misled_by_truth),
}
NEED_PRIOR = ("tktune_with_prior", "tktune_prior_reversed")
SLOWEST_FIRST = (
    "optuna_tpe",
    "kt_genetic_algorithm",
    "kt_adaptive_tabu_greywolf",
)  # so that no core idles at the end


def propose(space: Any, replay: Any, seed: int) -> None:
    """Our sampler on a space with `n` rows that are known by `config(row)`; ends when `replay` raises."""
    rows = [Config({n: _value(v) for n, v in space.config(row).items()}) for row in range(space.n)]
    row_of = {row: index for index, row in enumerate(rows)}
    sampler = ModelSampler(rows, seed)
    while asked := sampler.ask(1):
        cost = float(replay.evaluate(row_of[asked[0]]))
        sampler.tell(asked[0], None if math.isnan(cost) else cost)
