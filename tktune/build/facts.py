"""What the compiler and the ELF file say of a cubin, and whether that rules it out. Runs no external tool."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

from tktune.core.build_spec import BuildSpec
from tktune.core.errors import ArtifactError

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_BARRIERS = re.compile(r"used (\d+) barriers")
_SHARED_BYTES = re.compile(r"(\d+)(?:\+\d+)? bytes smem")

_SYMTAB, _DYNSYM = 2, 11
SYSCALL_PREFIX = "__cuda_syscall_"

# Facts a family may predict exactly or as a bound ("at most").
_EXACT = ("static_smem_bytes",)
_AT_MOST = ("registers", "stack_bytes")


def cubin_facts(log: str, cubin: Path) -> dict[str, Any]:
    """Registers, spills, stack and static shared memory (the largest over entries) and system-call symbols.

    Keys: registers, spill_store_bytes, spill_load_bytes, stack_bytes, static_smem_bytes, barriers, syscalls (list
    of names), entries (the same numbers for each entry function). Raises `ArtifactError` when `cubin` is no ELF
    file.
    """
    entries = ptxas_entries(log)
    keys = (
        "registers",
        "spill_store_bytes",
        "spill_load_bytes",
        "stack_bytes",
        "static_smem_bytes",
        "barriers",
    )
    facts: dict[str, Any] = {key: max((e.get(key, 0) for e in entries.values()), default=0) for key in keys}
    facts["syscalls"] = sorted(name for name in elf_symbols(cubin) if name.startswith(SYSCALL_PREFIX))
    facts["entries"] = entries
    return facts


def ptxas_entries(log: str) -> dict[str, dict[str, int]]:
    """The numbers `ptxas -v` printed, by function: entries, and device functions that were not inlined."""
    entries: dict[str, dict[str, int]] = {}
    entry = function = ""
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry = function = match.group(1)
            entries.setdefault(entry, {})
        elif match := _PROPERTIES.search(line):
            function = match.group(1)
            entries.setdefault(function, {})
        elif (match := _FRAME.search(line)) and function:
            stack, stores, loads = (int(group) for group in match.groups())
            entries[function] |= {
                "stack_bytes": stack,
                "spill_store_bytes": stores,
                "spill_load_bytes": loads,
            }
        elif (match := _USED.search(line)) and entry:
            entries[entry]["registers"] = int(match.group(1))
            for key, pattern in (("barriers", _BARRIERS), ("static_smem_bytes", _SHARED_BYTES)):
                found = pattern.search(line)
                entries[entry][key] = int(found.group(1)) if found else 0
    return entries


def elf_symbols(path: Path) -> list[str]:
    """Names in the symbol tables of a little-endian ELF64 file. Raises `ArtifactError` when it is none."""
    content = path.read_bytes()
    try:
        if content[:6] != b"\x7fELF\x02\x01":
            raise ArtifactError(f"{path} is not a 64-bit ELF file.", "Build it again.")
        table = struct.unpack_from("<Q", content, 40)[0]
        size, count = struct.unpack_from("<HH", content, 58)
        names: list[str] = []
        for index in range(count):
            kind, offset, length, link, entry_bytes = _section(content, table + index * size)
            if kind not in (_SYMTAB, _DYNSYM) or not entry_bytes:
                continue
            _, strings, strings_length, _, _ = _section(content, table + link * size)
            for position in range(offset, offset + length, entry_bytes):
                start = strings + struct.unpack_from("<I", content, position)[0]
                end = content.index(b"\0", start, strings + strings_length)
                if end > start:
                    names.append(content[start:end].decode(errors="replace"))
    except (struct.error, ValueError) as error:
        raise ArtifactError(f"{path} is a damaged ELF file ({error}).", "Build it again.") from error
    return names


def objections(spec: BuildSpec, facts: dict[str, Any]) -> str:
    """Why these facts rule the variant out, as one sentence; empty when nothing does.

    A family allows what it knows to be harmless by `spec.facts`: allow_spills, allow_syscalls.
    """
    spilled = facts.get("spill_store_bytes", 0) + facts.get("spill_load_bytes", 0)
    if spilled and not spec.facts.get("allow_spills"):
        return (
            f"{spec.name} spills registers ({facts['spill_store_bytes']} bytes stored, "
            f"{facts['spill_load_bytes']} loaded, {facts['registers']} registers used)."
        )
    if facts.get("syscalls") and not spec.facts.get("allow_syscalls"):
        return f"{spec.name} calls into the driver's system code: {', '.join(facts['syscalls'])}."
    return ""


def contradictions(spec: BuildSpec, facts: dict[str, Any]) -> tuple[str, ...]:
    """Sentences on predicted facts (`spec.facts`) that the compiler contradicts; a defect of the formula."""
    sentences = []
    for key in (*_EXACT, *_AT_MOST):
        predicted, real = spec.facts.get(key), facts.get(key)
        if predicted is None or real is None:
            continue
        if real > predicted or (key in _EXACT and real != predicted):
            bound = "" if key in _EXACT else "at most "
            sentences.append(
                f"The formula for {key} of {spec.name} says {bound}{predicted}, the compiler {real}."
            )
    return tuple(sentences)


def _section(content: bytes, offset: int) -> tuple[int, int, int, int, int]:
    """Type, file offset, size, linked section and entry size of one section header (ELF64, 64 bytes)."""
    kind = struct.unpack_from("<I", content, offset + 4)[0]
    file_offset, size, link = struct.unpack_from("<QQI", content, offset + 24)
    return kind, file_offset, size, link, struct.unpack_from("<Q", content, offset + 56)[0]
