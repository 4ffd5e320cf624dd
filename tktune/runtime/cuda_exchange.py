"""What ranks of a process group share beside their GPUs: small files, through which they speak without the group, so
that a rank that died cannot hold the others up; and that no two of them sit on one GPU.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from pathlib import Path
from typing import Any

import torch

from tktune.core.errors import GangError, ProblemError, TktuneError, WordsError
from tktune.core.sharing import VARIABLE, may_share
from tktune.runtime.agree import decided_by_rank_zero, unanimous


def shared_files(group: Any) -> tuple[int, ...]:
    """A file of each rank of `group`, open in all of them, as descriptors in rank order; None stands for one rank alone.

    They have no name any more, so nothing is left behind however ranks end. Collective. Raises `GangError` or
    `RanksDisagree` on every rank when one of them cannot make or open a file. The caller closes them.
    """
    if group is None:
        return (os.memfd_create("tktune-rank-0"),)
    import torch.distributed as dist

    rank, world = dist.get_rank(group), dist.get_world_size(group)
    token = decided_by_rank_zero(group, lambda: secrets.token_hex(16))
    shm = Path("/dev/shm")
    folder = shm if os.access(shm, os.W_OK) else Path(tempfile.gettempdir())
    names = [folder / f"tktune-{token}-{r}" for r in range(world)]
    opened: list[int] = []
    try:
        with _removed_at_last(names[rank]):
            _all_or_none(group, [names[rank]], os.O_CREAT | os.O_EXCL, opened)
            mine = opened.pop()
            os.close(mine)
            _all_or_none(group, names, 0, opened)
    except TktuneError:
        for fd in opened:
            os.close(fd)
        raise
    return tuple(opened)


def _all_or_none(group: Any, names: list[Path], flags: int, opened: list[int]) -> None:
    failure: TktuneError | None = None
    try:
        for name in names:
            opened.append(os.open(name, os.O_RDWR | os.O_CLOEXEC | flags, 0o600))
    except OSError as error:
        failure = GangError(
            f"Ranks cannot share files in {names[0].parent}: {error.strerror}.",
            "All ranks must run on one host, as one user.",
        )
    unanimous(group, "shared files", "", failure)


@contextlib.contextmanager
def _removed_at_last(name: Path) -> Any:
    try:
        yield
    finally:
        name.unlink(missing_ok=True)


def each_on_its_own_gpu(group: Any, index: int) -> None:
    """Raise `ProblemError` on every rank when two ranks of `group` use one GPU, since their kernels wait for each other; not
    where all of them may take turns (`tktune.core.sharing`). Collective.
    """
    if group is None:
        return
    import torch.distributed as dist

    try:
        shares = may_share()
    except WordsError:  # a rank that raised here alone would be waited for
        shares = False
    mine = (str(torch.cuda.get_device_properties(index).uuid), shares)
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    if all(may for _, may in everyone):
        return
    uuids = [uuid for uuid, _ in everyone]
    for rank, uuid in enumerate(uuids):
        first = uuids.index(uuid)
        if first != rank:
            raise ProblemError(
                f"Ranks {first} and {rank} use the same GPU.",
                "Call torch.cuda.set_device with a GPU of its own on each rank before tktune.load; to check results "
                f"where there are too few, set {VARIABLE}=1 on all ranks.",
            )
