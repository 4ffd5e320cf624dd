"""Who moves the rows of a dispatch, as data: the parameter and its rules, the roles, and how fast each way is. Pure."""

from __future__ import annotations

import dataclasses

from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.core.roles import Role, Wait
from tktune.core.space import Constraint, Parameter
from tktune.families.grouped_gemm import space_cuda
from tktune.families.link_model import LinkFacts

TRANSPORT = Parameter(
    "TRANSPORT",
    ("pull", "push"),
    "build",
    "rows are fetched by the rank that wants them (pull), or stored there by the rank that has them (push)",
    absent="pull",
)
CODES = {"pull": 0, "push": 1}
PCIE_PULL = 0.5  # of what pushes reach, all ranks at once (research/fused_kernels.md §1.3)


def is_push(config: Config) -> bool:
    return config.get("TRANSPORT") == "push"


def is_indexed(config: Config) -> bool:
    return config.get("ACTIVATIONS") == "indexed"


def parameter(problem: Problem) -> Parameter:
    """One rank alone has nobody to push to."""
    return TRANSPORT if problem.world > 1 else dataclasses.replace(TRANSPORT, values=("pull",))


def rules(indexed: bool) -> list[Constraint]:
    """`indexed`: where rows may be loaded by index."""
    over = ("order", "TRANSPORT", *(("ACTIVATIONS",) if indexed else ()))
    return [
        Constraint(
            "staged_rows_come_first", "rows that are staged are scattered by blocks of their own", _late, over
        )
    ]


def _late(config: Config, problem: Problem, device: DeviceClass) -> str | None:
    if not is_push(config) or is_indexed(config) or config["order"] not in ("slot", "mixed"):
        return None
    return "compute blocks that open would wait for what peers push, and win nothing"


def push_sms(config: Config, communicating: int) -> int:
    """Of the SMs that communicate, those that push before they scatter, where rows are gathered: a quarter unless said."""
    given = config.number("push_sms") if "push_sms" in config else (communicating + 3) // 4
    return min(given, communicating)


def roles(config: Config, compute: int, communicate: int) -> tuple[Role, ...]:
    """Compute waits for rows; whoever brings them, here or on a peer, drains one queue, then computes.

    A peer waits for blocks that push, so those hold their seats whatever else is launched, and wait for nothing. By
    index its gate waits for them; gathered, its blocks that scatter do, where its gate waits for those. Compute blocks
    that open scatter too before they compute.
    """
    if not is_push(config):
        return (
            Role("gemm", compute, (Wait("arrivals", "dispatch"),)),
            Role("dispatch", communicate, resident=False, becomes="gemm", drains=True),
        )
    if is_indexed(config):
        return (
            Role("gemm", compute, (Wait("flag", "push", "peer"),)),
            Role("push", communicate, becomes="gemm", drains=True),
        )
    first = push_sms(config, communicate)
    scatter = communicate - first
    opening = config.get("opening", int(config.get("order", "token") != "token"))
    opens = (Wait("flag", "push", "peer"),) if opening else ()
    return (
        Role("gemm", compute, (*opens, Wait("arrivals", "scatter"))),
        Role("push", first, becomes="scatter", drains=True),
        Role(
            "scatter",
            scatter or first,
            (Wait("flag", "push", "peer"),),
            becomes="gemm",
            drains=True,
            taken_up=not scatter,
        ),
    )


def link_bytes(config: Config, device: DeviceClass) -> float:
    """Bytes a second that rows of all ranks at once get through the link, where it was not measured. Over PCIe a load waits for
    its answer, and a store for none.
    """
    link = space_cuda.LINK_BYTES.get(device.interconnect, space_cuda.LINK_BYTES["pcie"])
    return link if is_push(config) or device.interconnect == "nvlink" else PCIE_PULL * link


def indexed_us(
    config: Config, link: LinkFacts, remote_bytes: float, row_bytes: int, sms: int
) -> float | None:
    """Microseconds until `sms` SMs have brought `remote_bytes` of rows, each stored once; None where not measured."""
    if not is_push(config):
        return link.gather_us(remote_bytes, 0.0, row_bytes, 1.0, sms)
    rate = link.stored_gb_s("push", sms, 1.0, row_bytes)
    return None if rate is None else remote_bytes / rate / 1e3 + (link.round_trip_us or 0.0)


def staged_us(
    link: LinkFacts, remote_bytes: float, gathered_bytes: float, row_bytes: float, fan: float, sms: int
) -> float | None:
    """Microseconds until `sms` SMs have pushed `remote_bytes` of rows and stored all rows that are here, `gathered_bytes`,
    `fan` times each: the longer of what the link takes and what the SMs take for both, as if all were near.
    """
    far = link.stored_gb_s("push", sms, 1.0, row_bytes)
    once = link.stored_gb_s("scatter_own", sms, 1.0, row_bytes)
    near = link.stored_gb_s("scatter_own", sms, fan, row_bytes)
    if far is None or once is None or near is None:
        return None
    moving = max(remote_bytes / far, remote_bytes / once + gathered_bytes / near) / 1e3
    return moving + (link.round_trip_us or 0.0)
