"""One rank's place among ranks on the CPU backend: the verified kernel, symmetric memory, its waits, and what all ranks
decide together.
"""

from __future__ import annotations

import ctypes
import hashlib
from pathlib import Path
from typing import Any

import torch

from tktune.core.errors import ArtifactError, LaunchFailed, ProblemError, RoutingError, TktuneError
from tktune.core.problem import Problem
from tktune.families import abi
from tktune.families.abi import CpuKernel, Globals, Machine
from tktune.families.control_page import SLOT_BYTES, ControlPage
from tktune.families.parallel_tensor import ParallelTensor
from tktune.runtime.agree import unanimous

NO_EXPERT = -1  # an id that picks none, of tokens that are not there


class CpuSeat:
    """This rank of `group` (None: alone) with `nbytes` of symmetric memory and `seats` for blocks. Making it is collective.

    Raises `ArtifactError` for a file at `path` that has not this SHA-256, `RanksDisagree` where that is another rank's.
    """

    def __init__(
        self, group: Any, path: Path, sha256: str, nbytes: int, seats: int, spin_limit_s: float
    ) -> None:
        self._group, self.rank = group, 0
        if group is not None:
            import torch.distributed as dist

            self.rank = dist.get_rank(group)
        self.all_or_none(_changed(path, sha256), "artifacts")
        self._kernel = CpuKernel(path)
        if group is None:
            self.memory = ParallelTensor.attach(ParallelTensor.create_fds(1, nbytes), 0, nbytes)
        else:
            self.memory = ParallelTensor.from_group(group, nbytes)
        self._control = ControlPage.create(1)
        self._sequence = 0
        self._machine = Machine(
            seats=seats,
            spin_limit_ns=round(spin_limit_s * 1e9),
            abort_word=self._control.abort_address,
            report=self._control.address(0),
        )

    @property
    def alone(self) -> bool:
        return self._group is None

    # Launches.

    def next_sequence(self) -> int:
        self._sequence += 1
        return self._sequence

    def launch(self, g: Globals) -> None:
        """Raises `LaunchFailed`."""
        self._raise_unless_done(self._kernel.launch(g, self._machine).end)

    def barrier(self, g: Globals) -> None:
        """Raises `LaunchFailed`."""
        self._raise_unless_done(self._kernel.barrier(g, self._machine, self.next_sequence()))

    def _raise_unless_done(self, end: int) -> None:
        if end == abi.DONE:
            return
        report = self._control.report(0)
        ctypes.memset(self._control.address(0), 0, SLOT_BYTES)
        if report is not None:
            raise LaunchFailed(
                f"{report.sentence} It gave up.", "Look at that rank's own error, then load again."
            )
        abi.raise_unless_done(end, self.rank)

    # Among ranks.

    def all_or_none(self, failure: TktuneError | None, subject: str = "plans") -> None:
        """Raise on every rank when one has a failure. Collective."""
        if self._group is not None:
            unanimous(self._group, subject, "", failure)
        elif failure is not None:
            raise failure

    def gathered(self, mine: torch.Tensor) -> torch.Tensor:
        """Everybody's, in rank order along a new first dimension. Collective."""
        mine = mine.contiguous()
        if self._group is None:
            return mine[None]
        import torch.distributed as dist

        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(everyone, mine, group=self._group)
        return torch.stack(everyone)

    def close(self) -> None:
        """End the kernel's threads and let the symmetric memory go. Not collective: a dead peer cannot hold it up."""
        self._kernel.close()
        self._group = None
        self.memory.close()
        self._control.close()


def _changed(path: Path, sha256: str) -> ArtifactError | None:
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        return ArtifactError(f"{path} cannot be read: {error.strerror}.", "Build it again.")
    if found != sha256:
        return ArtifactError(f"{path} changed while it was loaded.", "Run `tktune cache verify`.")
    return None


def check_ids(topk_ids: torch.Tensor, shape: tuple[int, ...], problem: Problem, lowest: int = 0) -> None:
    """Raise `RoutingError` for ids of another shape, outside `lowest`..experts − 1, or twice in a token.

    With `lowest` = `NO_EXPERT`, that may stand any number of times.
    """
    if tuple(topk_ids.shape) != shape:
        raise RoutingError(
            f"topk_ids is {tuple(topk_ids.shape)}, and the problem asks for {shape}.",
            "Pass global expert ids of that shape.",
        )
    if bool((topk_ids < lowest).any() or (topk_ids >= problem.experts).any()):
        raise RoutingError(f"topk_ids holds ids outside 0..{problem.experts - 1}.", "Use global expert ids.")
    ordered = topk_ids.sort(dim=-1).values
    if bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != NO_EXPERT)).any()):
        raise RoutingError("topk_ids names an expert twice for one token.", "A token picks distinct experts.")


def expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise `ProblemError` unless `tensor` is contiguous bf16 of `shape`."""
    if tuple(tensor.shape) != shape or tensor.dtype != torch.bfloat16 or not tensor.is_contiguous():
        raise ProblemError(
            f"{name} is {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            f"{'' if tensor.is_contiguous() else ', not contiguous'}, and the operator takes {shape} bfloat16, contiguous."
        )


def weights_shape(problem: Problem) -> tuple[int, ...]:
    """Of the weights of a rank's experts."""
    ekn = problem.weight_layout == "ekn"
    matrix = (problem.hidden, problem.cols) if ekn else (problem.cols, problem.hidden)
    return problem.local_experts, *matrix


def point(g: Globals, tables: Any) -> None:
    """Let a launch read the schedule tables."""
    for name in ("pull_indices", "block_expert", "block_rows", "pull_tokens", "pull_slots"):
        setattr(g, name, getattr(tables, name).data_ptr())
    g.num_pad_blocks, g.num_pull_tokens = tables.num_pad_blocks, tables.pull_tokens.shape[0]
