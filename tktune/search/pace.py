"""How many choices one look at a model serves: one, unless looks take too large a share of what measuring takes.

Arithmetic on a clock; knows no rows and no model.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from statistics import fmean

_SHARE = 0.5  # of the seconds of a trial that looking may take: the driver has more to do than to look
_MOST = 3  # choices of one look: what is told meanwhile changes what is worth measuring
_RECENT = 24  # looks that count: about those between two fits


def _still() -> float:
    return 0.0


class Pace:
    """`lanes` measure side by side. On a clock that stands still while the driver thinks (a replay's, and the default) every
    choice has a look of its own.

    >>> pace = Pace()
    >>> with pace.look(): ...
    >>> pace.choices(trial_s=0.020)
    1
    """

    def __init__(self, clock: Callable[[], float] = _still, lanes: int = 1) -> None:
        self.lanes = lanes
        self._clock = clock
        self._looks: deque[float] = deque(maxlen=_RECENT)

    @contextlib.contextmanager
    def look(self) -> Iterator[None]:
        """Inside, the model is looked at."""
        began = self._clock()
        yield
        self._looks.append(self._clock() - began)

    def choices(self, trial_s: float) -> int:
        """Choices that a look serves now, when a trial takes `trial_s`."""
        may_take_s = _SHARE * trial_s / self.lanes
        if not self._looks or may_take_s <= 0:
            return 1
        return max(1, min(_MOST, math.ceil(fmean(self._looks) / may_take_s)))
