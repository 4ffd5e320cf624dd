"""Who the finalists are where single measurements cannot tell: many run in short interleaved heats, and the faster half goes on.

On a noisy machine the fastest of many single measurements is mostly the luckiest one. Rows and events are the driver's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from tktune.core.config import Config
from tktune.gang.gang import Gang
from tktune.search.finalists import Arm, Finalist, FinalsPlan, one_round
from tktune.search.judging import LEAST_BAND

WIDTH = 6  # so many times the finalists run in the first heat
_REACH = 2.0  # noises by which a single measurement may have been unlucky
_ROUNDS = 2  # of a heat


def entrants(
    ranked: Sequence[Config], times_us: Callable[[Config], float], places: int, noise: float, moved: bool
) -> list[Config]:
    """Who may be among the `places` fastest: more than these where single measurements differ by up to `noise` (a fraction)
    from their like. Where the machine's own pace has `moved`, times of different moments say less, and all that there is
    room for may.

    `ranked`: configs, fastest first. Returns `places` configs or fewer where the noise hides nothing.
    """
    if noise <= LEAST_BAND and not moved:
        return list(ranked[:places])
    wide = ranked[: WIDTH * places]
    if not wide or moved:
        return list(wide)
    limit = times_us(wide[0]) * (1 + _REACH * noise)
    return [config for number, config in enumerate(wide) if number < places or times_us(config) <= limit]


def run_heats(
    gang: Gang,
    hopefuls: Sequence[Finalist],
    places: int,
    plan: FinalsPlan,
    time_is_up: Callable[[], bool],
) -> tuple[list[Finalist], list[Arm]]:
    """The `places` fastest of the hopefuls, fastest first, and the arms of all with what they measured or how they ended.

    Each heat is of interleaved rounds, after which the faster half by the medians of all rounds so far goes on. When
    `time_is_up` those that lead then are the fastest. Raises `GangError` when no gang can be had.
    """
    everybody = [Arm(finalist) for finalist in hopefuls]
    arms, number = everybody, 0
    while len(arms) > places and not time_is_up():
        for _ in range(_ROUNDS):
            one_round(gang, arms, number, plan)
            number += 1
            arms = [arm for arm in arms if arm.ok]
            if not arms:
                return [], everybody
        arms = sorted(arms, key=lambda arm: median(arm.median_us))[: max(places, (len(arms) + 1) // 2)]
    return [arm.finalist for arm in arms[:places]], everybody
