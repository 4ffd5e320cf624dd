"""gemm_combine in a real gang and from a study to a verified winner: real compiler, real rank processes, real store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tktune.build.artifact import Artifact
from tktune.build.cache import ArtifactCache
from tktune.core import status
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.families.base import family
from tktune.gang.gang import Deadlines, Gang
from tktune.gang.trial import TrialPlan, measure_trial
from tktune.search.driver import tune
from tktune.search.events import Event, Note, SpaceReady, Tee, TrialDone
from tktune.search.study import load_study
from tktune.store.results import Store

DEVICE = DeviceClass("cpu", "test", 4, 1 << 20, 1 << 22, "shm")
POLICY = Policy(flush_bytes=1 << 20, first_iterations=2, iterations=5)
PROBLEM = Problem("gemm_combine", hidden=128, cols=128, experts=4, top_k=2, tokens=48, world=2, pad=32)
DEADLINES = Deadlines(grace_s=20.0)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    cache = ArtifactCache(tmp_path_factory.mktemp("artifacts") / "cache")
    outcome = cache.build([family("gemm_combine").build_spec(default()[1], PROBLEM, DEVICE)])[0]
    assert outcome.artifact is not None, outcome.error_sentence
    return outcome.artifact


@pytest.fixture
def gang() -> Iterator[Gang]:
    with Gang(PROBLEM, DEVICE, POLICY, spin_limit_s=5.0, deadlines=DEADLINES) as made:
        yield made


def default() -> tuple[Config, Config]:
    space = family("gemm_combine").space(PROBLEM, DEVICE)
    config = space.default_config()
    return config, space.build_part(config)


def test_both_forms_are_gated_and_every_mode_is_timed(gang: Gang, artifact: Artifact) -> None:
    config, build_part = default()
    for form in ("prereduce", "pull"):
        formed = config.replace(form=form)
        result = measure_trial(gang, formed, build_part, artifact, TrialPlan.of(PROBLEM, POLICY))
        assert result.status == "ok", result.sentence
        assert result.sentence == "", "the formulas agree with what the artifact states"
        assert len(result.samples) == 5 * PROBLEM.world
        assert result.time_us is not None and result.time_us > 0
        for mode in ("comp", "comm", "serial", "peer"):
            assert gang.time(formed, mode, 0, 2).ok, mode
    assert gang.report().bodies[0]["imported"] == ["numpy"]


def test_a_split_without_compute_deadlocks_and_is_caught(artifact: Artifact) -> None:
    config, build_part = default()
    with Gang(PROBLEM, DEVICE, POLICY, spin_limit_s=1.0, deadlines=DEADLINES) as gang:
        starved = config.replace(num_comm_sms=DEVICE.sm_count)
        result = measure_trial(gang, starved, build_part, artifact, TrialPlan.of(PROBLEM, POLICY))
        assert result.status == "fault:spin_limit"
        assert "combine block" in result.sentence and "waited for landed[" in result.sentence
        assert gang.respawns == 0, "the ranks came back by themselves"
        again = measure_trial(gang, config, build_part, artifact, TrialPlan.of(PROBLEM, POLICY))
        assert again.status == "ok", again.sentence


def test_a_killed_rank_is_a_crash_and_the_next_trial_works(gang: Gang, artifact: Artifact) -> None:
    config, build_part = default()
    assert gang.load(artifact.path, artifact.sha256, build_part).ok
    gang._ranks[1].kill()
    assert gang.time(config, "fused", 0, 3).status == "crashed"
    result = measure_trial(gang, config, build_part, artifact, TrialPlan.of(PROBLEM, POLICY))
    assert result.status == "ok", result.sentence


STUDY = """
name = "tiny combine"
family = "gemm_combine"
[problem]
hidden = 64
cols = 128
experts = 4
top_k = 2
tokens = 32
world = 2
pad = 32
[policy]
iterations = 5
[search]
trials = 8
seconds = 120
finalists = 2
[pins]
COL_BLOCK = 64
RED_BLOCK = 64
STAGES = 2
CONSUMER_WARPS = 1
"""


def test_a_study_becomes_a_verified_winner_with_its_attribution(tmp_path: Path) -> None:
    path = tmp_path / "tiny.toml"
    path.write_text(STUDY)
    study = load_study(path)
    url, events = f"sqlite:///{tmp_path / 'tktune.db'}", list[Event]()
    (result,) = tune(study, url, ArtifactCache(tmp_path / "cache"), listener=Tee(events.append))

    done = [event for event in events if isinstance(event, TrialDone)]
    ready = next(event for event in events if isinstance(event, SpaceReady))
    assert len(done) == min(8, ready.feasible) == result.measured
    assert {event.status for event in done} <= {status.OK, status.CENSORED}, [e.sentence for e in done]
    assert result.winner is not None and result.time_us is not None and result.default_us is not None
    of_noise = ("disturbed", "too close to tell apart", "µs at first")  # what a shared machine may be told
    notes = [event.sentence for event in events if isinstance(event, Note)]
    assert not [sentence for sentence in notes if not any(words in sentence for words in of_noise)]
    found = result.attribution
    assert found is not None and found.fused_us and found.comp_us and found.peer_us
    assert found.comm_us and found.comm_least_us and found.serial_us
    with Store.open(url, "ro") as store:
        assert store.check() == []
        winner = store.winner(result.problem, result.device)
    assert winner is not None and winner.config == result.winner
