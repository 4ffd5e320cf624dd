"""Ranks agree before they allocate or launch: rank 0 decides, everybody checks, and all raise together.

Speaks through a `torch.distributed` group (gloo or NCCL) and only of short JSON texts.
"""

from __future__ import annotations

import json
from typing import Any

from tktune.core.errors import RanksDisagree, TktuneError


def decided_by_rank_zero(group: Any, decide: Any) -> Any:
    """`decide()` runs on the group's first rank; its JSON result reaches every rank.

    An error of `decide` is raised on every rank as the same sentence, so that nobody waits for a rank that left.
    """
    import torch.distributed as dist

    holder: list[str | None] = [None]
    failure: TktuneError | None = None
    if dist.get_rank(group) == 0:
        try:
            holder[0] = json.dumps({"result": decide()})
        except TktuneError as error:
            failure = error
            holder[0] = json.dumps({"error": error.sentence, "way_out": error.way_out})
    dist.broadcast_object_list(holder, src=dist.get_global_rank(group, 0), group=group)
    if failure is not None:
        raise failure
    message = json.loads(holder[0] or "{}")
    if "error" in message:
        raise RanksDisagree(f"Rank 0 could not decide: {message['error']}", message["way_out"])
    return message["result"]


def unanimous(
    group: Any,
    what: str,
    mine: str,
    failure: TktuneError | None = None,
    way_out: str = "Use one version and one cache on all ranks.",
) -> None:
    """Every rank must say the same `mine` (a digest, say) and none may have failed; otherwise all raise.

    `what` names the thing in the sentence. A rank that failed raises its own error, the others `RanksDisagree`.
    """
    import torch.distributed as dist

    said: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, {"mine": mine, "failure": failure and failure.sentence}, group=group)
    if failure is not None:
        raise failure
    failed = [(rank, s["failure"]) for rank, s in enumerate(said) if s["failure"]]
    if failed:
        rank, sentence = failed[0]
        raise RanksDisagree(
            f"Rank {rank} cannot go on: {sentence}", "Mend that rank; no rank has launched anything."
        )
    if len({s["mine"] for s in said}) > 1:
        spoken = ", ".join(f"rank {rank}: {s['mine'][:16]}" for rank, s in enumerate(said))
        raise RanksDisagree(f"Ranks hold different {what} ({spoken}).", way_out)
