"""Samplers by name, each imported when it is made: whoever lists or names them pays for neither numpy nor Optuna."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tktune.core.config import Config
from tktune.search.sampler import ConfigSampler

if TYPE_CHECKING:
    from tktune.search.feasible_sampler import ModelSampler
    from tktune.search.prior import Elsewhere


def model_sampler(
    rows: Sequence[Config],
    seed: int,
    estimate_us: Mapping[Config, float] | None = None,
    elsewhere: Sequence[Elsewhere] = (),
) -> ModelSampler:
    """Our sampler over `rows`; `estimate_us` is what a cost model says of them, `elsewhere` what other places taught
    (`search.prior`)."""
    from tktune.search.feasible_sampler import ModelSampler
    from tktune.search.prior import log_prior

    known = estimate_us is not None or elsewhere
    return ModelSampler(rows, seed, log_prior(rows, estimate_us, elsewhere) if known else None)


def tpe_sampler(rows: Sequence[Config], seed: int) -> ConfigSampler:
    """Optuna's categorical TPE with reject-and-retry, for comparison."""
    from tktune.search.tpe import TpeSampler

    return TpeSampler(rows, seed)


def random_sampler(rows: Sequence[Config], seed: int) -> ConfigSampler:
    """A seeded random order, for comparison."""
    from tktune.search.random import RandomSampler

    return RandomSampler(rows, seed)


SAMPLERS = {"model": model_sampler, "tpe": tpe_sampler, "random": random_sampler}
