"""The studies of the two-GPU host: their shapes, that one run of the dispatch study covers all of them in its time."""

from __future__ import annotations

import pytest

from tktune.core.device import device_class
from tktune.core.paths import studies_root
from tktune.search.study import load_study

FILES = sorted((studies_root() / "h200").glob("*.toml"))
SHAPES = {(4096, 3072, 64, 512), (4096, 3072, 64, 2048), (7168, 2048, 64, 2048), (2048, 768, 128, 2048)}
OVERHEAD_S = 12.0  # of a problem beyond its seconds: its space, and a last round that overshoots


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_study_is_named_after_its_file_and_can_be_tuned(path):
    study = load_study(path)
    assert study.name.replace("_", "-") == f"h200-{path.stem}".replace("_", "-")
    for problem in study.problems:
        space = study.space(problem, device_class("sm_90a"))
        assert space.is_feasible(space.default_config())
        assert problem.expert_ranks == 2 and problem.top_k == 8


def test_one_run_tunes_the_dispatch_of_all_four_shapes_within_eight_minutes():
    study = load_study(studies_root() / "h200" / "dispatch_gemm.toml")
    assert [(p.hidden, p.cols, p.experts, p.tokens) for p in study.problems] == sorted(
        SHAPES, key=lambda shape: (shape[0] != 4096, -shape[0], shape[3])
    )
    assert {p.world for p in study.problems} == {2}
    assert len(study.problems) * (study.seconds + OVERHEAD_S) <= 480


def test_the_other_studies_tune_the_gemm_of_the_same_shapes():
    others = [load_study(path) for path in FILES if path.stem != "dispatch_gemm"]
    problems = [problem for study in others for problem in study.problems]
    assert {study.family for study in others} == {"grouped_gemm"}
    assert {(p.hidden, p.cols, p.experts, p.tokens) for p in problems} == SHAPES
