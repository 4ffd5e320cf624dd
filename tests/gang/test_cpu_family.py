"""The real CPU families in a real gang: built, loaded, gated and timed; and a split that deadlocks is caught."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tktune.build.artifact import Artifact
from tktune.build.cache import ArtifactCache
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.families.base import family
from tktune.gang.gang import Gang
from tktune.gang.limits import Deadlines
from tktune.gang.trial import TrialPlan, measure_trial

DEVICE = DeviceClass("cpu", "test", 4, 1 << 20, 1 << 22, "shm")
POLICY = Policy(flush_bytes=1 << 20, first_iterations=2, iterations=5)
DISPATCH = Problem("dispatch_gemm", hidden=128, cols=128, experts=4, top_k=2, tokens=48, world=2, pad=32)
GROUPED = Problem("grouped_gemm", hidden=128, cols=128, experts=4, top_k=2, tokens=48, pad=32, ep_world=2)
SPIN_LIMIT_S = 10.0
DEADLINES = Deadlines(grace_s=20.0)


def default(problem: Problem) -> tuple[Config, Config]:
    space = family(problem.family).space(problem, DEVICE)
    config = space.default_config()
    return config, space.build_part(config)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    cache = ArtifactCache(tmp_path_factory.mktemp("artifacts") / "cache")
    problems = (DISPATCH, GROUPED)
    specs = [family(p.family).build_spec(default(p)[1], p, DEVICE) for p in problems]
    outcomes = cache.build(specs)
    built = {}
    for problem, outcome in zip(problems, outcomes, strict=True):
        assert outcome.artifact is not None, outcome.error_sentence
        built[problem.family] = outcome.artifact
    return built


@pytest.fixture
def dispatch_gang() -> Iterator[Gang]:
    with Gang(DISPATCH, DEVICE, POLICY, spin_limit_s=SPIN_LIMIT_S, deadlines=DEADLINES) as gang:
        yield gang


@pytest.mark.parametrize("problem", [DISPATCH, GROUPED], ids=lambda problem: problem.family)
def test_a_real_artifact_is_gated_and_timed(problem: Problem, artifacts: dict[str, Artifact]) -> None:
    config, build_part = default(problem)
    with Gang(problem, DEVICE, POLICY, spin_limit_s=SPIN_LIMIT_S, deadlines=DEADLINES) as gang:
        result = measure_trial(
            gang, config, build_part, artifacts[problem.family], TrialPlan.of(problem, POLICY)
        )
        assert result.status == "ok", result.sentence
        assert result.sentence == "", "the formulas agree with what the artifact states"
        assert len(result.samples) == 5 * problem.world
        assert result.gate_error is not None
        assert result.time_us is not None
        assert result.time_us > 0
        assert gang.report().bodies[0]["imported"] == ["numpy"]
        communicates = ("comm", "serial") if problem is DISPATCH else ()
        for mode in ("comp", *communicates, "peer"):
            assert gang.time(config, mode, 0, 2).ok, mode


def test_a_split_without_communication_deadlocks_and_is_caught(artifacts: dict[str, Artifact]) -> None:
    config, build_part = default(DISPATCH)
    artifact = artifacts["dispatch_gemm"]
    with Gang(DISPATCH, DEVICE, POLICY, spin_limit_s=1.0, deadlines=DEADLINES) as gang:
        starved = config.replace(num_comm_sms=0)
        result = measure_trial(gang, starved, build_part, artifact, TrialPlan.of(DISPATCH, POLICY))
        assert result.status == "fault:spin_limit"
        assert "waited for arrivals[" in result.sentence
        assert "Waits are bounded by 1 s." in result.sentence
        assert gang.respawns == 0, "the ranks came back by themselves"
        again = measure_trial(gang, config, build_part, artifact, TrialPlan.of(DISPATCH, POLICY))
        assert again.status == "ok", again.sentence


def test_an_altered_artifact_is_refused_by_every_rank(
    dispatch_gang: Gang, artifacts: dict[str, Artifact], tmp_path: Path
) -> None:
    artifact = artifacts["dispatch_gemm"]
    altered = tmp_path / "altered.so"
    altered.write_bytes(artifact.path.read_bytes()[:-1])
    outcome = dispatch_gang.load(altered, artifact.sha256, default(DISPATCH)[1])
    assert outcome.status == "fault:ArtifactError"
    assert "is not what was built" in outcome.sentence
    assert dispatch_gang.load(artifact.path, artifact.sha256, default(DISPATCH)[1]).ok


def test_a_killed_rank_in_a_real_launch_is_a_crash_and_the_next_trial_works(
    dispatch_gang: Gang, artifacts: dict[str, Artifact]
) -> None:
    config, build_part = default(DISPATCH)
    artifact = artifacts["dispatch_gemm"]
    assert dispatch_gang.load(artifact.path, artifact.sha256, build_part).ok
    dispatch_gang._ranks[1].kill()
    assert dispatch_gang.time(config, "fused", 0, 3).status == "crashed"
    result = measure_trial(dispatch_gang, config, build_part, artifact, TrialPlan.of(DISPATCH, POLICY))
    assert result.status == "ok", result.sentence
