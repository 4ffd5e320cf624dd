"""The studies of the two-GPU host: their shapes, that one run of the dispatch study covers all of them in its time."""

from __future__ import annotations

import pytest

from tktune.core.device import device_class
from tktune.core.paths import studies_root
from tktune.core.rehearsal import rehearsal_name
from tktune.search.study import load_study

FILES = sorted((studies_root() / "h200").glob("*.toml"))
SHAPES = {(4096, 3072, 64, 512), (4096, 3072, 64, 2048), (7168, 2048, 64, 2048), (2048, 768, 128, 2048)}
REHEARSED = "sm_120a-rehearsed"
OVERHEAD_S = 12.0  # of a problem beyond its seconds: its space, and a last round that overshoots


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_study_is_named_after_its_file_and_can_be_tuned(path):
    study = load_study(path)
    assert study.name.replace("_", "-") == f"h200-{path.stem}".replace("_", "-")
    for problem in study.problems:
        space = study.space(problem, device_class("sm_90a" if study.device == "cuda" else study.device))
        assert space.is_feasible(space.default_config())
        assert problem.expert_ranks == 2 and problem.top_k == 8


def test_one_run_tunes_the_dispatch_of_all_four_shapes_within_eight_minutes():
    study = load_study(studies_root() / "h200" / "dispatch_gemm.toml")
    assert [(p.hidden, p.cols, p.experts, p.tokens) for p in study.problems] == sorted(
        SHAPES, key=lambda shape: (shape[0] != 4096, -shape[0], shape[3])
    )
    assert {p.world for p in study.problems} == {2}
    assert len(study.problems) * (study.seconds + OVERHEAD_S) <= 480


def test_one_run_tunes_the_combine_of_four_layers_within_eight_minutes():
    """A dispatch of the same layer writes what this one reads: its hidden is half of that one's cols."""
    study = load_study(studies_root() / "h200" / "gemm_combine.toml")
    shapes = {(p.cols, 2 * p.hidden, p.experts) for p in study.problems}
    assert shapes >= {(4096, 3072, 128), (7168, 4096, 64), (2048, 1536, 128)} and len(shapes) == 4
    assert {(p.world, p.tokens, p.top_k) for p in study.problems} == {(2, 2048, 8)}
    assert len(study.problems) * (study.seconds + OVERHEAD_S) <= 480


def test_the_gemm_studies_tune_the_gemm_of_the_same_shapes():
    problems = [
        p for study in map(load_study, FILES) if study.family == "grouped_gemm" for p in study.problems
    ]
    assert {(p.hidden, p.cols, p.experts, p.tokens) for p in problems} == SHAPES


def test_the_rehearsal_of_the_seeds_machine_tunes_two_of_the_shapes_in_its_own_class():
    study = load_study(studies_root() / "h200" / f"{REHEARSED}.toml")
    device = device_class(study.device)
    assert study.device == REHEARSED == rehearsal_name(device)
    assert {(p.hidden, p.cols, p.experts, p.tokens) for p in study.problems} < SHAPES
    assert len(study.problems) == 2 and {p.world for p in study.problems} == {2}
