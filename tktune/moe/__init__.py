"""A mixture-of-experts layer over the ranks of one host: two tuned kernels as one `torch.nn.Module`, and their joint tuning.

`FusedMoE` is imported on first use; the pure half (`parts`, `space`) brings neither torch nor numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__all__ = ["FusedMoE"]

if TYPE_CHECKING:
    from tktune.moe.layer import FusedMoE


def __getattr__(name: str) -> Any:
    if name == "FusedMoE":
        from tktune.moe.layer import FusedMoE

        return FusedMoE
    raise AttributeError(f"module 'tktune.moe' has no attribute {name!r}")
