"""Optuna's categorical TPE over a fixed set of feasible rows: ask/tell in memory, reject and retry, never a repeat.

Optuna is imported when a sampler is made, not with this module. A study here is scratch: the store's rows are the
only record, and a resumed run tells them again.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from typing import Any

from tktune.core.config import Config
from tktune.search.sampler import UnseenRows

# Draws that may fall outside the unseen rows before a random unseen row is taken instead. A draw that is rejected
# leaves no trial: TPE would ignore one that failed, and only look at a longer list (research: search_efficiency.md,
# "what goes wrong").
_TRIES = 24


class TpeSampler:
    """Multivariate categorical TPE with constant liar, restricted to `rows`.

    Failures are told as pruned without a value, which TPE ranks behind every success.

    >>> sampler = TpeSampler([Config(A=a) for a in range(4)], seed=0)
    >>> rows = sampler.ask(2)
    >>> for row in rows: sampler.tell(row, 10.0 + row.number("A"))
    >>> len(set(rows + sampler.ask(9)))
    4
    """

    name = "tpe"

    def __init__(self, rows: Sequence[Config], seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna: Any = optuna
        self._unseen = UnseenRows(rows)
        self._random = random.Random(seed)
        names = list(rows[0]) if rows else []
        self._distributions = {
            name: optuna.distributions.CategoricalDistribution(
                sorted({row[name] for row in rows}, key=_order)
            )
            for name in names
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = _redrawing(self._distributions, self._unseen, self._random, seed)
        self._study: Any = optuna.create_study(sampler=sampler)
        self._open: dict[Config, Any] = {}

    def ask(self, count: int) -> list[Config]:
        found: list[Config] = []
        while len(found) < count and len(self._unseen):
            found.append(self._ask_one())
        return found

    def _ask_one(self) -> Config:
        trial = self._study.ask(fixed_distributions=self._distributions)
        row = Config(trial.params)
        self._unseen.take(row)
        self._open[row] = trial
        return row

    def tell(self, row: Config, cost_us: float | None) -> None:
        self._unseen.tell(row)
        state = self._optuna.trial.TrialState
        trial = self._open.pop(row, None)
        if trial is not None:
            if cost_us is None:
                self._study.tell(trial, state=state.PRUNED)
            else:
                self._study.tell(trial, cost_us)
            return
        self._study.add_trial(
            self._optuna.trial.create_trial(
                params=dict(row),
                distributions=self._distributions,
                value=cost_us,
                state=state.PRUNED if cost_us is None else state.COMPLETE,
            )
        )


def _redrawing(distributions: dict[str, Any], unseen: UnseenRows, chance: random.Random, seed: int) -> Any:
    """Optuna's TPE that draws again where a draw is no unseen row."""
    import optuna

    made: dict[
        bool, Any
    ] = {}  # densities of the trial that is being drawn: of its good quantile or of the rest

    class Redrawing(optuna.samplers.TPESampler):
        def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, Any]:
            return distributions

        def sample_relative(self, study: Any, trial: Any, search_space: dict[str, Any]) -> dict[str, Any]:
            made.clear()
            for _ in range(_TRIES if len(unseen) > 1 else 0):
                drawn = super().sample_relative(study, trial, search_space)
                if (
                    not drawn
                ):  # its first trials are uniform draws: of these, one that is unseen is any unseen row
                    break
                if Config(drawn) in unseen:
                    return drawn
            return dict(chance.choice(unseen.listed()))

        # Densities do not change between draws, and making them is most of the work. Where another release of Optuna has no
        # such method it makes them anew, with the same draws.
        def _build_parzen_estimator(
            self, study: Any, search_space: Any, trials: Any, handle_below: bool
        ) -> Any:
            if handle_below not in made:
                made[handle_below] = super()._build_parzen_estimator(
                    study, search_space, trials, handle_below
                )
            return made[handle_below]

    return Redrawing(seed=seed, multivariate=True, constant_liar=True)


def _order(value: Any) -> tuple[bool, Any]:
    """Numbers before words, each in order: a set of values gets one spelling."""
    return isinstance(value, str), value
