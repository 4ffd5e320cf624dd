"""tktune finds, proves and serves the fastest configuration of kernels that fuse communication with compute."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "load", "lookup", "pack_glu", "unpack_glu"]

if TYPE_CHECKING:
    from tktune.runtime.glu_weights import pack_glu, unpack_glu
    from tktune.runtime.lookup import lookup
    from tktune.runtime.operator import load


def __getattr__(name: str) -> Any:
    """Everything is imported on first use: importing tktune costs nothing."""
    if name == "lookup":
        from tktune.runtime.lookup import lookup

        globals()["lookup"] = lookup  # found without this function from now on
        return lookup
    if name == "load":
        from tktune.runtime.operator import load

        return load
    if name in ("pack_glu", "unpack_glu"):
        from tktune.runtime import glu_weights

        return getattr(glu_weights, name)
    raise AttributeError(f"module 'tktune' has no attribute {name!r}")
