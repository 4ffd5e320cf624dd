"""Roles and the deadlock rules D1–D8 (research: residency rules of persistent kernels), checked on a declared
model before anything is launched.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    `resident` blocks hold their seat as long as any wait of the launch may last; the others never wait and give
    it back when their own work is done, so that seats rotate.
    `becomes` names a role that its blocks take up once their own work is done. Blocks of a role that `drains`
    draw from one queue: none leaves it before all of the role's work is with a seated block.
    Nobody starts in a role that is `taken_up`: its blocks come from roles that lead to it, and count there.
    """

    name: str
    blocks: int
    waits: tuple[Wait, ...] = ()
    resident: bool = True
    becomes: str | None = None
    drains: bool = False
    taken_up: bool = False


RULES = {
    "D1": "blocks that may wait for blocks of the same launch are fewer than the resident blocks, unless all are seated",
    "D2": "every role has a block, and roles that hold their seats to the end all fit",
    "D3": "the wait graph over (rank, role) has no circle, and each wait names a supplier that exists",
    "D4": "an auxiliary kernel that spins leaves two seats",
    "D5": "all ranks run the same roles under the same wire protocol",
    "D6": "nothing allocates, compiles or loads while a role spins",
    "D7": "seats taken by other work on the device are not counted on",
    "D8": "every wait is bounded",
}


@dataclass(frozen=True)
class RoleModel:
    """All roles of one launch on one rank, and the seats it may count on.

    `resident_blocks` is queried SMs × occupancy − reserve. `spin_limit_s` bounds every wait (0 = unbounded).
    `sm_reserve` seats are left to other work on the device. `auxiliary_grid` is the grid of any other kernel
    that spins on this device at the same time. `queried_blocks` is what the device can seat now (0 = not asked
    again since `resident_blocks` was computed). `preloaded` says that everything is loaded and sized before the
    first wait. `protocol` lists, as NAME=value, what must be equal on all ranks.
    """

    roles: tuple[Role, ...]
    resident_blocks: int
    spin_limit_s: float
    world: int = 1
    sm_reserve: int = 0
    auxiliary_grid: int = 0
    protocol: tuple[str, ...] = field(default=())
    queried_blocks: int = 0
    preloaded: bool = True

    def role(self, name: str) -> Role | None:
        return next((role for role in self.roles if role.name == name), None)

    def may_wait(self, role: Role) -> bool:
        """Whether a block of `role` may wait while its role still has work that no seated block holds: in its own
        work, or in a role that it takes up before its first role is drained.
        """
        later: Role | None = role
        seen: set[str] = set()
        while later is not None and later.name not in seen:
            if later.waits:
                return True
            seen.add(later.name)
            later = self.role(later.becomes) if later.becomes and not later.drains else None
        return False


@dataclass(frozen=True)
class BrokenRule:
    """A rule by name, and the sentence that says what breaks it."""

    rule: str
    sentence: str


def broken_rules(model: RoleModel) -> list[BrokenRule]:
    """Every deadlock rule of `RULES` that `model` breaks on its own; empty when it can always finish.

    D5 compares ranks: see `broken_between_ranks`.
    """
    broken = [*_seats(model), *_waits(model)]
    if model.auxiliary_grid and model.auxiliary_grid > model.resident_blocks - 2:
        broken.append(
            BrokenRule(
                "D4",
                f"an auxiliary kernel of {model.auxiliary_grid} spinning blocks leaves fewer than two of "
                f"{model.resident_blocks} seats",
            )
        )
    waits = any(role.waits for role in model.roles)
    if waits and not model.preloaded:
        broken.append(
            BrokenRule("D6", "something is loaded, compiled or allocated after the first wait may start")
        )
    if model.queried_blocks and model.resident_blocks + model.sm_reserve > model.queried_blocks:
        broken.append(
            BrokenRule(
                "D7",
                f"the launch counts on {model.resident_blocks} seats beside {model.sm_reserve} reserved ones, "
                f"and the device now seats {model.queried_blocks}",
            )
        )
    if waits and model.spin_limit_s <= 0:
        broken.append(BrokenRule("D8", "waits have no spin limit"))
    return broken


def broken_between_ranks(models: Sequence[RoleModel]) -> list[BrokenRule]:
    """D5: what differs between the models of all ranks, in rank order."""
    broken = []
    for rank, model in enumerate(models[1:], start=1):
        first = models[0]
        if [role.name for role in model.roles] != [role.name for role in first.roles]:
            broken.append(BrokenRule("D5", f"rank {rank} runs other roles than rank 0"))
        differ = sorted(set(model.protocol) ^ set(first.protocol))
        if differ or model.world != first.world:
            what = ", ".join(differ) or f"world={model.world}"
            broken.append(BrokenRule("D5", f"rank {rank} differs from rank 0 in what the wire shows: {what}"))
    return broken


def _seats(model: RoleModel) -> list[BrokenRule]:
    broken = []
    started = [role for role in model.roles if not role.taken_up]
    total = sum(role.blocks for role in started)
    waiting = sum(role.blocks for role in started if model.may_wait(role))
    holding = sum(role.blocks for role in started if role.resident)
    if total > model.resident_blocks and waiting >= model.resident_blocks:
        broken.append(
            BrokenRule(
                "D1",
                f"{waiting} blocks may wait for others while {model.resident_blocks} can be resident and "
                f"{total} are launched: those they wait for may never get a seat",
            )
        )
    if waiting and holding > model.resident_blocks:
        broken.append(
            BrokenRule(
                "D2",
                f"{holding} blocks hold their seats to the end and {model.resident_blocks} can be resident: "
                "the others never start",
            )
        )
    for role in model.roles:
        if role.blocks < 1:
            broken.append(BrokenRule("D2", f"the role {role.name} has no block"))
    return broken


def _waits(model: RoleModel) -> list[BrokenRule]:
    broken = []
    for role in model.roles:
        suppliers = [(f"waits for {wait.word}", wait.supplier) for wait in role.waits]
        if role.becomes:
            suppliers.append(("becomes another role", role.becomes))
        for what, name in suppliers:
            if model.role(name) is None:
                broken.append(BrokenRule("D3", f"{role.name} {what} and there is no role called {name}"))
    cycle = _cycle(model)
    if cycle:
        broken.append(BrokenRule("D3", f"roles wait in a circle: {' → '.join(cycle)}"))
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
