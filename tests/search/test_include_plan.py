"""A study that counts plans where none would be counted is refused before anything is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from tktune.build.cache import ArtifactCache
from tktune.core.errors import WordsError
from tktune.search.driver import tune
from tktune.search.study import load_study

STUDY = """
name = "counted plans"
family = "{family}"
device = "cpu"

[problem]
hidden = 256
cols = 256
experts = 8
top_k = 2
tokens = 64
pad = 64
{more}

[policy]
include_plan = {include}
"""


@pytest.mark.parametrize(
    ("family", "more"), [("dispatch_gemm", "world = 2"), ("grouped_gemm", "ep_world = 2")]
)
def test_plans_are_counted_on_gpus_alone(family: str, more: str, tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text(STUDY.format(family=family, more=more, include="true"))
    store = tmp_path / "results.db"
    with pytest.raises(WordsError, match=r"include_plan counts the plans.*Leave include_plan out"):
        tune(load_study(path), f"sqlite:///{store}", ArtifactCache(tmp_path / "cache"))
    assert not store.exists()
