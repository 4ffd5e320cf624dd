"""Decides which row of a feasible set is measured next, from what the others cost and from what a prior says.

Rows are numbers here; configs, Optuna and the driver are not known.
"""

from __future__ import annotations

from concurrent.futures import Executor, Future

import numpy as np
from numpy.typing import NDArray

from tktune.search.acquisition import spread_out
from tktune.search.coordinates import FeasibleRows, Floats, Ints
from tktune.search.one_thread import one_thread
from tktune.search.outlook import FEWEST_TIMES, Outlook, View
from tktune.search.pool import MOST_WHOLE, Pool, Pools
from tktune.search.success import Lesson, SuccessModel
from tktune.search.trend import Trend

_DESIGN = 6  # rows before the model chooses
_BEST_OF_PRIOR = 0.1  # the share of rows that those of its opening are spread over which are no basins
_MOST_OUTCOMES = 120  # the latest successes, and as many failures, that the success model learns from
_SUCCESSES_BETWEEN_LESSONS = 8
# Where all that is left promises little, logarithms of improvement differ by more than any probability; so rows
# that rather fail than not come after all others.
_EVEN, _LAST = float(np.log(0.5)), 1e9
# All rows as they are; and the fast half alone, whose differences are small beside those of the slow half.
_WHOLE, _FAST = View(np.inf, -3.0), View(0.5, 0.0)
# Whose word counts in turn, and whether among all rows or among those one step from the best.
_TURNS = ((_FAST, False), (_WHOLE, False), (_FAST, True), (_WHOLE, False))
# A prior whose order has turned out the wrong way round by this rank correlation is believed in one of these turns alone.
_WRONG, _OF_A_WRONG_PRIOR = -0.4, 3


class PoolSearch:
    """Proposes rows, never one that was proposed or told before. The same seed and calls give the same rows.

    `prior` (rows,) is an estimate of each row's log cost up to a constant, NaN where it has none: the model starts
    from it, learns how far to believe it, and its best row comes first. Where measuring reverses its order, a model that
    never heard of it decides three times of four. With an executor `aside` what takes long is learnt
    there, and what was learnt before answers meanwhile: then the time that passes decides as well.
    """

    def __init__(
        self, rows: FeasibleRows, seed: int, prior: Floats | None = None, aside: Executor | None = None
    ) -> None:
        self._rows = rows
        self._aside = aside
        self._draw = np.random.default_rng(seed)
        self._free = np.ones(len(rows), bool)
        self._trend = Trend(rows, prior)
        self._pools, self._seed = Pools(rows, self._draw), seed
        self._outlooks: dict[tuple[View, bool], Outlook] = {}  # by view, and whether it starts from the prior
        self._success = SuccessModel(rows)
        self._lesson: tuple[tuple[int, int], Lesson] | None = None  # the last one of success, and when it was
        self._judging: Future[None] | None = None
        self._favoured: list[int] = []  # rows that were proposed because a prior likes them
        self._doubt: int | None = None  # the row that they are compared with
        self._cost: dict[int, float] = {}  # log cost by row, in the order of tells
        self._failed: list[int] = []
        self._pending: dict[int, None] = {}

    def __len__(self) -> int:
        """Rows not proposed nor told yet."""
        return int(np.count_nonzero(self._free))

    # What happens to rows.

    def tell(self, row: int, cost: float | None) -> None:
        """What a row cost (> 0, any unit), None when it failed. Also for rows it did not propose."""
        self._free[row] = False
        self._pending.pop(row, None)
        if cost is None:
            self._failed.append(row)
        else:
            self._cost[row] = float(np.log(cost))

    def take(self, row: int) -> None:
        """Somebody measures this row: never propose it."""
        self._free[row] = False
        self._pending[row] = None

    def release(self, row: int) -> None:
        """Nobody measures this row after all."""
        self._free[row] = True
        self._pending.pop(row, None)

    @one_thread()
    def choose(self) -> int:
        """The next row; it counts as being measured until it is told. Raises IndexError when none is left."""
        left = np.flatnonzero(self._free)
        if not len(left):
            raise IndexError("every row was proposed")
        row = self._promising(*_TURNS[self._turn % len(_TURNS)]) if self.ready else self._opening(left)
        self.take(row)
        return row

    # What the model says, for whoever weighs more than gain.

    @property
    def ready(self) -> bool:
        """Whether enough is known for the model to choose."""
        return self._turn >= _DESIGN and len(self._cost) >= FEWEST_TIMES

    @one_thread()
    def gains(self, rows: Ints | None = None, unlooked: int = 0) -> Floats:
        """Expected improvement of log cost times probability of success: of `rows`, or of all rows in their order.

        Rows proposed or told gain 0. Of all rows of a set beyond `MOST_WHOLE` only a pool is looked at, the others
        show 0; rows that are named are always looked at. A row being measured counts as measured at its mean. `unlooked`
        rows were taken on the word of the look before theirs: views take turns over the others.
        """
        turn = (self._turn - unlooked) % len(_TURNS)
        outlook = self._outlook(_TURNS[turn][0], turn)
        targets = outlook.look(self._cost, self._pending, self._dress)
        if rows is None:
            found = np.zeros(len(self._rows))
            values = outlook.log_improvement(targets) + self._odds(outlook.pool)
            members = outlook.pool.members
            found[members] = np.exp(values) * targets.unit * self._free[members]
            return found
        values = outlook.log_improvement(targets, rows)
        if self._failed and len(rows):
            hot = self._rows.one_hot(rows, np.float32)
            values = values + np.log(self._success.by(self._latest_lesson(), hot))
        return np.exp(values) * targets.unit * self._free[rows]

    @one_thread()
    def predict(self, rows: Ints) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the log cost of `rows`, seen or not, if they succeed."""
        outlook = self._outlook(_WHOLE, self._turn)
        return outlook.predict(outlook.look(self._cost, self._pending, self._dress), rows)

    def near(self, row: int) -> Ints:
        """The rows not proposed nor told that differ from `row` in one parameter."""
        found = self._rows.neighbours(row)
        return found[self._free[found]]

    # What is proposed.

    @property
    def _turn(self) -> int:
        return len(self._cost) + len(self._failed) + len(self._pending)

    def _opening(self, left: Ints) -> int:
        if self._trend.expected is not None and self._turn < _DESIGN:
            row = self._by_prior(self._trend.expected, left)
            if row is not None:
                return row
        odds = None
        if self._failed:
            left = left if len(left) <= MOST_WHOLE else self._draw.choice(left, MOST_WHOLE, replace=False)
            odds = np.log(self._probability(self._rows.one_hot(left, np.float32)))
        taken = [*self._cost, *self._failed, *self._pending]
        return spread_out(self._rows, left, taken, self._draw, odds)

    def _by_prior(self, expected: Floats, left: Ints) -> int | None:
        """The prior's best row, then one of its middle, then, unless that one was faster, its next best basins, and when there
        are no more, rows spread over its best tenth."""
        if self._favoured and self._doubt is None:
            ranked = left[np.argsort(expected[left], kind="stable")]
            self._doubt = int(self._draw.choice(ranked[len(ranked) * 2 // 5 : len(ranked) * 3 // 5 + 1]))
            return self._doubt
        costs = [self._cost[row] for row in self._favoured if row in self._cost]
        if costs and self._cost.get(-1 if self._doubt is None else self._doubt, np.inf) <= min(costs):
            return None
        basins = self._trend.basins
        basins = basins[self._free[basins]]
        if not len(basins):
            best = left[expected[left] <= np.quantile(expected, _BEST_OF_PRIOR)]
            taken = [*self._cost, *self._failed, *self._pending]
            return spread_out(self._rows, best, taken, self._draw) if len(best) else None
        self._favoured.append(int(basins[0]))
        return self._favoured[-1]

    def _promising(self, view: View, near_best: bool) -> int:
        outlook = self._outlook(view, self._turn)
        values = outlook.log_improvement(outlook.look(self._cost, self._pending, self._dress))
        odds = self._odds(outlook.pool)
        values = values + odds - _LAST * (odds < _EVEN)
        members = outlook.pool.members
        free = self._free[members]
        if near_best:
            best = min(self._cost, key=self._cost.__getitem__)
            near = free & np.isin(members, self._rows.neighbours(best))
            free = near if near.any() else free
        if not free.any():  # only where the pool was drawn
            return int(self._draw.choice(np.flatnonzero(self._free)))
        return int(members[np.argmax(np.where(free, values, -np.inf))])

    # What of the prior is believed.

    def _outlook(self, view: View, turn: int) -> Outlook:
        """The view as one of this turn: with the prior or, where that was wrong, mostly without."""
        believed = self._trend.agreement(self._cost) > _WRONG or turn % len(_TURNS) == _OF_A_WRONG_PRIOR
        found = self._outlooks.get((view, believed))
        if found is None:
            trend = self._trend if believed else Trend(self._rows, None)
            found = Outlook(view, self._rows, trend, self._pools, self._seed, self._aside)
            self._outlooks[view, believed] = found
        return found

    # Success.

    @property
    def _outcomes(self) -> tuple[int, int]:
        """What a lesson of success is as old as."""
        return len(self._failed), len(self._cost) // _SUCCESSES_BETWEEN_LESSONS

    def _learn_success(self) -> Lesson:
        at = self._outcomes
        good, bad = list(self._cost)[-_MOST_OUTCOMES:], self._failed[-_MOST_OUTCOMES:]
        succeeded = np.arange(len(good) + len(bad)) < len(good)
        lesson = self._success.lesson(good + bad, succeeded)
        self._lesson = at, lesson
        return lesson

    def _latest_lesson(self) -> Lesson:
        """The last lesson, as long as it is no older than that of a pool may be."""
        if self._lesson is None or self._lesson[0] != self._outcomes:
            return self._learn_success()
        return self._lesson[1]

    def _probability(self, hot: NDArray[np.float32]) -> Floats:
        """Of success, for one-hot rows."""
        return self._success.by(self._learn_success(), hot)

    def _odds(self, pool: Pool) -> Floats:
        """Log probability of success of a pool, learnt anew after each failure and now and then."""
        if not self._failed:
            return np.zeros(len(pool.members))
        if pool.log_odds is None:
            self._judge(pool)
        elif pool.judged_at != self._outcomes:
            if self._aside is None:
                self._judge(pool)
            elif self._judging is None or self._judging.done():
                if self._judging is not None:
                    self._judging.result()
                self._judging = self._aside.submit(self._judge, pool)
        assert pool.log_odds is not None
        return pool.log_odds

    def _dress(self, pool: Pool) -> None:
        if self._failed:
            self._judge(pool)

    @one_thread()
    def _judge(self, pool: Pool) -> None:
        at = self._outcomes
        pool.log_odds, pool.judged_at = np.log(self._probability(pool.hot)), at
