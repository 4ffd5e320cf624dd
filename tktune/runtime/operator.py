"""`tktune.load`: the tuned kernel as something a program calls. Looks up, verifies, agrees with the other ranks;
what a backend does in a call is in its own file (cpu_operator.py).

Never searches; compiles only when asked with `build=True`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Required, TypedDict, Unpack, overload

from tktune.core.config import Config
from tktune.core.errors import ArtifactError, TktuneError, WordsError
from tktune.core.paths import cache_root
from tktune.runtime.agree import decided_by_rank_zero, unanimous
from tktune.runtime.choice import Choice
from tktune.runtime.lookup import lookup

if TYPE_CHECKING:
    import torch

    from tktune.core.problem import Problem
    from tktune.core.tables import ScheduleTables
    from tktune.runtime.combine_operator import CombineOperator

SPIN_LIMIT_S, MOST_SPIN_LIMIT_S = 30.0, 86400.0


@dataclass(frozen=True)
class Plan:
    """Where every row of one routing goes on this rank; made by `Operator.plan`, replayable any number of times.

    `tables` holds int32 tensors (`tktune.core.tables.ScheduleTables`). `slots` (ranks, tokens, top_k) is the row of
    the output that holds each (token, expert) of this rank's experts, −1 where the expert lives elsewhere.
    """

    tables: ScheduleTables
    arrivals: torch.Tensor
    dispensers: torch.Tensor

    @property
    def slots(self) -> torch.Tensor:
        found: torch.Tensor = self.tables.slots
        return found

    @property
    def rows(self) -> int:
        """Rows of the output in use, padding included."""
        return self.tables.rows


class Operator(Protocol):
    """A loaded kernel with its workspace, for one stream at a time.

    `input` is this rank's symmetric buffer (tokens, hidden) bf16: rows written there need no copy. `choice` says
    which config runs and where it came from. `capacity` is the rows of an output.
    """

    choice: Choice
    problem: Problem
    capacity: int

    @property
    def input(self) -> torch.Tensor: ...

    def plan(self, topk_ids: torch.Tensor) -> Plan:
        """Schedule tables for this rank's `topk_ids` (tokens, top_k), any int dtype, global expert ids, −1 for none.

        Collective: every rank calls it. A grouped GEMM takes the ids of all its `ep_world` ranks,
        (ep_world, tokens, top_k). Raises `RoutingError` on every rank when one rank's ids are wrong; a dispatch on GPUs
        does so at the next `check`.
        """
        ...

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, plan: Plan, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """(capacity, out_cols) bf16: row `plan.slots[r, t, i]` is token t of rank r times its expert's weights.

        `x` is (tokens, hidden) bf16 (a grouped GEMM takes its packed rows, (≥ plan.rows, hidden)); `weights` is
        (local_experts, hidden, cols) or, with weight_layout "enk", (local_experts, cols, hidden). With finish "swiglu"
        they are gate and up as `tktune.pack_glu` packs them, and a row is silu(gate) · up. Rows that hold no
        token are left undefined. Collective. Raises `LaunchFailed` when a peer does not come.
        """
        ...

    def check(self) -> None:
        """Wait for what was enqueued. Raises `LaunchFailed` or `RoutingError` for what went wrong in it."""
        ...

    def close(self) -> None: ...


class LoadWords(TypedDict, total=False):
    """The words of `load`."""

    hidden: Required[int]
    cols: Required[int]
    experts: Required[int]
    top_k: Required[int]
    tokens: Required[int]
    group: Any
    dtype: str
    weight_layout: str
    routing: str
    pad: int | None
    policy: str
    device: str | None
    db: str | None
    cache: Path | None
    ep_world: int | None
    ep_rank: int | None
    build: bool
    spin_limit_s: float
    capacity: int | None
    finish: str


@overload
def load(  # type: ignore[overload-overlap]
    family: Literal["gemm_combine"], **words: Unpack[LoadWords]
) -> CombineOperator: ...
@overload
def load(family: str, **words: Unpack[LoadWords]) -> Operator: ...
def load(
    family: str,
    *,
    hidden: int,
    cols: int,
    experts: int,
    top_k: int,
    tokens: int,
    group: Any = None,
    dtype: str = "bf16",
    weight_layout: str = "ekn",
    routing: str = "uniform",
    pad: int | None = None,
    policy: str = "serving",
    device: str | None = None,
    db: str | None = None,
    cache: Path | None = None,
    ep_world: int | None = None,
    ep_rank: int | None = None,
    build: bool = False,
    spin_limit_s: float = SPIN_LIMIT_S,
    capacity: int | None = None,
    finish: str = "none",
) -> Operator | CombineOperator:
    """The fastest known kernel for this problem, ready to call; every rank of `group` calls it with the same words.

    The first rank looks up and all take its choice. The artifact comes from the cache, verified; when it is not
    there, `build=True` builds it and otherwise `ArtifactError` names that way out. All ranks hold one artifact
    digest or all raise. `spin_limit_s` bounds every wait inside the kernel. `capacity` is the rows of a dispatch's
    output or a combine's input on GPUs, where the routing is known to need fewer than the worst one; the same on all
    ranks. `finish` "swiglu" makes silu(gate) · up of columns that `tktune.pack_glu` packed; `cols` counts gate and up
    together.

    >>> op = tktune.load("dispatch_gemm", hidden=4096, cols=3072, experts=64, top_k=8, tokens=2048,
    ...                  group=dist.group.WORLD)                                    # doctest: +SKIP
    >>> y = op(x_local, weights, op.plan(topk_ids))                                 # doctest: +SKIP
    """
    world = 1
    if group is not None:
        import torch.distributed as dist

        world = dist.get_world_size(group)

    def decide() -> Choice:
        return lookup(
            family, hidden=hidden, cols=cols, experts=experts, top_k=top_k, tokens=tokens, world=world, dtype=dtype,
            weight_layout=weight_layout, routing=routing, pad=pad, policy=policy, device=device, db=db,
            ep_world=ep_world, ep_rank=ep_rank, finish=finish,
        )  # fmt: skip

    if group is None:
        choice = decide()
    else:
        choice = Choice.from_record(decided_by_rank_zero(group, lambda: decide().as_record()))
    made: Operator | CombineOperator = operator_of(
        choice, group, cache=cache, build=build, spin_limit_s=spin_limit_s, capacity=capacity
    )
    return made


def operator_of(
    choice: Choice,
    group: Any = None,
    *,
    cache: Path | None = None,
    build: bool = False,
    spin_limit_s: float = SPIN_LIMIT_S,
    capacity: int | None = None,
) -> Any:
    """The operator that runs `choice`, the same one on every rank: `load` without its lookup. Collective."""
    artifact, failure = None, None
    try:
        _check_words(choice, spin_limit_s, capacity)
        artifact = _artifact(choice, cache or cache_root(), build)
    except TktuneError as error:
        failure = error
    if group is not None:
        unanimous(group, "artifacts", artifact.digest if artifact else "", failure)
        # Peers' addresses are reckoned from it.
        unanimous(group, "capacities", str(capacity), way_out="Pass the same capacity on all ranks.")
    elif failure is not None:
        raise failure
    assert artifact is not None

    if choice.device.backend == "cuda" and choice.problem.family == "dispatch_gemm":
        from tktune.runtime.cuda_dispatch_operator import CudaDispatchOperator

        return CudaDispatchOperator(choice, artifact.path, artifact.sha256, group, spin_limit_s, capacity)
    if choice.device.backend == "cuda" and choice.problem.family == "gemm_combine":
        from tktune.runtime.cuda_combine_operator import CudaCombineOperator

        return CudaCombineOperator(choice, artifact.path, artifact.sha256, group, spin_limit_s, capacity)
    if choice.device.backend == "cuda":
        from tktune.runtime.cuda_operator import CudaOperator

        return CudaOperator(choice, artifact.path, artifact.sha256, group, spin_limit_s)
    if choice.problem.family == "gemm_combine":
        from tktune.runtime.cpu_combine_operator import CpuCombineOperator

        return CpuCombineOperator(choice, artifact.path, artifact.sha256, group, spin_limit_s)
    from tktune.runtime.cpu_operator import CpuOperator

    return CpuOperator(choice, artifact.path, artifact.sha256, group, spin_limit_s)


def _check_words(choice: Choice, spin_limit_s: float, capacity: int | None) -> None:
    if not 0 < spin_limit_s <= MOST_SPIN_LIMIT_S:
        raise WordsError(
            f"spin_limit_s = {spin_limit_s} bounds no wait.",
            f"Give seconds, more than 0 and at most {MOST_SPIN_LIMIT_S:.0f}.",
        )
    if capacity is None:
        return
    family, backend = choice.problem.family, choice.device.backend
    if backend != "cuda" or family == "grouped_gemm":
        raise WordsError(f"{family} on {backend} takes no capacity.", "Leave capacity out.")
    if not isinstance(capacity, int) or capacity < 1:
        raise WordsError(f"capacity = {capacity!r} holds no row.", "Give at least one row.")


def _artifact(choice: Choice, root: Path, build: bool) -> Any:
    """The verified artifact of `choice`, from the cache or (only with `build`) from the compiler."""
    from tktune.build.cache import ArtifactCache

    cache = ArtifactCache(root)
    if not build:
        found = cache.find(choice.artifact_digest) if choice.artifact_digest else None
        if found is None:
            raise ArtifactError(
                f"No artifact for {choice.config} is in {root}.",
                "Pass build=True to build it now, or run `tktune run` on this machine first.",
            )
        return found
    outcome = cache.build([_spec(choice.config, choice)])[0]
    if outcome.artifact is None:
        raise ArtifactError(f"The artifact for {choice.config} cannot be built: {outcome.error_sentence}")
    return outcome.artifact


def _spec(config: Config, choice: Choice) -> Any:
    from tktune.families.base import family

    owner = family(choice.problem.family)
    space = owner.space(choice.problem, choice.device)
    return owner.build_spec(space.build_part(config), choice.problem, choice.device)
