"""What a built variant is: the artifact with its manifest, and the outcome of asking for one."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tktune.core.build_spec import BuildSpec
from tktune.core.errors import ArtifactError

MANIFEST_FORMAT = 1
MANIFEST_NAME = "manifest.json"
LOG_NAME = "build.log"


@dataclass(frozen=True)
class Artifact:
    """A published variant.

    `path` is the .so or .cubin, `sha256` and `bytes` are those recorded when it was built, `facts` what the
    compiler said of it (see `tktune.build.facts`; empty for g++), `built_at` UTC in ISO 8601, `seconds` and
    `peak_bytes` what the compile took. `describes` holds name, kind, arch, defines, flags and source as text.
    """

    digest: str
    path: Path
    sha256: str
    bytes: int
    facts: dict[str, Any]
    toolchain_digest: str
    built_at: str
    seconds: float = 0.0
    peak_bytes: int = 0
    toolchain: dict[str, Any] = dataclasses.field(default_factory=dict)
    describes: dict[str, Any] = dataclasses.field(default_factory=dict)

    def verify(self) -> None:
        """Raises `ArtifactError` unless the file on disk is the one that was built."""
        reason = altered(self)
        if reason:
            raise ArtifactError(
                f"The artifact {self.path} {reason}.", "Build it again, or run: tktune cache verify."
            )

    def manifest(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        fields["path"] = self.path.name
        return {"format": MANIFEST_FORMAT, **fields}


@dataclass(frozen=True)
class BuildOutcome:
    """How one asked-for build ended.

    `artifact` is None when it failed or was rejected; then `error_sentence` is one line for people and `log` the
    compiler's output. `cached`: nothing was compiled for it now. `rejected`: it compiled, and what the compiler
    said of it (spills, calls into the driver's system code) rules it out. `mismatches` are sentences on formulas
    that the compiler contradicts: defects of the family, not of the config. `cancelled`: it was stopped before it
    ended, which says nothing of the config.
    """

    spec: BuildSpec
    digest: str
    artifact: Artifact | None
    seconds: float = 0.0
    peak_bytes: int = 0
    cached: bool = False
    error_sentence: str = ""
    log: Path | None = None
    rejected: bool = False
    cancelled: bool = False
    mismatches: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return self.artifact is not None


def read_manifest(folder: Path) -> Artifact:
    """The artifact in `folder` by its manifest, not yet verified. Raises `ArtifactError` when unreadable."""
    try:
        fields = json.loads((folder / MANIFEST_NAME).read_text())
        if fields.pop("format") != MANIFEST_FORMAT or fields["digest"] != folder.name:
            raise ArtifactError(f"The manifest in {folder} is of another artifact or format.")
        name = Path(fields.pop("path")).name
        return Artifact(path=folder / name, **fields)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"The manifest in {folder} cannot be read ({error}).", "Run: tktune cache verify."
        ) from error


def altered(artifact: Artifact) -> str:
    """Empty when the file matches its manifest, else the reason as the rest of a sentence."""
    try:
        content = artifact.path.read_bytes()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if len(content) != artifact.bytes:
        return f"has {len(content)} bytes instead of {artifact.bytes}"
    if hashlib.sha256(content).hexdigest() != artifact.sha256:
        return "was altered since it was built"
    return ""
