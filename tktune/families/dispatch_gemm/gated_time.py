"""What it costs the wgmma GEMM that its rows arrive meanwhile, for ranking. Pure.

Fitted with `wgmma_time`, on two H200 joined by NVLink; where rows come otherwise, these only order what is alike.
"""

from __future__ import annotations

from tktune.core.config import Config

# Blocks that take their tiles by stride wait for the latest rows of all.
_STRIDE = 1.10
# Rows that threads load by index reach the tensor cores more slowly than tiles of the copy engine.
_INDEXED = 1.14
# Bytes/s at which gathered rows are stored, and read again, past the operands of the GEMM.
GATHERED_AGAIN = 5.3e12
# By order, beside fetching by token: rows of the first tiles come first, or compute blocks bring some.
_ORDERS = {"slot": 0.926, "mixed": 0.982, "beside": 0.938}
_STAGED = 1.06  # pushed rows that are gathered are stored once more
_RASTER = 0.009  # a row tile less that advances before the column


def compute_us(config: Config, alone_us: float, gathered_bytes: float) -> float:
    """Microseconds of all tiles, which take `alone_us` with every row there, while `gathered_bytes` of rows are stored beside."""
    indexed = config.get("ACTIVATIONS") == "indexed"
    us = alone_us * (_STRIDE if config["DRAW"] == "stride" else 1.0) * (_INDEXED if indexed else 1.0)
    us *= 1 + _RASTER * config.number("raster_rows")
    return us if indexed else us + 1e6 * gathered_bytes / GATHERED_AGAIN


def order_factor(config: Config) -> float:
    """By which the time of the whole differs from that of fetching by token."""
    staged = config.get("TRANSPORT") == "push" and config.get("ACTIVATIONS") != "indexed"
    return _ORDERS.get(str(config["order"]), 1.0) * (_STAGED if staged else 1.0)
