"""`tktune.lookup`: from a problem to the config to run. Reads the store, never tunes, compiles or waits.

Imports neither torch, numpy, Optuna nor Alembic (and SQLAlchemy only for PostgreSQL): a first lookup is quick, a
repeated one is one dictionary access.
"""

from __future__ import annotations

import dataclasses
import warnings
from os import PathLike, fspath
from typing import Any

from tktune.core.device import DeviceClass, device_class
from tktune.core.errors import DatabaseError, NothingFeasible
from tktune.core.paths import database_url
from tktune.core.problem import Problem
from tktune.core.sharing import may_share
from tktune.core.space import Space
from tktune.families.base import Family, family
from tktune.runtime.choice import Choice, default_choice, exact_choice, near_choice
from tktune.store.location import place
from tktune.store.reader import Reader, reader
from tktune.store.rows import WinnerRow
from tktune.store.winners import winners_near, wrong_configs

PADS = (128, 64, 32, 16, 8)


class Lookup:
    """Find the config to run for a problem, without tuning.

    >>> import tktune
    >>> choice = tktune.lookup("grouped_gemm", hidden=64, cols=64, experts=4, top_k=2, tokens=64, device="cpu")
    >>> choice.provenance in ("exact", "near", "default")
    True

    Each answer is kept for the life of the process under the arguments as they were given, so that a program
    never changes its config half-way; `lookup.cache_clear()` forgets them all (after tuning, or when `TKTUNE_DB`
    changed). See `__call__` for the arguments.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[Any, ...], Choice] = {}
        self._warned: set[str] = set()

    def __call__(
        self,
        family: str,
        *,
        hidden: int,
        cols: int,
        experts: int,
        top_k: int,
        tokens: int,
        world: int = 1,
        dtype: str = "bf16",
        weight_layout: str = "ekn",
        routing: str = "uniform",
        pad: int | None = None,
        policy: str = "serving",
        device: DeviceClass | str | None = None,
        db: str | PathLike[str] | None = None,
        ep_world: int | None = None,
        ep_rank: int | None = None,
        finish: str = "none",
    ) -> Choice:
        """The choice for a problem: "exact", else "near" (tokens within 4 ×, constraints re-checked), else "default".

        `pad` None: whichever stored pad was fastest, 128 for the default config. `policy` is a policy's name.
        `device` is a device class or its name; None is this host's first GPU, or its CPU. `db` is a SQLAlchemy
        URL or a path; None is `TKTUNE_DB` or the default place. A missing database answers "default"; an
        unreadable one does too, with one warning. A problem without an exact winner leaves a `wanted` row,
        but where ranks may share GPUs (`tktune.core.sharing`).

        Raises `ProblemError`, `RoutingError`, `DeviceAbsent` or `WordsError` for words that cannot be meant, and
        `NothingFeasible` where no config fits.
        """
        asked = (
            family, hidden, cols, experts, top_k, tokens, world, dtype, weight_layout, routing, pad, policy, device,
            db, ep_world, ep_rank, finish,
        )  # fmt: skip
        try:
            return self._kept[asked]
        except (KeyError, TypeError):  # TypeError: an unhashable argument, which the problem refuses in words
            pass
        problem = Problem(
            family, hidden, cols, experts, top_k, tokens, world, dtype, weight_layout, routing,
            PADS[0] if pad is None else pad, ep_world, ep_rank, finish,
        )  # fmt: skip
        url = database_url() if db is None else fspath(db)
        choice = self._find(problem, pad is None, policy, _device(device), url)
        self._kept[asked] = choice
        return choice

    def cache_clear(self) -> None:
        """Forget every answer, so that the next call reads the database again."""
        self._kept.clear()
        self._warned.clear()

    def _find(self, asked: Problem, any_pad: bool, policy: str, device: DeviceClass, url: str) -> Choice:
        found = _Finding(asked, any_pad, policy, device)
        try:
            with reader(url) as opened:
                if opened is None:
                    return found.default(f"No database has been made yet at {place(url).shown}.", None)
                choice = found.best(opened)
                if choice.provenance != "exact" and not _only_checks(device):
                    opened.want(choice.problem, device, policy)
                return choice
        except DatabaseError as error:
            if url not in self._warned:
                self._warned.add(url)
                warnings.warn(f"tktune uses default configs: {error}", RuntimeWarning, stacklevel=3)
            return found.default(f"The database could not be read: {error}", None)


lookup = Lookup()


class _Finding:
    """One lookup under way: what was asked, and the sentences on what had to be left out."""

    def __init__(self, asked: Problem, any_pad: bool, policy: str, device: DeviceClass) -> None:
        self.asked = asked
        self.any_pad = any_pad
        self.policy = policy
        self.device = device
        self.family: Family = family(asked.family)
        self.left_out: list[str] = []

    def best(self, opened: Reader) -> Choice:
        stored = winners_near(opened.rows, self.asked, self.device, self.policy)
        for row in stored:  # the same tokens come first, the fastest pad first among them
            if not self.any_pad and row.problem.pad != self.asked.pad:
                continue
            exact = row.problem.tokens == self.asked.tokens
            target = self.asked.replace(pad=row.problem.pad)
            space = self.family.space(target, self.device)
            row = dataclasses.replace(row, config=space.completed(row.config))
            if not self._runs(row, space, None if exact else opened):
                continue
            if exact:
                return exact_choice(row, self.device)
            return near_choice(row, target, self.device, tuple(self.left_out))
        return self.default(
            f"No winner is stored for this shape within 4 times its tokens under the policy {self.policy}."
            if not self.left_out
            else "No stored winner of this shape can run here.",
            opened,
        )

    def default(self, because: str, opened: Reader | None) -> Choice:
        """The family's default config; with a database, never one that was found wrong on this problem."""
        space = self._first_feasible()
        wrong = wrong_configs(opened.rows, space.problem, self.device) if opened is not None else set()
        config = space.default_config()
        if config.digest in wrong:
            self.left_out.append(
                f"The default config ({config}) was found wrong here, so its neighbour stands in."
            )
            right = [c for c in space.feasible.configs if c.digest not in wrong]
            if not right:
                raise NothingFeasible(
                    f"Every config that fits {space.problem} on {self.device} was found wrong.",
                    "Repair the kernel; a new artifact is judged anew.",
                )
            config = min(right, key=lambda other: space.distance(other, config))
        return default_choice(config, space.problem, self.device, because, tuple(self.left_out))

    def _runs(self, row: WinnerRow, space: Space, judged_by: Reader | None) -> bool:
        """Whether a stored config is of today's space, feasible there, and not known to be wrong there."""
        target = space.problem
        whose = (
            f"The winner at {row.problem.tokens} tokens, pad {row.problem.pad} ({row.config}), was left out"
        )
        if set(row.config) != {p.name for p in space.parameters}:
            self.left_out.append(f"{whose}: its parameters are of another version of {target.family}.")
            return False
        broken = space.broken(row.config)
        if broken:
            constraint, sentence = broken[0]
            self.left_out.append(f"{whose}: it breaks {constraint.name} here ({sentence.rstrip('.')}).")
            return False
        if judged_by is not None and row.config.digest in wrong_configs(judged_by.rows, target, self.device):
            self.left_out.append(f"{whose}: it was found wrong on this problem.")
            return False
        return True

    def _first_feasible(self) -> Space:
        """The space of the asked pad; with the pad left open, of the largest pad that has a feasible config."""
        failure: NothingFeasible | None = None
        for pad in PADS if self.any_pad else (self.asked.pad,):
            space = self.family.space(self.asked.replace(pad=pad), self.device)
            try:
                space.default_config()
            except NothingFeasible as error:
                failure = failure or error
            else:
                return space
        assert failure is not None
        raise failure


def _only_checks(device: DeviceClass) -> bool:
    """Whether ranks may share GPUs, on which nothing that is asked for can be tuned."""
    return device.backend == "cuda" and may_share()


def _device(named: DeviceClass | str | None) -> DeviceClass:
    if isinstance(named, DeviceClass):
        return named
    if named is not None:
        return device_class(named)
    from tktune.core.device_cuda import cuda_device_classes

    gpus = cuda_device_classes()
    return gpus[0] if gpus else device_class("cpu")
