"""The name of an artifact: one digest over everything that goes into it."""

from __future__ import annotations

from tktune.build import commands
from tktune.build.closure import closure_hashes
from tktune.build.toolchain import Toolchain
from tktune.core.build_spec import BuildSpec
from tktune.core.canonical import digest

_FORMAT = 1


def artifact_digest(spec: BuildSpec, toolchain: Toolchain) -> str:
    """SHA-256 (64 hexadecimal characters) of what `spec` becomes under `toolchain`.

    It covers sources and their include closure, defines, resolved flags, compiler identity and arch. The spec's
    `name` and predicted `facts` do not change the code and do not count: configs that become the same code
    share one artifact. Raises `ArtifactError` when the sources cannot be read.
    """
    return digest(
        {
            "format": _FORMAT,
            "kind": spec.kind,
            "arch": spec.arch,
            "source": spec.source.name,
            "files": closure_hashes(spec.source, spec.include_dirs),
            "defines": spec.defines,
            "flags": commands.flags(spec, toolchain),
            "compiler": [toolchain.kind, toolchain.version],
        }
    )
