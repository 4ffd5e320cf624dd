"""What must be built for a config: sources, defines and flags, without knowing how it is built."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

ArtifactKind = Literal["shared", "cubin", "pair"]


@dataclass(frozen=True)
class BuildSpec:
    """One artifact to build.

    `source` is one translation unit; its include closure is found by the build room. `arch` is "native" for
    `shared` artifacts of g++, or "sm_90a" / "sm_120a" for nvcc. `defines` become -DNAME=VALUE. `facts` are
    what the formulas predict (for example {"smem_bytes": 98304, "registers": 168}); the build compares them
    with what the compiler reports. A "pair" compiles nothing of its own: it stands for the artifacts of `parts`, which
    run one after the other; its `source` and `defines` only tell it apart in messages.
    """

    name: str
    kind: ArtifactKind
    source: Path
    arch: str
    defines: dict[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    include_dirs: tuple[Path, ...] = ()
    facts: dict[str, int] = field(default_factory=dict)
    parts: tuple[BuildSpec, ...] = ()
