"""What a loaded gemm_combine is, on either backend: its plan and its call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tktune.core.errors import ProblemError, RoutingError

if TYPE_CHECKING:
    import torch

    from tktune.core.combine_tables import CombineTables
    from tktune.core.problem import Problem
    from tktune.runtime.choice import Choice
    from tktune.runtime.operator import Plan


class CombinePlan(Protocol):
    """Which rows make which token; made by `CombineOperator.plan`, replayable any number of times.

    `schedule` says where every expert row stands (`tktune.runtime.operator.Plan`); a dispatch may have made it.
    """

    @property
    def schedule(self) -> Plan: ...

    @property
    def tables(self) -> CombineTables:
        """Who holds and owes what. On GPUs a copy that waits for the device."""
        ...

    @property
    def topk_weights(self) -> torch.Tensor:
        """The weights of everybody, (ranks, tokens, top_k) float32."""
        ...


class CombineOperator(Protocol):
    """A loaded gemm_combine with its workspace, for one stream at a time. `capacity` is the rows of `activations`."""

    choice: Choice
    problem: Problem
    capacity: int

    def plan(
        self,
        topk_ids: torch.Tensor | None,
        topk_weights: torch.Tensor,
        out: CombinePlan | None = None,
        *,
        schedule: Plan | None = None,
    ) -> CombinePlan:
        """Tables for this rank's `topk_ids` (tokens, top_k), global expert ids, and `topk_weights` (tokens, top_k).

        A `schedule` that was made of the same ids for a problem of the same experts, top_k, tokens, world and pad takes
        the place of `topk_ids`, which are then not exchanged again. `out` is a plan of this operator to fill anew, over
        the schedule that it has. Collective: every rank makes the same plans in the same order. Raises `RoutingError`
        or `ProblemError` for what does not fit; wrong ids as the maker of the schedule does.
        """
        ...

    def __call__(
        self,
        activations: torch.Tensor,
        weights: torch.Tensor,
        plan: CombinePlan,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """(tokens, cols) bf16: each own token's weighted sum of its experts' rows.

        Row s of `activations` (rows, hidden) bf16 belongs to slot s of the schedule; rows that only pad an expert may
        hold anything. `weights` is (local_experts, hidden, cols) or, with weight_layout "enk", (local_experts, cols,
        hidden). A token none of whose ids was valid gets zeros. Collective. Raises `LaunchFailed` when a peer does not
        come.
        """
        ...

    def check(self) -> None:
        """Wait for what was enqueued. Raises `LaunchFailed` or `RoutingError` for what went wrong in it."""
        ...

    def close(self) -> None: ...


def checked_weights(problem: Problem, topk_weights: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`topk_weights` as float32, contiguous, on `device`. Raises `RoutingError` for a wrong shape or whole numbers."""
    import torch

    wanted = (problem.tokens, problem.top_k)
    if tuple(topk_weights.shape) != wanted or not topk_weights.dtype.is_floating_point:
        raise RoutingError(
            f"topk_weights is {topk_weights.dtype} {tuple(topk_weights.shape)}, and the problem asks for floats {wanted}.",
            "Pass the weights of this rank's tokens.",
        )
    if topk_weights.requires_grad:
        topk_weights = topk_weights.detach()
    return topk_weights.to(device, torch.float32).contiguous()


def check_ids_given(topk_ids: torch.Tensor | None, schedule: object) -> None:
    """Raise `ProblemError` unless exactly one of ids and schedule is given."""
    if (topk_ids is None) == (schedule is None):
        raise ProblemError(
            "A plan is made of ids or of a schedule, and "
            f"{'neither was' if schedule is None else 'both were'} given.",
            "Pass topk_ids, or None and schedule=.",
        )


def check_same_routing(mine: Problem, other: Problem) -> None:
    """Raise `ProblemError` when a schedule of `other` is none of `mine`."""
    for name in ("experts", "top_k", "tokens", "world", "pad"):
        if getattr(mine, name) != getattr(other, name):
            raise ProblemError(
                f"The schedule is for {name} = {getattr(other, name)}, and this operator's problem has {getattr(mine, name)}.",
                "Load both operators with the same routing words and pad.",
            )
