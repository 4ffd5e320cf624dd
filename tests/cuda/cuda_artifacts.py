"""Variants built for tests without a GPU, and the initial bytes of a device symbol read from a cubin."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

from tktune.build.cache import ArtifactCache
from tktune.core.build_spec import BuildSpec
from tktune.core.device import device_class
from tktune.core.problem import Problem
from tktune.families.base import family


def problem_of(**changes: Any) -> Problem:
    fields = {"hidden": 4096, "cols": 3072, "experts": 64, "top_k": 8, "tokens": 512, "ep_world": 2}
    return Problem("grouped_gemm", **{**fields, **changes})


def spec_of(arch: str, problem: Problem, **changes: Any) -> BuildSpec:
    """The default build of `arch` with some parameters changed; it must be feasible."""
    device = device_class(arch)
    bench = family(problem.family)
    space = bench.space(problem, device)
    config = space.default.replace(**changes)
    assert space.broken(config) == [], space.broken(config)
    return bench.build_spec(space.build_part(config), problem, device)


def built_as_predicted(cache: ArtifactCache, spec: BuildSpec) -> Path:
    """The cubin: without spills, stack or calls, and within the formulas' registers."""
    (outcome,) = cache.build([spec])
    assert outcome.ok, outcome.error_sentence
    assert outcome.mismatches == ()
    facts = outcome.artifact.facts
    assert facts["spill_store_bytes"] == facts["spill_load_bytes"] == facts["stack_bytes"] == 0
    assert facts["syscalls"] == []
    assert facts["registers"] <= spec.facts["registers"]
    path: Path = outcome.artifact.path
    return path


def device_words(cubin: Path, symbol: str) -> list[int]:
    """The int32 words that a `__device__` symbol is initialised with (ELF64, little-endian)."""
    content = cubin.read_bytes()
    table = struct.unpack_from("<Q", content, 40)[0]
    size, count = struct.unpack_from("<HH", content, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", content, table + i * size) for i in range(count)]
    for _, kind, _, _, offset, length, link, _, _, entry in sections:
        if kind != 2:  # the symbol table
            continue
        names = sections[link][4]
        for at in range(offset, offset + length, entry):
            name, _, _, section, value, nbytes = struct.unpack_from("<IBBHQQ", content, at)
            end = content.index(b"\0", names + name)
            if content[names + name : end].decode() == symbol:
                begin = sections[section][4] + value
                return list(struct.unpack_from(f"<{nbytes // 4}i", content, begin))
    raise AssertionError(f"{cubin} has no symbol {symbol}")
