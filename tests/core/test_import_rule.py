"""The ground stays light: core and the pure halves of families import none of the heavy packages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HEAVY = ("torch", "numpy", "optuna", "sqlalchemy", "alembic", "pydantic", "typer", "rich")
ROOT = Path(__file__).resolve().parents[2]
CODE = """
import importlib, json, pathlib, sys
root = pathlib.Path(sys.argv[1])
files = [*root.glob("tktune/core/*.py"), root / "tktune/families/base.py", root / "tktune/families/formulas.py",
         *root.glob("tktune/families/*/space*.py")]
names = [".".join(f.relative_to(root).with_suffix("").parts) for f in files if f.stem != "__init__"]
for name in names:
    importlib.import_module(name)
from tktune.core.device import device_class
from tktune.core.problem import Problem
from tktune.families.base import family
for name in ("grouped_gemm", "dispatch_gemm"):
    space = family(name).space(Problem(name, 256, 256, 8, 2, 64, routing="zipf:1"), device_class("cpu"))
    family(name).build_spec(space.build_part(space.default_config()), space.problem, space.device)
print(json.dumps({"names": names, "loaded": sorted(m for m in sys.modules if "." not in m)}))
"""


def test_core_and_spaces_import_nothing_heavy():
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(ROOT)], capture_output=True, text=True, cwd=ROOT, check=True
    )
    told = json.loads(done.stdout)
    assert {"tktune.core.tables_torch", "tktune.families.dispatch_gemm.space"} <= set(told["names"])
    assert not set(HEAVY) & set(told["loaded"])
