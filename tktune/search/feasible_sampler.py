"""An Optuna sampler over a fixed set of feasible rows, and the driver's sampler made of it.

Imports Optuna; what is chosen is decided in `pool_search`. A study of the driver is scratch: the store's rows are
the only record, and a resumed run tells them again.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from tktune.core.config import Config, Value
from tktune.search.coordinates import FeasibleRows, Floats, Ints, columns_of, in_order
from tktune.search.pool_search import PoolSearch
from tktune.search.sampler import UnseenRows

ROW = "tktune:row"  # the system attribute that says which row a trial measures


class FeasibleSampler(BaseSampler):
    """Draws rows of a set: never one outside it, never one that another trial of the study has.

    The row is recorded on the trial when it is drawn, so trials may be open in any number, in threads or in
    processes that share a storage. A trial's value is its cost (> 0, minimised); one that failed, was pruned or
    ended without a finite value counts as a row that does not work. Trials that were added or enqueued with
    complete parameters count as well. `prior` is an estimate of each row's log cost, and `aside` an executor that learns while
    rows are drawn (see `PoolSearch`).

    >>> rows = [{"A": a, "ORDER": o} for a in (16, 32, 64) for o in ("slot", "token")]
    >>> study = optuna.create_study(sampler=FeasibleSampler(rows, seed=0))
    >>> trial = study.ask(fixed_distributions=study.sampler.distributions)
    >>> trial.params in rows
    True
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Value]],
        seed: int,
        prior: Floats | None = None,
        aside: Executor | None = None,
    ) -> None:
        if not rows:
            raise ValueError("a sampler needs at least one row")
        self.rows = rows
        self._names = tuple(rows[0])
        by_name = columns_of(rows)
        keys = zip(*by_name.values(), strict=True)
        self._row_of = {key: index for index, key in enumerate(keys)}
        if len(self._row_of) != len(rows):
            raise ValueError("rows repeat")
        self.distributions: dict[str, BaseDistribution] = {
            name: CategoricalDistribution(in_order(column)) for name, column in by_name.items()
        }
        self._search = PoolSearch(FeasibleRows.of(rows), seed, prior, aside)
        self._lock = threading.RLock()
        self._unsettled: list[int] = []  # trials that were looked at and had not ended
        self._looked_at = 0  # trials, from the first on
        self._held: dict[int, int] = {}  # row by number of an open trial
        self._taken: set[int] = set()  # rows of all trials

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock())

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """The same for every trial: each parameter with its listed values."""
        return self.distributions

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """A row that no trial has. Raises IndexError when none is left, ValueError for a study that maximises."""
        if study.directions != [StudyDirection.MINIMIZE]:
            raise ValueError("rows have one cost, which is minimised: create the study with that direction")
        with self._lock:
            self._look(study, trial.number)
            row = self._fixed_row(trial)
            if row is None:
                row = self._draw_row(study, trial)
            else:
                self._claim(study, trial, row)
                self._search.take(row)
            self._held[trial.number] = row
            self._taken.add(row)
            return dict(self.rows[row])

    @contextmanager
    def search(self, study: Study) -> Iterator[PoolSearch]:
        """The search, once it has learnt what became of every trial of the study; nobody draws from it meanwhile."""
        with self._lock:
            self._look(study, -1)
            yield self._search

    def numbers(self, rows: Sequence[Mapping[str, Value]]) -> Ints:
        """The numbers of rows. Raises ValueError for one outside the set."""
        found = [self._number(row, -1) for row in rows]
        if -1 in found:
            raise ValueError(f"{rows[found.index(-1)]} is not in the set")
        return np.array(found, np.int64)

    def _draw_row(self, study: Study, trial: FrozenTrial) -> int:
        """Choose and claim a row; choose again where another process claims the same one at the same moment."""
        given_up: list[int] = []
        while True:
            row = self._search.choose()
            self._claim(study, trial, row)
            if not self._elsewhere(study, trial.number, row):
                break
            given_up.append(row)
            # Two that gave way to each other go different ways from here.
            given_up += [self._search.choose() for _ in range(min(trial.number % 7, len(self._search) - 1))]
        for other in given_up:
            self._search.release(other)
        return row

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Never right: all parameters are drawn together. Raises ValueError."""
        raise ValueError(
            f"{param_name} is not a parameter of the feasible set, or was asked with other values; "
            f"use the sampler's own distributions ({', '.join(self.distributions)})."
        )

    def _look(self, study: Study, own: int) -> None:
        """Learn what became of the other trials, in their order."""
        trials = study.get_trials(deepcopy=False)  # in the order of their numbers, which count from 0
        numbers = [*self._unsettled, *range(self._looked_at, len(trials))]
        self._unsettled, self._looked_at = [], len(trials)
        for number in numbers:
            trial = trials[number]
            if number == own:
                self._unsettled.append(number)
                continue
            row, held = self._row_in(trial), self._held.get(number)
            open_ = not trial.state.is_finished()
            if held is not None and held != row:  # it gave way to another trial
                self._search.release(held)
                self._taken.discard(held)
            elif held is None and row in self._taken:
                row = None  # a repeat that somebody enqueued: its first trial speaks for the row
            if row is not None:
                self._taken.add(row)
                if open_:
                    self._held[number] = row
                    self._search.take(row)
                else:
                    self._search.tell(row, _cost(trial))
            if open_:
                self._unsettled.append(number)
            else:
                self._held.pop(number, None)

    def _row_in(self, trial: FrozenTrial) -> int | None:
        row = trial.system_attrs.get(ROW)
        if row is None:
            row = self._number(trial.params) if trial.params else self._fixed_row(trial)
        return row

    def _fixed_row(self, trial: FrozenTrial) -> int | None:
        """The row of a trial that was enqueued with complete parameters."""
        fixed = trial.system_attrs.get("fixed_params")
        return self._number(fixed) if fixed else None

    def _number(self, row: Mapping[str, Any], otherwise: Any = None) -> Any:
        """The number of a row, `otherwise` for one outside the set."""
        return (
            self._row_of.get(self._key(row), otherwise)
            if row.keys() == self.distributions.keys()
            else otherwise
        )

    def _key(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple([row[name] for name in self._names])

    def _claim(self, study: Study, trial: FrozenTrial, row: int) -> None:
        study._storage.set_trial_system_attr(trial._trial_id, ROW, row)

    def _elsewhere(self, study: Study, own: int, row: int) -> bool:
        """Whether another trial claims the row. Whoever sees another claim after writing its own gives way."""
        return any(
            trial.number != own and trial.system_attrs.get(ROW) == row
            for trial in study.get_trials(deepcopy=False)
        )


class ModelSampler:
    """The driver's sampler: asks and tells a study in memory whose sampler is `FeasibleSampler`.

    Rows may be build parts or whole configs, some 100 000 of them. Besides asking it can be asked what it expects,
    by whoever weighs a gain against what it costs to get: `gains`, `predict`, `near` and `take`. Telling is cheap, in
    any number: the model is brought up to date when it is next needed.

    `prior` (rows,) is an estimate of log microseconds up to a constant, NaN where there is none (`search.prior` makes
    one); it orders the first rows and enters the model as a trend. With an executor `aside` the model learns there while the
    driver goes on; the same seed and tells then give the same asks no more.

    >>> sampler = ModelSampler([Config(A=a) for a in range(4)], seed=0)
    >>> rows = sampler.ask(2)
    >>> for row in rows: sampler.tell(row, 10.0 + row.number("A"))
    >>> len(set(rows + sampler.ask(9)))
    4
    """

    name = "model"

    def __init__(
        self,
        rows: Sequence[Config],
        seed: int,
        prior: Floats | None = None,
        aside: Executor | None = None,
    ) -> None:
        self._unseen = UnseenRows(rows)
        self._open: dict[Config, optuna.Trial] = {}
        if not rows:
            return
        self._sampler = FeasibleSampler(rows, seed, prior, aside)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._study = optuna.create_study(sampler=self._sampler)

    def ask(self, count: int) -> list[Config]:
        found: list[Config] = []
        while len(found) < count and len(self._unseen):
            found.append(self._opened())
        return found

    def take(self, row: Config) -> None:
        """Mark `row` as asked without asking: somebody measures it. Raises ValueError unless it is unseen."""
        if row not in self._unseen:
            raise ValueError(f"{row} is not in the set, or was asked or told before")
        self._study.enqueue_trial(dict(row))
        self._opened()

    def tell(self, row: Config, cost_us: float | None) -> None:
        self._unseen.tell(row)
        trial = self._open.pop(row, None)
        state = TrialState.PRUNED if cost_us is None else TrialState.COMPLETE
        if trial is not None:
            self._study.tell(trial, cost_us, state=state)
        else:
            self._study.add_trial(self._ended(row, cost_us, state))

    def tell_many(self, told: Iterable[tuple[Config, float | None]]) -> None:
        """As `tell` for each, in this order."""
        for row, cost_us in told:
            self.tell(row, cost_us)

    @property
    def ready(self) -> bool:
        """Whether enough was told for the model to judge; before that `ask` spreads rows out and gains say little."""
        if not self._unseen.members:
            return False
        with self._sampler.search(self._study) as search:
            return search.ready

    def gains(self, rows: Sequence[Config] | Ints | None = None, unlooked: int = 0) -> Floats:
        """Expected improvement in log time of each row, over the best told, times its probability of success.

        In the order of `rows` (or of their numbers), or of the rows the sampler was made of when None. Rows asked, taken or told gain 0.
        Of all rows of a set of more than 20 000 only a pool is looked at, which is drawn anew now and then: what lies
        around the best, what the prior likes best, and an even rest; the others show 0. Rows that are named are always
        looked at. Rows that are asked and not told count as measured at what is expected of them. `unlooked`: so many rows were
        taken without looking. Raises ValueError for a row outside the set.
        """
        if not self._unseen.members:
            return np.zeros(0)
        wanted = rows if rows is None or isinstance(rows, np.ndarray) else self._sampler.numbers(rows)
        with self._sampler.search(self._study) as search:
            return search.gains(wanted, unlooked)

    def predict(self, rows: Sequence[Config]) -> tuple[Floats, Floats]:
        """Mean and standard deviation of log microseconds of each of `rows`, seen or not, if they succeed."""
        if not len(rows):
            return np.zeros(0), np.zeros(0)
        with self._sampler.search(self._study) as search:
            return search.predict(self._sampler.numbers(rows))

    def near(self, row: Config) -> list[Config]:
        """The unseen rows that differ from `row` in exactly one parameter."""
        (number,) = self._sampler.numbers([row])
        return [Config(self._sampler.rows[i]) for i in self.near_number(int(number))]

    def near_number(self, number: int) -> Ints:
        """The same in numbers of rows, in the order that the sampler was made with."""
        with self._sampler.search(self._study) as search:
            return search.near(number)

    def _opened(self) -> Config:
        trial = self._study.ask(fixed_distributions=self._sampler.distributions)
        row = Config(trial.params)
        self._unseen.take(row)
        self._open[row] = trial
        return row

    def _ended(self, row: Config, cost_us: float | None, state: TrialState) -> FrozenTrial:
        return optuna.trial.create_trial(
            params=dict(row), distributions=self._sampler.distributions, value=cost_us, state=state
        )


def _cost(trial: FrozenTrial) -> float | None:
    """What a finished trial cost; None when it does not work. Raises ValueError for a cost that is not positive."""
    if trial.state != TrialState.COMPLETE or trial.value is None or not math.isfinite(trial.value):
        return None
    if trial.value <= 0:
        raise ValueError(f"trial {trial.number} cost {trial.value}: a cost must be above 0")
    return float(trial.value)
