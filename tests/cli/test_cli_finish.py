"""A finish on the command line and in a study file: looked up, dry-run, tuned, exported and taken in again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from command_line import Ended

Run = Callable[..., Ended]
SHAPE = [
    "--hidden",
    "128",
    "--cols",
    "192",
    "--experts",
    "4",
    "--top-k",
    "2",
    "--tokens",
    "48",
    "--world",
    "2",
    "--pad",
    "32",
    "--device",
    "cpu",
]
STUDY = """
name = "glu"
family = "dispatch_gemm"

[problem]
hidden = 128
cols = 192
experts = 4
top_k = 2
tokens = 48
world = 2
pad = 32
finish = {finish}

[search]
trials = 3
seconds = 30
finalists = 2
rounds = 3

[pins]
ROW_BLOCK = 32
RED_BLOCK = 64
STAGES = 2
CONSUMER_WARPS = 1
backoff = 16
order = "token"
"""


def test_a_lookup_takes_a_finish_and_refuses_another(tktune: Run) -> None:
    found = tktune("lookup", "--family", "dispatch_gemm", *SHAPE, "--finish", "swiglu", "--json")
    assert found.code == 0, found.err
    assert found.json["problem"]["finish"] == "swiglu" and found.json["config"]["GLU"] == "fused"
    plain = tktune("lookup", "--family", "dispatch_gemm", *SHAPE, "--json").json
    assert "finish" not in plain["problem"] and "GLU" not in plain["config"]
    wrong = tktune("lookup", "--family", "dispatch_gemm", *SHAPE, "--finish", "gelu")
    assert wrong.code == 2 and "finish = 'gelu' is not known" in wrong.err


def test_a_study_may_list_both(tktune: Run, tmp_path: Path) -> None:
    study = tmp_path / "both.toml"
    study.write_text(STUDY.format(finish='["none", "swiglu"]'))
    ended = tktune("run", str(study), "--dry-run", "--json")
    assert ended.code == 0, ended.err
    assert ended.out.count('"finish": "swiglu"') >= 1


def test_a_study_with_a_finish_is_tuned_exported_and_taken_in(tktune: Run, tmp_path: Path) -> None:
    study, exported = tmp_path / "glu.toml", tmp_path / "out.json"
    study.write_text(STUDY.format(finish='"swiglu"'))
    ended = tktune("run", str(study))
    assert ended.code == 0, ended.err
    found = tktune("lookup", "--family", "dispatch_gemm", *SHAPE, "--finish", "swiglu", "--json").json
    assert found["provenance"] == "exact"
    exported.write_text(tktune("export", "--format", "json").out)
    other = ["--db", str(tmp_path / "other.db")]
    assert tktune("import", str(exported), *other).code == 0
    again = tktune("lookup", "--family", "dispatch_gemm", *SHAPE, "--finish", "swiglu", "--json", *other).json
    assert (again["provenance"], again["config"]) == ("exact", found["config"])
    header, first, *_ = tktune("export", "--format", "csv").out.splitlines()
    assert first.split(",")[header.split(",").index("finish")] == "swiglu"
