"""`tktune doctor`: what this machine has and can do, what is missing, and one sentence of advice.

On a host with GPUs it measures their link the first time, and keeps that; else it changes nothing.
"""

from __future__ import annotations

import os
import platform
import shutil
import stat
import sys
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tktune.cli import options
from tktune.cli.db import open_or_refuse
from tktune.cli.doctor_text import Check, advice, link_table, topology_json
from tktune.cli.output import print_json
from tktune.core.errors import TktuneError, WordsError
from tktune.core.sharing import VARIABLE, may_share
from tktune.report.text import aligned, bytes_text, count_text

if TYPE_CHECKING:
    from tktune.cli.doctor_link import LinkReport

EXAMPLE = "Example: tktune doctor --measure"
LOW_DISK_BYTES = 2 * 1024**3


def doctor(
    measure: Annotated[
        bool | None,
        typer.Option(
            "--measure/--no-measure",
            help="Measure the GPUs' link now, or never [default: when nothing is known of it yet].",
        ),
    ] = None,
    db: options.Db = None,
    cache: options.Cache = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show devices, compilers, database and cache as tktune sees them, and what the GPUs' link can do. Exit code 1
    when tuning cannot work here."""
    from tktune.cli.doctor_link import report

    url, folder = options.database(db), options.cache_folder(cache)
    found = report(url, folder, measure, _say)
    checks = [
        _versions(),
        _cpu(),
        *_gpus(),
        *found.checks,
        _compiler("g++", "native", needed=True),
        _compiler("nvcc", "sm_90a", needed=False),
        _memfd(),
        _database(url),
        *_cache(folder),
    ]
    healthy = all(check.ok is not False for check in checks)
    if as_json:
        print_json(
            {**_json(found), "ok": healthy, "advice": _advice(checks), "checks": [asdict(c) for c in checks]}
        )
    else:
        marks = {True: "ok", None: "-", False: "NO"}
        print(aligned([[check.name, marks[check.ok], check.found] for check in checks]))
        if found.link is not None:
            print(f"\n{link_table(found.link.facts)}\n\n{advice(found.link.facts)}")
        print(f"\n{_advice(checks)}")
    if not healthy:
        raise typer.Exit(1)


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _json(found: LinkReport) -> dict[str, Any]:
    return {
        "topology": None if found.topology is None else topology_json(found.topology),
        "link": None if found.link is None else found.link.to_json(),
    }


def _advice(checks: list[Check]) -> str:
    for check in checks:
        if check.ok is False:
            return f"{check.name}: {check.advice or check.found}"
    return "All is well: tktune run quickstart"


def _versions() -> Check:
    from tktune import __version__

    versions = []
    for name in ("torch", "optuna", "sqlalchemy", "numpy"):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            return Check("tktune", False, f"{name} is not installed", f"Install it: pip install {name}.")
    return Check("tktune", True, f"{__version__}, Python {platform.python_version()}, {', '.join(versions)}")


def _cpu() -> Check:
    from tktune.core.device import device_class

    try:
        device = device_class("cpu")
    except TktuneError as error:
        return Check("cpu", False, error.sentence, error.way_out)
    cores = len(os.sched_getaffinity(0))
    return Check(
        "cpu",
        True,
        f"{device.arch}: {count_text(cores, 'core')}, {count_text(device.sm_count, 'seat')} a rank, "
        f"{bytes_text(device.smem_optin_bytes)} a block, last-level cache {bytes_text(device.l2_bytes)}",
    )


def _gpus() -> list[Check]:
    from tktune.core.device_cuda import cuda_device_classes

    devices = cuda_device_classes()
    if not devices:
        return [Check("gpu", None, "no CUDA driver or no device")]
    kinds = sorted(set(devices), key=str)
    found = [
        Check(
            "gpu",
            True,
            f"{devices.count(kind)} × {kind}: {kind.arch}, {count_text(kind.sm_count, 'SM')}, "
            f"{bytes_text(kind.smem_optin_bytes)} of shared memory, L2 {bytes_text(kind.l2_bytes)}, "
            f"{kind.interconnect}",
        )
        for kind in kinds
    ]
    try:
        if may_share():
            said = f"{VARIABLE}=1: ranks may share a GPU, so that results can be checked and nothing can be timed"
            found.append(Check("sharing", None, said, f"Unset {VARIABLE} to measure."))
    except WordsError as error:
        found.append(Check("sharing", False, error.sentence, error.way_out))
    return found


def _compiler(kind: str, arch: str, needed: bool) -> Check:
    from tktune.build.toolchain import detect

    try:
        found = detect("g++" if kind == "g++" else "nvcc", arch)
    except TktuneError as error:
        return Check(kind, False if needed else None, error.sentence, error.way_out)
    return Check(kind, True, f"{found.version} at {found.path}")


def _memfd() -> Check:
    try:
        os.close(os.memfd_create("tktune-doctor"))
    except (AttributeError, OSError) as error:
        return Check(
            "shared memory", False, f"memfd_create fails: {error}", "Use a Linux kernel of 3.17 or newer."
        )
    return Check("shared memory", True, "memfd_create works")


def _database(url: str) -> Check:
    from tktune.store.location import place

    try:
        where = place(url)
        if where.path is not None and not where.path.exists():
            folder = next(parent for parent in where.path.parents if parent.exists())
            if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
                return Check(
                    "database",
                    False,
                    f"{where.shown} cannot be made",
                    f"Make {folder} writable, or set TKTUNE_DB.",
                )
            return Check("database", None, f"{where.shown}, not made yet: the first run makes it")
        with open_or_refuse(url) as store:
            stats = store.stats()
    except TktuneError as error:
        return Check("database", False, error.sentence, error.way_out)
    if where.path is not None and not os.access(where.path, os.W_OK):
        return Check(
            "database", False, f"{where.shown} is read-only", f"Make {where.path} writable, or set TKTUNE_DB."
        )
    trials = count_text(stats["trials"], "trial")
    winners = count_text(stats["winners"], "winner")
    return Check(
        "database",
        True,
        f"{where.shown}, schema {stats['schema']}, {trials}, {winners}, {bytes_text(stats['bytes'])}",
    )


def _cache(root: Path) -> list[Check]:
    from tktune.build.folder import CacheFolder

    existing = root if root.exists() else next(parent for parent in root.parents if parent.exists())
    free = shutil.disk_usage(existing).free
    disk = Check(
        "disk",
        free >= LOW_DISK_BYTES,
        f"{bytes_text(free)} free under {existing}",
        f"Less than {bytes_text(LOW_DISK_BYTES)} are free: make room, or run: tktune cache gc.",
    )
    folder = CacheFolder(root)
    try:
        folder.check()
    except TktuneError as error:
        return [Check("cache", False, error.sentence, error.way_out), disk]
    if not (existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)):
        return [
            Check("cache", False, f"{root} is not writable", "Set TKTUNE_CACHE_DIR to a folder of yours."),
            disk,
        ]
    if root != existing:
        return [Check("cache", None, f"{root}, not made yet: the first run makes it"), disk]
    mode = stat.S_IMODE(root.stat().st_mode)
    size = sum(file.stat().st_size for file in root.rglob("*") if file.is_file() and not file.is_symlink())
    artifacts = count_text(len(list(folder.digests())), "artifact")
    return [
        Check("cache", True, f"{root}, owned by you, mode {mode:o}, {artifacts}, {bytes_text(size)}"),
        disk,
    ]
