"""What a study of an expert layer tunes: each pad's two kernels alone, then the launches of the pair on the layer's time.

The pair is a problem like any other (family `moe_layer`, rows and winner of its own); here is which problems a layer
stands for, and the part of its space that is searched once its kernels have winners.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tktune.core import status
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.errors import WordsError
from tktune.core.problem import Problem
from tktune.core.space import Space
from tktune.families.base import Family, family
from tktune.moe.parts import (
    COMBINE,
    DISPATCH,
    FAMILIES,
    PARTS,
    is_layer,
    part_config,
    part_problem,
    part_problems,
)
from tktune.moe.space import MoeLayer, narrowed
from tktune.search.events import Listener, Note

if TYPE_CHECKING:
    from tktune.search.study import Study
    from tktune.store.results import Store
    from tktune.store.rows import WinnerRow

# A pad whose two kernels together take this much longer than the best pad's is not tuned as a pair.
PAD_MARGIN = 1.05
# Launches of a kernel that lend their values to the pair's space: the fastest ones of the winner's build.
MOST_LAUNCHES = 16
LAUNCH_MARGIN = 1.25
MOST_PAIRS = 4096
_SPLITS = ("num_comm_sms", "num_reduce_sms")


def with_kernels(layers: Iterable[Problem]) -> tuple[Problem, ...]:
    """The problems of the layers' kernels, each once, and then the layers.

    >>> layer = Problem("moe_layer", hidden=64, cols=32, experts=4, top_k=2, tokens=16)
    >>> [problem.family for problem in with_kernels([layer])]
    ['dispatch_gemm', 'gemm_combine', 'moe_layer']
    """
    found = list(layers)
    kernels = [kernel for layer in found for kernel in part_problems(layer).values()]
    return tuple(dict.fromkeys([*kernels, *found]))


def kernel_of(problem: Problem) -> str:
    """Which part of a layer this kernel's problem is."""
    return next(part for part in PARTS if FAMILIES[part] == problem.family)


def flat_pins(pins: Mapping[str, Any]) -> dict[str, Any]:
    """`[pins.dispatch] STAGES = 3` as `"dispatch.STAGES" = 3`; what is flat already stays."""
    flat: dict[str, Any] = {}
    for name, value in pins.items():
        flat |= (
            {f"{name}.{key}": one for key, one in value.items()} if isinstance(value, dict) else {name: value}
        )
    return flat


def refuse_starts(study: Study) -> None:
    """Raises `WordsError`: a start is a config of one kernel."""
    if study.start_from:
        raise WordsError(
            f"{study.name} tunes two kernels and their pair, and start_from names one config.",
            "Leave start_from out, or tune the kernel it is meant for in a study of its own.",
        )


def at_their_turn(
    spaces: Iterable[tuple[Family, Space]], study: Study, store: Store, listener: Listener
) -> Iterator[tuple[Family, Space]]:
    """Layers, each with its space cut down to what its kernels' winners leave when its turn comes.

    One is left out, with a sentence, when a kernel of it has no winner, or when another pad's kernels are clearly faster.
    """
    for _, space in spaces:
        layer = space.problem
        standing = _standing(layer, space.device, study, store)
        if standing is None:
            kernels = " or ".join(FAMILIES[part] for part in PARTS)
            listener.on_event(
                Note(f"{layer} is not tuned: its {kernels} has no winner. The same command tries again.")
            )
            continue
        best = _fastest(layer, space.device, study, store) or standing
        if standing.time_us > best.time_us * PAD_MARGIN:
            listener.on_event(
                Note(
                    f"{layer} is not tuned: alone its kernels take {standing.time_us:.1f} µs, and those of pad {best.pad} "
                    f"{best.time_us:.1f} µs."
                )
            )
            continue
        yield _pairs(standing, space, study, store)


class MeasuredLayer(MoeLayer):
    """The layer with what its kernels' launches took alone, `times_us` by part, as the estimate of what it takes.

    A launch that was not measured takes what the kernel's cost model says of it, scaled as the model errs for the first
    one of its part.
    """

    def __init__(self, times_us: Mapping[str, Mapping[Config, float]]) -> None:
        self._times_us = times_us

    def cost_us(self, config: Config, problem: Problem, device: DeviceClass) -> float:
        return sum(self._alone_us(part, part_config(config, part), problem, device) for part in PARTS)

    def _alone_us(self, part: str, config: Config, layer: Problem, device: DeviceClass) -> float:
        times = self._times_us[part]
        if config in times:
            return times[config]
        kernel, problem = family(FAMILIES[part]), part_problem(layer, part)
        known, known_us = next(iter(times.items()))
        return known_us * kernel.cost_us(config, problem, device) / kernel.cost_us(known, problem, device)


@dataclass(frozen=True)
class _Standing:
    """The winners of a layer's kernels, by part."""

    pad: int
    winners: Mapping[str, WinnerRow]

    @property
    def time_us(self) -> float:
        return sum(winner.time_us for winner in self.winners.values())


def _standing(layer: Problem, device: DeviceClass, study: Study, store: Store) -> _Standing | None:
    """None when a kernel has no winner under the study's policy."""
    policy = study.policy(device)
    winners = {}
    for part, problem in part_problems(layer).items():
        winner = store.winner(problem, device, policy.name)
        if winner is None or winner.policy.digest != policy.digest:
            return None
        winners[part] = winner
    return _Standing(layer.pad, winners)


def _fastest(layer: Problem, device: DeviceClass, study: Study, store: Store) -> _Standing | None:
    """The standing of the pad whose kernels take the least time together, among the pads of this shape in the study."""
    pads = [p for p in study.problems if is_layer(p) and p.replace(pad=8) == layer.replace(pad=8)]
    everyone = [_standing(other, device, study, store) for other in pads]
    found = [standing for standing in everyone if standing is not None]
    return min(found, key=lambda one: (one.time_us, one.pad), default=None)


def _pairs(standing: _Standing, space: Space, study: Study, store: Store) -> tuple[Family, Space]:
    """The values of the kernels' fast launches, fewer of them where their products would be too many; and the family that
    knows what they took."""
    times_us, launches = {}, {}
    for part, winner in standing.winners.items():
        own = study.space(winner.problem, space.device)
        times = times_us[part] = _measured(winner, own, store)
        ranked = sorted(times, key=lambda config: (times[config], config.digest))
        fast = [config for config in ranked if times[config] <= LAUNCH_MARGIN * times[ranked[0]]]
        launches[part] = list(dict.fromkeys([winner.config, *_neighbours(winner.config, own), *fast]))
    for most in range(MOST_LAUNCHES, 0, -1):
        cut = narrowed(space, *(launches[part][:most] for part in (DISPATCH, COMBINE)))
        if cut.size <= MOST_PAIRS:
            break
    return MeasuredLayer(times_us), cut


def _measured(winner: WinnerRow, space: Space, store: Store) -> dict[Config, float]:
    """What the configs of the winner's build took, the winner first, in its search's own measurements."""
    build = space.build_part(winner.config)
    times = {winner.config: winner.time_us}
    everything = store.keys()
    for key in everything:
        facts = store.key_facts(key)
        if (facts.problem, facts.device, facts.policy, facts.toolchain) != (
            winner.problem, winner.device, winner.policy, winner.toolchain,
        ):  # fmt: skip
            continue
        for row in store.trials(key):
            current = row.artifact_digest == winner.artifact_digest and row.status == status.OK
            if current and row.time_us is not None and space.build_part(row.config) == build:
                times.setdefault(row.config, row.time_us)
    return times


def _neighbours(config: Config, space: Space) -> list[Config]:
    """The config with each split one step up and down, where that is feasible."""
    found = []
    for parameter in space.parameters:
        if parameter.name not in _SPLITS or config[parameter.name] not in parameter.values:
            continue
        at = parameter.values.index(config[parameter.name])
        for step in (at - 1, at + 1):
            if 0 <= step < len(parameter.values):
                other = config.replace(**{parameter.name: parameter.values[step]})
                found += [other] if space.is_feasible(other) else []
    return found
