"""What the user wants computed: the shapes, the dtype, the layout, the world, the routing, the pad."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tktune.core.canonical import digest
from tktune.core.errors import ProblemError

DTYPES = ("bf16",)
WEIGHT_LAYOUTS = ("ekn", "enk")
FINISHES = ("none", "swiglu")
GLU_COLS = 8  # packed columns are groups: so many of gate, then as many of up
MAX_WORLD = 8
MAX_EXPERTS = 256
LARGEST_NUMBER = 2**31 - 1  # kernels and the store count in 32-bit numbers


@dataclass(frozen=True)
class Problem:
    """One computation to tune.

    `hidden` is K, the length of a token row; `cols` is N, the columns of one expert's output; `tokens` is
    per rank; `experts` counts all ranks' experts; each expert's rows are aligned to `pad`. `routing` is the
    text of a routing specification (`tktune.core.routing`). A `grouped_gemm` runs on one device (`world` 1)
    and carries the rows that rank `ep_rank` of `ep_world` owns.

    `finish` is what becomes of the GEMM's columns: "none", or "swiglu", where they are gate and up, packed as
    `tktune.pack_glu` packs weights, and the output silu(gate) · up has half of them (`out_cols`).

    Raises `ProblemError` when the fields contradict each other.
    """

    family: str
    hidden: int
    cols: int
    experts: int
    top_k: int
    tokens: int
    world: int = 1
    dtype: str = "bf16"
    weight_layout: str = "ekn"
    routing: str = "uniform"
    pad: int = 128
    ep_world: int | None = None
    ep_rank: int | None = None
    finish: str = "none"

    def __post_init__(self) -> None:
        for name in ("hidden", "cols", "experts", "top_k", "tokens", "world", "pad"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ProblemError(
                    f"{name} = {value!r} is not a whole number.", f"Write {name} as a whole number."
                )
            if value < 1:
                raise ProblemError(
                    f"{name} = {value} is not positive.", f"Give {name} a value of at least 1."
                )
            if value > LARGEST_NUMBER:
                raise ProblemError(
                    f"{name} = {value} is more than a kernel can count ({LARGEST_NUMBER}).",
                    f"Give {name} a smaller value.",
                )
        if self.family == "grouped_gemm":
            if self.world != 1:
                raise ProblemError(
                    f"grouped_gemm runs on one device, and world is {self.world}.",
                    "Leave world out and give the ranks that share the experts as ep_world.",
                )
            object.__setattr__(self, "ep_world", 1 if self.ep_world is None else self.ep_world)
            object.__setattr__(self, "ep_rank", 0 if self.ep_rank is None else self.ep_rank)
        elif self.ep_world is not None or self.ep_rank is not None:
            raise ProblemError(
                f"{self.family} takes no ep_world or ep_rank.", "Use world for the number of ranks."
            )
        ranks = self.expert_ranks
        if not 1 <= ranks <= MAX_WORLD:
            raise ProblemError(
                f"world = {ranks} is not in 1..{MAX_WORLD}.", f"A host has at most {MAX_WORLD} ranks here."
            )
        if self.ep_rank is not None and not 0 <= self.ep_rank < ranks:
            raise ProblemError(
                f"ep_rank = {self.ep_rank} is not in 0..{ranks - 1}.", "Ranks are counted from 0."
            )
        if self.experts > MAX_EXPERTS * ranks:
            raise ProblemError(
                f"experts = {self.experts} gives one rank more than {MAX_EXPERTS}.",
                "Use more ranks or fewer experts.",
            )
        if self.top_k > self.experts:
            raise ProblemError(
                f"top_k = {self.top_k} is more than experts = {self.experts}.",
                f"A token picks distinct experts: use top_k ≤ {self.experts}.",
            )
        if self.experts % ranks:
            raise ProblemError(
                f"experts = {self.experts} cannot be shared evenly by {ranks} ranks.",
                "Use a number of experts that the ranks divide.",
            )
        if self.pad % 8:
            raise ProblemError(f"pad = {self.pad} is not a multiple of 8.", "Use 16, 32, 64 or 128.")
        if self.dtype not in DTYPES:
            raise ProblemError(f"dtype = {self.dtype!r} is not known.", f"Use one of: {', '.join(DTYPES)}.")
        if self.weight_layout not in WEIGHT_LAYOUTS:
            raise ProblemError(
                f"weight_layout = {self.weight_layout!r} is not known.",
                "Use 'ekn' for (experts, hidden, cols) or 'enk' for (experts, cols, hidden).",
            )
        self._check_finish()
        from tktune.core.routing import parse_routing

        routing = parse_routing(self.routing)
        routing.check(self)
        object.__setattr__(self, "routing", routing.text)

    def _check_finish(self) -> None:
        if self.finish not in FINISHES:
            raise ProblemError(
                f"finish = {self.finish!r} is not known.", f"Use one of: {', '.join(FINISHES)}."
            )
        if self.finish == "none":
            return
        if self.family in ("grouped_gemm", "gemm_combine"):
            raise ProblemError(
                f"{self.family} has no finish, and {self.finish} was asked for.",
                "Leave finish out, or use dispatch_gemm.",
            )
        if self.cols % (2 * GLU_COLS):
            raise ProblemError(
                f"cols = {self.cols} is not a multiple of {2 * GLU_COLS}, so gate and up cannot be packed.",
                "Count gate and up together, each a multiple of 8.",
            )

    @property
    def out_cols(self) -> int:
        """Columns of an output row."""
        return self.cols // 2 if self.finish == "swiglu" else self.cols

    @property
    def expert_ranks(self) -> int:
        """Ranks that share the experts: `world`, or `ep_world` for a grouped GEMM."""
        return self.world if self.ep_world is None else self.ep_world

    @property
    def local_experts(self) -> int:
        return self.experts // self.expert_ranks

    @property
    def assignments(self) -> int:
        """Rows of all ranks before padding: ranks × tokens × top_k."""
        return self.expert_ranks * self.tokens * self.top_k

    @property
    def capacity_rows(self) -> int:
        """Rows of one rank's padded buffer that no routing overflows (a multiple of `pad`)."""
        worst = self.expert_ranks * self.tokens * min(self.top_k, self.local_experts)
        worst += min(self.local_experts, worst) * (self.pad - 1)
        return -(-worst // self.pad) * self.pad

    @cached_property
    def key(self) -> dict[str, Any]:
        """The typed key under which the store knows this problem (None fields and a finish of none left out)."""
        fields = dataclasses.asdict(self)
        if self.finish == "none":
            del fields["finish"]
        return {name: value for name, value in fields.items() if value is not None}

    @cached_property
    def digest(self) -> str:
        return digest(self.key)

    def replace(self, **changes: Any) -> Problem:
        return dataclasses.replace(self, **changes)

    def __str__(self) -> str:
        ranks = f"world {self.world}" if self.ep_world is None else f"rank {self.ep_rank} of {self.ep_world}"
        return (
            f"{self.family} {self.hidden}×{self.cols}, {self.experts} experts, top-{self.top_k}, "
            f"{self.tokens} tokens, {ranks}, {self.dtype} {self.weight_layout}, {self.routing}, pad {self.pad}"
            f"{'' if self.finish == 'none' else f', {self.finish}'}"
        )
