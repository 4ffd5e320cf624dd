"""What a lookup costs: its imports, its time as a process, and its time when asked again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import timeit
from pathlib import Path

import pytest
from test_lookup import SMALL, ask, empty_database, path, problem, win  # noqa: F401 (fixtures)

import tktune

PROGRAM = """
import sys
import tktune
choice = tktune.lookup("lookup_family:FAMILY", hidden=64, cols=64, experts=8, top_k=2, tokens=128, device=DEVICE)
print(choice.provenance)
"""
HEAVY = (
    "torch",
    "optuna",
    "alembic",
    "numpy",
    "sqlalchemy",
    "pydantic",
    "typer",
    "rich",
    "asyncio",
    "unittest",
)


def answered(program: str, database: Path) -> str:
    environment = {**os.environ, "TKTUNE_DB": str(database)}
    environment["PYTHONPATH"] = os.pathsep.join(
        [
            str(Path(__file__).parent),
            str(Path(tktune.__file__).parent.parent),
            os.environ.get("PYTHONPATH", ""),
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("provenance", ["exact", "default", "missing"])
def test_a_lookup_imports_nothing_heavy(path: Path, provenance: str) -> None:  # noqa: F811
    from tktune.core.device import device_class

    if provenance == "exact":
        win(path, problem(), SMALL, 80.0, device=device_class("cpu"))
    if provenance == "missing":
        path.unlink()
    check = f"print([name for name in {HEAVY} if name in sys.modules])"
    told = answered(PROGRAM.replace("DEVICE", "'cpu'") + check, path)
    assert told.splitlines() == [provenance.replace("missing", "default"), "[]"]
    assert provenance != "missing" or not path.exists()


@pytest.mark.alone
def test_a_lookup_as_a_process_takes_half_a_second_at_most(path: Path) -> None:  # noqa: F811
    from tktune.core.device import device_class

    win(path, problem(), SMALL, 80.0, device=device_class("cpu"))
    times = []
    for _ in range(5):
        before = time.perf_counter()
        assert answered(PROGRAM.replace("DEVICE", "None"), path) in ("exact", "default")
        times.append(time.perf_counter() - before)
    assert min(times) <= 0.5


@pytest.mark.alone
def test_a_repeated_lookup_takes_two_microseconds_at_most(path: Path) -> None:  # noqa: F811
    win(path, problem(), SMALL, 80.0)
    database = str(path)
    tktune.lookup.cache_clear()
    lookup = tktune.lookup  # as a program that has imported it
    assert ask(path).provenance == "exact"

    def again() -> None:
        lookup(
            "lookup_family:FAMILY",
            hidden=64,
            cols=64,
            experts=8,
            top_k=2,
            tokens=128,
            device="cpu",
            db=database,
        )

    again()
    best_us = min(timeit.repeat(again, number=5000, repeat=20)) / 5000 * 1e6
    assert best_us <= 2.0
    through_the_package = min(
        timeit.repeat(
            lambda: tktune.lookup(
                "lookup_family:FAMILY",
                hidden=64,
                cols=64,
                experts=8,
                top_k=2,
                tokens=128,
                device="cpu",
                db=database,
            ),
            number=5000,
            repeat=20,
        )
    )
    assert through_the_package / 5000 * 1e6 <= 2.0
