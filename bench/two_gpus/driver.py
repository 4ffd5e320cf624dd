"""The side of a two-GPU bench that holds no device: its common options, the run of its ranks, and the head of its result."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tktune.core.device import DeviceClass
from tktune.core.errors import WordsError
from tktune.core.paths import cache_root
from tktune.core.policy import serving_policy
from tktune.families.control_page import ControlPage
from tktune.gang.rank_process import REMOVED_FROM_ENVIRONMENT
from two_gpus.supervise import Watch, run_ranks

BENCH = Path(__file__).resolve().parents[1]
WORLD = 2
MODES = ("graph", "direct")
SPIN_LIMIT_S = 2.0
STARTING_S = 60.0  # for importing, meeting and leaving, beside --seconds
POLICY = (
    "L2 flushed and all ranks met on the device before each launch; slowest rank of each launch; interleaved rounds; "
    "medians"
)


def add_options(parser: argparse.ArgumentParser, *, modes: str, seconds: float) -> None:
    """Options of every such bench; `modes` and `seconds` are its defaults."""
    parser.add_argument("--db", help="database with winners [default: TKTUNE_DB or the user's own]")
    parser.add_argument("--cache", type=Path, default=cache_root())
    parser.add_argument("--modes", default=modes, help=f"some of {','.join(MODES)}")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=5, help="launches of a round")
    parser.add_argument("--seconds", type=float, default=seconds, help="ranks begin nothing new after this")
    parser.add_argument("--out", type=Path, help="write JSON here")


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments; ends with a sentence and exit code 2 where an option of `add_options` cannot be right."""
    arguments = parser.parse_args()
    modes = arguments.modes.split(",")
    if not set(modes) <= set(MODES):
        parser.error(
            f"--modes is some of {', '.join(MODES)}, with commas between; {arguments.modes!r} is not"
        )
    if min(arguments.rounds, arguments.iterations) < 1 or not arguments.seconds > 0:
        parser.error("--rounds and --iterations are at least 1, and --seconds is more than 0")
    if arguments.out and arguments.out.is_dir():
        parser.error(f"{arguments.out} is a folder; name a file for --out")
    return arguments


def two_of(devices: Sequence[DeviceClass]) -> DeviceClass:
    """The class of the GPUs. Raises `WordsError` where fewer than two answer."""
    if len(devices) < WORLD:
        raise WordsError(
            f"Two GPUs are needed, and {len(devices)} answer here.", "Run this on a host with two."
        )
    return devices[0]


def run(
    script: Path,
    works: Sequence[dict[str, Any]],
    device: DeviceClass,
    arguments: argparse.Namespace,
    **words: Any,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Run `script` as each rank over `works` (`two_gpus.rank.serve`); what each of them found, and what went wrong.

    Each work gets memory of its own, `words` are more that ranks are told.
    """
    page = ControlPage.create(WORLD)
    fds: list[int] = [page.fd]

    def memory(name: str) -> list[int]:
        made = [os.memfd_create(f"{name}-{rank}") for rank in range(WORLD)]
        fds.extend(made)
        return made

    doing = memory("doing")
    with tempfile.TemporaryDirectory() as folder:
        content = {
            "world": WORLD,
            "device": dataclasses.asdict(device),
            "policy": serving_policy(device.backend, device.l2_bytes).key,
            "control_fd": page.fd,
            "talk_fds": memory("talk"),
            "doing_fds": doing,
            "works": [{**work, "fds": memory("rank")} for work in works],
            "modes": arguments.modes.split(","),
            "rounds": arguments.rounds,
            "iterations": arguments.iterations,
            "seconds": arguments.seconds,
            "spin_limit_s": SPIN_LIMIT_S,
            "folder": folder,
            **words,
        }
        told = Path(folder) / "words.json"
        told.write_text(json.dumps(content))
        said = run_ranks(
            [[sys.executable, "-P", str(script), str(told), str(r), str(os.getpid())] for r in range(WORLD)],
            environment(),
            fds,
            Watch(arguments.seconds + STARTING_S),
            page.abort,
            lambda rank: os.pread(doing[rank], 200, 0).decode(errors="replace").strip() or "was starting",
        )
        said += [report.sentence for rank in range(WORLD) if (report := page.report(rank)) is not None]
        return [_found(Path(folder) / f"rank{rank}.json") for rank in range(WORLD)], said


def _found(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"found": [], "versions": {}}
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def environment() -> dict[str, str]:
    """Of the ranks: no multicast, and nothing that would serialise launches."""
    kept = {name: value for name, value in os.environ.items() if name not in REMOVED_FROM_ENVIRONMENT}
    path = os.pathsep.join([str(BENCH), *(one for one in sys.path if one)])
    return {
        **kept,
        "NCCL_NVLS_ENABLE": "0",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": path,
    }


def by_rank(found: Sequence[Mapping[str, Any]], number: int) -> list[dict[str, Any]]:
    """What each rank found of work number `number`; [] unless all of them finished it."""
    mine = [one for rank in found for one in rank["found"] if one["number"] == number]
    return mine if len(mine) == len(found) else []


def shared_modes(of_ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """Launch modes that every rank measured, in the first one's order."""
    return [mode for mode in of_ranks[0]["modes"] if all(mode in rank["modes"] for rank in of_ranks)]


def mode_title(mode: str) -> str:
    return "CUDA graph" if mode == "graph" else "Eager"


def write(
    arguments: argparse.Namespace,
    device: DeviceClass,
    found: Sequence[Mapping[str, Any]],
    said: Sequence[str],
    **results: Any,
) -> None:
    """The result with its head, where `--out` asks for it; `results` come last."""
    if arguments.out is None:
        return
    content = {
        **next((rank["versions"] for rank in found if rank["versions"]), {}),
        "gpus": WORLD,
        "device_class": device.key,
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
        "policy": POLICY,
        "rounds": arguments.rounds,
        "launches_of_a_round": arguments.iterations,
        "ended": said or "as it should",
        **results,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(content, indent=1) + "\n")
