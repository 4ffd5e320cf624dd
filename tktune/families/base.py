"""What a family is: the pure description of one tunable kernel, and the rank-side workbench that runs it.

Built-in families live in folders beside this file; a user's own is named in a study as "module:ATTRIBUTE".
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tktune.core.build_spec import BuildSpec
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.errors import WordsError
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.core.roles import RoleModel
from tktune.core.space import Space

BUILT_IN = {
    "grouped_gemm": "tktune.families.grouped_gemm.space:FAMILY",
    "dispatch_gemm": "tktune.families.dispatch_gemm.space:FAMILY",
    "gemm_combine": "tktune.families.gemm_combine.space:FAMILY",
    "moe_layer": "tktune.moe.space:FAMILY",
}

# What a timed launch runs. fused: everything. comp: compute alone on all SMs, data in place. comm: the same
# artifact with an empty GEMM role. serial: communication on all SMs, then compute on all SMs. peer: the fastest
# library GEMM on the same rows, in the same harness.
MODES = ("fused", "comp", "comm", "serial", "peer")


class Family(Protocol):
    """The pure half: importable without torch, numpy or a compiler."""

    name: str

    def space(self, problem: Problem, device: DeviceClass) -> Space: ...

    def roles(self, config: Config, problem: Problem, device: DeviceClass) -> RoleModel: ...

    def cost_us(self, config: Config, problem: Problem, device: DeviceClass) -> float:
        """An analytic estimate in microseconds; it only ranks and seeds, it never judges."""
        ...

    def build_spec(self, build_part: Config, problem: Problem, device: DeviceClass) -> BuildSpec: ...

    def workbench(self, seat: RankSeat) -> Workbench:
        """The rank-side half; imports numpy or torch and the backend's driver."""
        ...


@dataclass(frozen=True)
class RankSeat:
    """Where a rank sits in its gang: what it measures, with whom, and the memory it shares.

    `symmetric_fds[r]` is a memfd that rank r's symmetric buffers live in (all ranks map all of them).
    `control_fd` is the driver-owned memfd with the abort word and one spin report a rank
    (`tktune.families.control_page`). `spin_limit_s` bounds every wait inside a kernel. `device_index` is the number
    of the rank's device on this host; -1 stands for its rank.
    """

    problem: Problem
    device: DeviceClass
    policy: Policy
    rank: int
    world: int
    symmetric_fds: tuple[int, ...]
    control_fd: int
    spin_limit_s: float = 2.0
    device_index: int = -1

    def __post_init__(self) -> None:
        if self.device_index < 0:
            object.__setattr__(self, "device_index", self.rank)


@dataclass(frozen=True)
class GateResult:
    """The verdict of one correctness gate on one rank.

    `worst_error` is ‖out − ref‖ ÷ ‖ref‖ over real rows, `tolerance` what dtype and K allow; `sentence` names
    the first rows that differ. `passed` is false for NaN.
    """

    passed: bool
    worst_error: float
    tolerance: float
    sentence: str = ""


class Workbench(Protocol):
    """The rank-side half of a family, alive for one gang. Every method runs on all ranks at once.

    `sequence` is the first of a block of monotone sequence numbers the driver reserved for this command; all
    ranks receive the same one. Methods raise `LaunchFailed` when a launch is aborted or out of its spin limit,
    and any other exception for anything else; the rank's command loop turns each into one reply.
    """

    def load(self, artifact: Path, sha256: str, build_part: Config) -> dict[str, Any]:
        """Verify and open the artifact, size the workspace. Returns facts the artifact states of itself."""
        ...

    def gate(self, config: Config, routing: str, seed: int, sequence: int) -> GateResult:
        """Fresh inputs for (routing, seed), outputs poisoned with NaN, one launch, compare with an fp32 reference."""
        ...

    def time(self, config: Config, mode: str, seed: int, iterations: int, sequence: int) -> list[float]:
        """Microseconds of `iterations` launches on this rank: start barrier, flush by policy, one sample each."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class FamilyFacts:
    """What `tktune studies` shows of a family."""

    name: str
    purpose: str
    parameters: tuple[str, ...] = field(default=())


def family(name: str) -> Family:
    """The family called `name`, or imported from "module:ATTRIBUTE". Raises `WordsError` when there is none."""
    target = BUILT_IN.get(name, name)
    module_name, _, attribute = target.partition(":")
    if not attribute:
        raise WordsError(
            f"There is no family called {name!r}.",
            f"Use one of: {', '.join(BUILT_IN)}, or your own as 'module:ATTRIBUTE'.",
        )
    try:
        found: Family = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise WordsError(
            f"The family {name!r} cannot be imported: {error}.", "Check the module path."
        ) from error
    return found
