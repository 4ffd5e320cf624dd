"""How the examples start: their options, two processes, and the meeting of both."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tktune.core.sharing import VARIABLE, may_share

WORLD = 2


def options(what: str | None, **sizes: int) -> argparse.Namespace:
    """Sizes from the command line, and the device that both ranks run on: GPUs where there are two, or one that they may
    share (TKTUNE_SHARE_GPU=1)."""
    parser = argparse.ArgumentParser(description=what, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    gpus = torch.cuda.device_count()
    found = "cuda" if gpus >= (1 if may_share() else WORLD) else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=found)
    shape = parser.parse_args()
    if shape.device == "cuda" and found == "cpu":
        parser.error(f"fewer than two GPUs answer here; use --device cpu, or {VARIABLE}=1 to share one")
    if min(getattr(shape, name) for name in sizes) < 1:
        parser.error("every size is at least 1")
    return shape


def start(run: Callable[[int, argparse.Namespace, str], None], shape: argparse.Namespace) -> None:
    """`run` in a process a rank, with the file at which both meet."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, args=(shape, f"{folder}/rendezvous"), nprocs=WORLD)


def meet(rank: int, shape: argparse.Namespace, rendezvous: str) -> torch.device:
    """Join the process group; this rank's device."""
    torch.set_num_threads(1)
    if shape.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    cuda = shape.device == "cuda"
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
