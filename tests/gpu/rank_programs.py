"""Rank programs of a test, one process a rank, and what those that live to tell found: the last line each prints, as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def played(
    script: str,
    folder: Path,
    scene: str,
    *,
    world: int = 2,
    living: Sequence[int] | None = None,
    environment: Mapping[str, str] | None = None,
    within_s: float = 150.0,
) -> list[Any]:
    """`python SCRIPT RANK WORLD FOLDER SCENE` for every rank; `living` (None: all) must end well, and are heard in order.

    FOLDER holds the file at which ranks meet, anew for each scene.
    """
    (folder / "rendezvous").unlink(missing_ok=True)
    words = [sys.executable, str(Path(__file__).with_name(script))]
    ranks = [
        subprocess.Popen(
            [*words, str(rank), str(world), str(folder), scene],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", **(environment or {})},
        )
        for rank in range(world)
    ]
    found = []
    try:
        for rank, process in enumerate(ranks):
            said, errors = process.communicate(timeout=within_s)
            if living is None or rank in living:
                assert process.returncode == 0, errors[-4000:]
                found.append(json.loads(said.splitlines()[-1]))
    finally:
        for process in ranks:
            process.kill()
    return found
