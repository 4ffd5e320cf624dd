"""What a lookup and a driver need of the layer is light: no torch, no numpy, and no search behind it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE = """
import importlib, json, sys
importlib.import_module(sys.argv[1])
if sys.argv[1] == "tktune.moe.space":
    from tktune.core.device import device_class
    from tktune.core.problem import Problem
    from tktune.families.base import family
    for name in ("cpu", "sm_90a"):
        layer = Problem("moe_layer", 2048, 768, 128, 8, 512, world=2, weight_layout="enk")
        space = family("moe_layer").space(layer, device_class(name))
        family("moe_layer").build_spec(space.build_part(space.default_config()), layer, space.device)
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.parametrize(
    "module", ["tktune.moe", "tktune.moe.parts", "tktune.moe.space", "tktune.moe.choosing"]
)
def test_the_pure_half_imports_nothing_heavy(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, module], capture_output=True, text=True, cwd=ROOT, check=True
    )
    loaded = set(json.loads(done.stdout))
    assert module in loaded
    heavy = {"torch", "numpy", "optuna", "sqlalchemy", "alembic", "pydantic", "typer", "rich"}
    assert not heavy & loaded
    assert not [name for name in loaded if name.startswith(("tktune.search", "tktune.gang", "tktune.cli"))]
