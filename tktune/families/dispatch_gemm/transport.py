"""Who moves the rows of a dispatch, as data: the parameter, the roles, and how fast each way is. Pure."""

from __future__ import annotations

from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.errors import ProblemError
from tktune.core.roles import Role, Wait
from tktune.core.space import Parameter
from tktune.families.grouped_gemm import space_cuda
from tktune.families.link_model import LinkFacts

# `push` is built, checked and timed like any other form; studies do not try it as long as `Operator.plan` makes no
# push tables on the device.
TRANSPORT = Parameter(
    "TRANSPORT",
    ("pull",),
    "build",
    "rows are fetched by the rank that wants them (pull), or stored there by the rank that has them (push)",
)
CODES = {"pull": 0, "push": 1}
PCIE_PULL = 0.5  # of what pushes reach, all ranks at once (research/fused_kernels.md §1.3)


def is_push(config: Config) -> bool:
    return config.get("TRANSPORT") == "push"


def is_indexed(config: Config) -> bool:
    return config.get("ACTIVATIONS") == "indexed"


def refuse_push(config: Config) -> None:
    """Raise `ProblemError` for a config that pushes, where plans are built on the device: those have no push tables yet."""
    if is_push(config):
        raise ProblemError(
            "This config pushes its rows, and plans that are built on the device have no tables for that yet.",
            "Use a config with TRANSPORT=pull.",
        )


def push_sms(config: Config, communicating: int) -> int:
    """Of the SMs that communicate, those that push before they scatter, where rows are gathered: a quarter unless said."""
    given = config.number("push_sms") if "push_sms" in config else (communicating + 3) // 4
    return min(given, communicating)


def roles(config: Config, compute: int, communicate: int) -> tuple[Role, ...]:
    """Compute waits for rows; whoever brings them, here or on a peer, drains one queue, then computes.

    A peer waits for blocks that push, so those hold their seats whatever else is launched, and wait for nothing. By
    index its gate waits for them; gathered, its blocks that scatter do, where its gate waits for those.
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
    return (
        Role("gemm", compute, (Wait("arrivals", "scatter"),)),
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
    """Bytes a second that rows of all ranks at once get through the link, where it was not measured."""
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
