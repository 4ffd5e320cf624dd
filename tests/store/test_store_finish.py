"""Problems with a finish in the store: the schema has not changed, old rows are found as before, and the two are apart."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from store_cases import DEVICE, PROBLEM, open_key, prove, verify

import tktune
from tktune.core.config import Config
from tktune.core.problem import Problem
from tktune.families.base import family
from tktune.report.model import lookup_command
from tktune.search.prior import distance
from tktune.store.results import Store
from tktune.store.schema import SCHEMA_VERSION

GLU = PROBLEM.replace(finish="swiglu")


def test_a_winner_with_a_finish_is_found_for_it_alone(tmp_path: Path) -> None:
    path = tmp_path / "tktune.db"
    configs: dict[str, Config] = {}
    with Store.open(str(path)) as store:
        for problem in (PROBLEM, GLU):
            default = family("dispatch_gemm").space(problem, DEVICE).default_config()
            key = open_key(store, problem)
            prove(store, key, default)
            verify(store, key, "session", default)
            configs[problem.finish] = default
            assert store.key_facts(key).problem == problem
    assert "GLU" in configs["swiglu"] and "GLU" not in configs["none"]
    tktune.lookup.cache_clear()
    words = {name: value for name, value in PROBLEM.key.items() if name != "family"}
    for finish, chosen in configs.items():
        found = tktune.lookup("dispatch_gemm", **words, finish=finish, device=DEVICE, db=path)
        assert (found.provenance, found.config, found.problem.finish) == ("exact", chosen, finish)
        near = tktune.lookup(
            "dispatch_gemm", **{**words, "tokens": 256}, finish=finish, device=DEVICE, db=path
        )
        assert (near.provenance, near.config) == ("near", chosen)
    tktune.lookup.cache_clear()


def test_the_schema_is_that_of_before_and_the_key_tells_the_finish(tmp_path: Path) -> None:
    path = tmp_path / "tktune.db"
    with Store.open(str(path)) as store:
        open_key(store, GLU)
    assert SCHEMA_VERSION == "0002"
    with sqlite3.connect(path) as connection:
        names = [row[1] for row in connection.execute("PRAGMA table_info(problem)")]
        (key,) = connection.execute("SELECT key FROM problem").fetchone()
    assert "finish" not in names and '"finish":"swiglu"' in key


def test_words_and_neighbours_know_the_finish() -> None:
    assert "--finish swiglu" in lookup_command(GLU, DEVICE, "serving")
    assert "finish" not in lookup_command(PROBLEM, DEVICE, "serving")
    assert distance(PROBLEM, DEVICE, GLU, DEVICE) == distance(GLU, DEVICE, PROBLEM, DEVICE) == 0.5
    assert distance(GLU, DEVICE, GLU, DEVICE) == 0
    assert Problem(**GLU.key) == GLU
