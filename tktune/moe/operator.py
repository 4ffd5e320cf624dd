"""What runs a layer: the two tuned operators with the buffers between them, loaded on all ranks or on none.

Never searches; compiles only when asked with `build=True`. What stands in where nothing can be loaded is in `serial`.
"""

from __future__ import annotations

import dataclasses
import warnings
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch

from tktune.build.cache import ArtifactCache
from tktune.build.pairs import parts_of
from tktune.core.errors import (
    ArtifactError,
    DeviceAbsent,
    NothingFeasible,
    TktuneError,
    WordsError,
    WorkError,
)
from tktune.core.paths import cache_root
from tktune.core.problem import Problem
from tktune.moe import library
from tktune.moe.call import LayerCall
from tktune.moe.choosing import LayerChoice, choose
from tktune.moe.parts import DISPATCH, FAMILY_NAME, NO_EXPERT, PARTS, part_problem
from tktune.moe.serial import SerialLayer, closed
from tktune.runtime.agree import decided_by_rank_zero, unanimous
from tktune.runtime.glu_weights import pack_glu, unpack_glu
from tktune.runtime.lookup import PADS
from tktune.runtime.operator import operator_of

_warned: set[str] = set()


class LayerOperator(Protocol):
    """What runs a layer on this rank, for one stream at a time.

    `packs`: `w13` is taken in the kernels' form (`packed` makes it of gate and up, `plain` is its inverse). `number` is
    what compiled code calls it by; `workspace` is written by every call.
    """

    problem: Problem
    rank: int
    device: torch.device
    packs: bool
    number: int
    workspace: torch.Tensor

    def packed(self, w13: torch.Tensor) -> torch.Tensor: ...

    def plain(self, w13: torch.Tensor) -> torch.Tensor: ...

    def run(self, call: LayerCall) -> torch.Tensor:
        """Fill `call.out` and return it. Collective."""
        ...

    def explain(self) -> str: ...

    def check(self) -> None: ...

    def close(self) -> None: ...


class TunedLayer:
    """Both kernels. The plan, the rows between them and the plan's own memory are made once and filled anew by each call."""

    packs = True

    def __init__(self, choice: LayerChoice, group: Any, **words: Any) -> None:
        self.choice = choice
        self.problem = choice.problem
        self.rank = 0
        if group is not None:
            import torch.distributed as dist

            self.rank = dist.get_rank(group)
        backend = choice.combine.device.backend
        gpus = backend == "cuda"
        if gpus and not torch.cuda.is_available():
            raise DeviceAbsent(
                f"This torch has no GPU, and the kernels are for {choice.combine.device}.",
                'Use device="cpu" here.',
            )
        self.device = torch.device("cuda", torch.cuda.current_device()) if gpus else torch.device("cpu")
        if backend == "cpu":  # whose buffers hold every routing
            words["capacity"] = None
        self._dispatch = operator_of(choice.dispatch, group, **words)
        try:
            self._combine = operator_of(choice.combine, group, **words)
        except TktuneError:
            self._dispatch.close()
            raise
        shape = (self._dispatch.capacity, self.problem.cols)
        self.workspace = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        self._schedule: Any = None
        self._sums: Any = None
        if gpus:
            self._first_plan()
        self.number = library.enter(self)
        self._closed = False

    def _first_plan(self) -> None:
        """Make the plans that every call fills anew, outside of any graph's memory. Collective."""
        shape = (self.problem.tokens, self.problem.top_k)
        nobody = torch.full(shape, NO_EXPERT, dtype=torch.int32, device=self.device)
        nothing = torch.zeros(shape, dtype=torch.float32, device=self.device)
        self._schedule = self._dispatch.plan(nobody)
        self._sums = self._combine.plan(None, nothing, schedule=self._schedule)
        torch.cuda.synchronize(self.device)

    @property
    def parts(self) -> tuple[Any, Any]:
        """The dispatch operator and the combine operator."""
        return self._dispatch, self._combine

    @property
    def input(self) -> torch.Tensor:
        """This rank's symmetric rows, (tokens, hidden): an `x` that lies there is not copied."""
        found: torch.Tensor = self._dispatch.input
        return found

    def packed(self, w13: torch.Tensor) -> torch.Tensor:
        return pack_glu(w13, self.problem.weight_layout)

    def plain(self, w13: torch.Tensor) -> torch.Tensor:
        return unpack_glu(w13, self.problem.weight_layout)

    def run(self, call: LayerCall) -> torch.Tensor:
        if self._closed:
            raise closed()
        if self.device.type == "cuda":
            self._run_on_gpu(call)
        else:  # where plans are made by the host, each anew
            schedule = self._dispatch.plan(call.topk_ids)
            sums = self._combine.plan(None, call.topk_weights, schedule=schedule)
            self._dispatch(call.x, call.w13, schedule, self.workspace)
            self._combine(self.workspace, call.w2, sums, call.out)
        return call.out

    def _run_on_gpu(self, call: LayerCall) -> None:
        """One meeting of all ranks is enough: whoever has everybody's ids finds everybody's rows, which were brought
        before, and before the second kernel all meet, done with each other's rows and with the sums of the call before.
        """
        first, second = self._dispatch, self._combine
        schedule, sums = self._schedule.memory, self._sums.memory
        first.bring(call.x)
        first.enqueue_plan(call.topk_ids, schedule)
        second.enqueue_tables(call.topk_weights, schedule, sums)
        first.enqueue_between(call.w13, self.workspace, schedule)
        second.enqueue(self.workspace, call.w2, call.out, schedule, sums)

    def explain(self) -> str:
        return self.choice.explain()

    def check(self) -> None:
        self._dispatch.check()
        self._combine.check()

    def close(self) -> None:
        self._closed = True
        library.leave(self.number)
        self._schedule = self._sums = None
        self._combine.close()
        self._dispatch.close()


def layer_problem(
    hidden: int,
    intermediate: int,
    experts: int,
    top_k: int,
    tokens: int,
    group: Any,
    weight_layout: str,
    routing: str,
    pad: int | None,
) -> Problem:
    """The layer's problem. Raises `ProblemError` when the numbers contradict each other."""
    world = 1
    if group is not None:
        import torch.distributed as dist

        world = dist.get_world_size(group)
    layer = Problem(
        FAMILY_NAME, hidden, intermediate, experts, top_k, tokens, world, weight_layout=weight_layout, routing=routing,
        pad=PADS[0] if pad is None else pad,
    )  # fmt: skip
    part_problem(layer, DISPATCH)  # gate and up can be packed
    return layer


def load_layer(
    layer: Problem,
    group: Any,
    *,
    any_pad: bool,
    policy: str,
    device: str | None,
    db: str | PathLike[str] | None,
    cache: Path | None,
    build: bool,
    capacity: int | None,
    spin_limit_s: float,
    fallback: bool,
) -> LayerOperator:
    """The fastest known kernels for `layer`, or with `fallback` plain torch where they cannot run, on every rank alike.

    Warns once a process and reason. Collective. Raises what the rooms below raise when there is no fallback, and
    `WordsError` for words that are wrong wherever the layer runs.
    """
    failure: TktuneError | None = None
    made: TunedLayer | None = None
    try:
        choice = _chosen(layer, group, any_pad=any_pad, policy=policy, device=device, db=db)
        cache = None if cache is None else Path(cache)
        choice = _with_artifacts(choice, group, cache, build)
        made = TunedLayer(
            choice, group, cache=cache, build=build, capacity=capacity, spin_limit_s=spin_limit_s
        )
    except (WorkError, WordsError) as error:
        failure = error
    if not fallback:
        if failure is not None:
            raise failure
        assert made is not None
        return made
    failure = _anywhere(group, failure)
    if failure is None and made is not None:
        return made
    if made is not None:
        made.close()
    if _wrong_words(failure):
        assert failure is not None
        raise failure
    why = "" if failure is None else failure.sentence
    if why not in _warned:
        _warned.add(why)
        way_out = "" if failure is None else failure.way_out
        warnings.warn(
            f"{layer} runs in plain torch, since no tuned kernel can: {why} {way_out}".strip(),
            RuntimeWarning,
            stacklevel=4,
        )
    return SerialLayer(layer, group, why, device)


def _chosen(layer: Problem, group: Any, *, any_pad: bool, policy: str, device: Any, db: Any) -> LayerChoice:
    """The first rank looks up, all take its choice."""

    def decide() -> LayerChoice:
        return choose(layer, any_pad=any_pad, policy=policy, device=device, db=db)

    if group is None:
        return decide()
    return LayerChoice.from_record(decided_by_rank_zero(group, lambda: decide().as_record()))


def _with_artifacts(choice: LayerChoice, group: Any, cache: Path | None, build: bool) -> LayerChoice:
    """A pair's parts get the names of their artifacts, which the pair's own artifact knows. With `build` they are found by
    building. Raises `ArtifactError` on every rank when it is missing on one."""
    if choice.pair is None or build:
        return choice
    failure, digests = None, [""] * len(PARTS)
    try:
        held = ArtifactCache(cache or cache_root())
        found = held.find(choice.pair.artifact_digest or "-")
        if found is None:
            raise ArtifactError(
                f"No artifact for {choice.pair.config} is in {held.root}.",
                "Pass build=True to build it now, or run `tktune run` on this machine first.",
            )
        digests = [part.digest for part in parts_of(found.path, found.sha256)]
    except TktuneError as error:
        failure = error
    if group is not None:
        unanimous(group, "artifacts", " ".join(digests), failure)
    elif failure is not None:
        raise failure
    first, second = (
        dataclasses.replace(choice.parts[part], artifact_digest=digest)
        for part, digest in zip(PARTS, digests, strict=True)
    )
    return LayerChoice(first, second, choice.pair)


def _anywhere(group: Any, failure: TktuneError | None) -> TktuneError | None:
    """This rank's failure, or another's: when one rank cannot run kernels, none does."""
    if group is None:
        return failure
    import torch.distributed as dist

    said: list[Any] = [None] * dist.get_world_size(group)
    mine = None if failure is None else (failure.sentence, failure.way_out, _wrong_words(failure))
    dist.all_gather_object(said, mine, group=group)
    others = [one for one in said if one is not None]
    sentence, way_out, wrong = max(others, key=lambda one: one[2], default=("", "", False))
    if failure is not None and wrong == _wrong_words(failure):
        return failure
    return (WordsError if wrong else WorkError)(sentence, way_out) if others else None


def _wrong_words(failure: TktuneError | None) -> bool:
    """Whether it is a mistake in the call, which plain torch would only hide."""
    return isinstance(failure, WordsError) and not isinstance(failure, DeviceAbsent | NothingFeasible)
