"""Small problems whose tables are compared with each other and with their invariants."""

from __future__ import annotations

from hypothesis import strategies as st

from tktune.core.problem import Problem


def problem_of(
    world: int,
    local_experts: int,
    top_k: int,
    tokens: int,
    pad: int,
    routing: str = "uniform",
    family: str = "dispatch_gemm",
) -> Problem:
    shape = {"hidden": 64, "cols": 64, "experts": world * local_experts, "top_k": top_k, "tokens": tokens}
    return Problem(family, **shape, world=world, pad=pad, routing=routing)


@st.composite
def problems(draw: st.DrawFn, most_tokens: int = 30, family: str = "dispatch_gemm") -> Problem:
    world = draw(st.integers(1, 8))
    local = draw(st.integers(1, 5))
    experts = world * local
    top_k = draw(st.integers(1, min(experts, 6)))
    kinds = ["uniform", "zipf:1.2", f"hot:0.8@{experts - 1}", "one:0"]
    if experts > top_k:
        kinds.append("empty:0")
    tokens, pad = draw(st.integers(1, most_tokens)), draw(st.sampled_from([8, 16, 32]))
    return problem_of(world, local, top_k, tokens, pad, draw(st.sampled_from(kinds)), family)
