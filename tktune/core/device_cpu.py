"""The device class of this machine's CPU backend, read from procfs and sysfs without running anything."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

from tktune.core.device import DeviceClass
from tktune.core.errors import WordsError

DEFAULT_SEATS = 4
KIB = 1024
_SMEM_LOW, _SMEM_HIGH = 128 * KIB, 2048 * KIB
# The x86-64 psABI levels, by the flags that tell them apart.
_LEVELS = (
    ("v4", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    ("v3", {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}),
    ("v2", {"cx16", "popcnt", "sse4_1", "sse4_2", "ssse3"}),
)


def cpu_device_class(
    proc: Path = Path("/proc"), sysfs: Path = Path("/sys"), cores: int | None = None
) -> DeviceClass:
    """The CPU of this machine as a device class.

    `sm_count` is the seats of one rank (`TKTUNE_CPU_SEATS`, or 4). `smem_optin_bytes` is one core's L2, held
    within 128 KiB and 2 MiB; `l2_bytes` is the last-level cache. Raises `WordsError` for a wrong seat count.
    """
    seats = _seats(os.environ.get("TKTUNE_CPU_SEATS", ""))
    usable = cores or _usable_cores()
    level, model = _instruction_set(proc / "cpuinfo")
    private, last = _caches(sysfs / "devices/system/cpu/cpu0/cache")
    return DeviceClass(
        backend="cpu",
        arch=f"{level}.{usable}c",
        sm_count=seats,
        smem_optin_bytes=min(max(private, _SMEM_LOW), _SMEM_HIGH),
        l2_bytes=last,
        interconnect="shm",
        display_name=f"{model}, {usable} cores, {seats} seats a rank",
    )


def cores_of(device: DeviceClass) -> int:
    """The cores a CPU device class speaks of ("x86-64-v3.2c" → 2)."""
    tail = device.arch.rpartition(".")[2]
    return int(tail[:-1]) if tail.endswith("c") and tail[:-1].isdigit() else 1


def _seats(text: str) -> int:
    if not text:
        return DEFAULT_SEATS
    if not text.isdigit() or not 1 <= int(text) <= 64:
        raise WordsError(
            f"TKTUNE_CPU_SEATS = {text!r} is not a number of seats.", "Set it to a number in 1..64."
        )
    return int(text)


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@cache
def _instruction_set(cpuinfo: Path) -> tuple[str, str]:
    """The psABI level (or the plain machine name) and the model's name."""
    machine = platform.machine() or "unknown"
    flags: set[str] = set()
    model = ""
    try:
        text = cpuinfo.read_text(errors="replace")
    except OSError:
        return machine.replace("_", "-"), machine
    for line in text.splitlines():
        key, _, value = line.partition(":")
        key = key.strip()
        if key in ("flags", "Features") and not flags:
            flags = set(value.split())
        elif key == "model name" and not model:
            model = value.strip()
    if machine in ("x86_64", "AMD64"):
        for level, needed in _LEVELS:
            if needed <= flags:
                return f"x86-64-{level}", model or machine
        return "x86-64", model or machine
    return machine, model or machine


@cache
def _caches(folder: Path) -> tuple[int, int]:
    """Bytes of one core's private L2 and of the last-level cache (1 MiB and 32 MiB where sysfs is silent)."""
    sizes: dict[int, int] = {}
    sharers: dict[int, int] = {}
    for index in sorted(folder.glob("index*")):
        try:
            if (index / "type").read_text().strip() == "Instruction":
                continue
            level = int((index / "level").read_text())
            sizes[level] = _cache_bytes((index / "size").read_text().strip())
            sharers[level] = _listed((index / "shared_cpu_list").read_text().strip())
        except (OSError, ValueError):
            continue
    private = sizes[2] // max(1, sharers[2]) if 2 in sizes else 1024 * KIB
    last = sizes[max(sizes)] if sizes and max(sizes) >= 2 else 32 * 1024 * KIB
    return private, last


def _cache_bytes(text: str) -> int:
    units = {"K": KIB, "M": KIB * KIB, "G": KIB**3}
    return int(text[:-1]) * units[text[-1]] if text[-1:] in units else int(text)


def _listed(text: str) -> int:
    """How many CPUs a list such as "0-3,8" names."""
    total = 0
    for part in text.split(","):
        low, _, high = part.partition("-")
        total += int(high or low) - int(low) + 1
    return total
