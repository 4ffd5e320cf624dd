"""Roles and the deadlock rules D1–D8 (research: residency rules of persistent kernels), checked on a declared
model before anything is launched.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Wait:
    """One thing a role waits for: the word it polls, and the role (here or on a peer) that supplies it."""

    word: str
    supplier: str
    scope: Literal["local", "peer"] = "local"


@dataclass(frozen=True)
class Role:
    """Blocks of one launch that do the same thing.

    `resident` roles hold their seat until the launch ends; others give it back, so that seats rotate.
    `becomes` names a role that its blocks take up once their own work is done.
    """

    name: str
    blocks: int
    waits: tuple[Wait, ...] = ()
    resident: bool = True
    becomes: str | None = None


@dataclass(frozen=True)
class RoleModel:
    """All roles of one launch on one rank, and the seats it may count on.

    `resident_blocks` is queried SMs × occupancy − reserve. `spin_limit_s` bounds every wait (0 = unbounded).
    `sm_reserve` seats are left to other work on the device. `auxiliary_grid` is the grid of any other kernel
    that spins on this device at the same time.
    """

    roles: tuple[Role, ...]
    resident_blocks: int
    spin_limit_s: float
    world: int = 1
    sm_reserve: int = 0
    auxiliary_grid: int = 0
    protocol: tuple[str, ...] = field(default=())

    def role(self, name: str) -> Role | None:
        return next((role for role in self.roles if role.name == name), None)


@dataclass(frozen=True)
class BrokenRule:
    """A rule by name, and the sentence that says what breaks it."""

    rule: str
    sentence: str


def broken_rules(model: RoleModel) -> list[BrokenRule]:
    """Every deadlock rule that `model` breaks; empty when it can always finish.

    D1: blocks that may wait on blocks of the same launch are fewer than the resident blocks, unless all blocks
    of the launch are seated at once. D2: every role that is waited for has a block. D3: the wait graph over
    (rank, role) is acyclic and each wait names a supplier that exists. D4: a spinning auxiliary kernel leaves
    two SMs. D8: every wait is bounded.
    """
    broken: list[BrokenRule] = []
    total = sum(role.blocks for role in model.roles)
    waiting = sum(role.blocks for role in model.roles if any(w.scope == "local" for w in role.waits))
    if total > model.resident_blocks and waiting >= model.resident_blocks:
        broken.append(
            BrokenRule(
                "D1",
                f"{waiting} blocks may wait for others while {model.resident_blocks} can be resident and "
                f"{total} are launched: those they wait for may never get a seat",
            )
        )
    if total > model.resident_blocks and any(r.resident and r.blocks for r in model.roles if not r.waits):
        suppliers = [r.name for r in model.roles if r.resident and r.blocks and not r.waits]
        broken.append(
            BrokenRule(
                "D2",
                f"{total} blocks are launched and {model.resident_blocks} can be resident, but "
                f"{', '.join(suppliers)} must be resident from the start",
            )
        )
    for role in model.roles:
        if role.blocks < 1:
            broken.append(BrokenRule("D2", f"the role {role.name} has no block"))
        for wait in role.waits:
            if model.role(wait.supplier) is None:
                broken.append(
                    BrokenRule(
                        "D3",
                        f"{role.name} waits for {wait.word} and no role called {wait.supplier} supplies it",
                    )
                )
    cycle = _cycle(model)
    if cycle:
        broken.append(BrokenRule("D3", f"roles wait in a circle: {' → '.join(cycle)}"))
    if model.auxiliary_grid and model.auxiliary_grid > model.resident_blocks - 2:
        broken.append(
            BrokenRule(
                "D4",
                f"an auxiliary kernel of {model.auxiliary_grid} spinning blocks leaves fewer than two of "
                f"{model.resident_blocks} seats",
            )
        )
    if model.spin_limit_s <= 0:
        broken.append(BrokenRule("D8", "waits have no spin limit"))
    return broken


def _cycle(model: RoleModel) -> list[str]:
    """A circle in the wait graph over roles (peers run the same roles, so scope does not matter), or []."""
    edges = {role.name: [w.supplier for w in role.waits if model.role(w.supplier)] for role in model.roles}
    state: dict[str, int] = {}
    path: list[str] = []

    def visit(name: str) -> list[str]:
        state[name] = 1
        path.append(name)
        for supplier in edges[name]:
            if state.get(supplier) == 1:
                return [*path[path.index(supplier) :], supplier]
            if supplier not in state:
                found = visit(supplier)
                if found:
                    return found
        path.pop()
        state[name] = 2
        return []

    for name in edges:
        if name not in state:
            found = visit(name)
            if found:
                return found
    return []
