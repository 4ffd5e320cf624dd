"""`tktune doctor` on GPUs: it measures once, keeps what it found, says why it could not, and never hangs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from gpu_places import needs_a_gpu_each

from tktune.build.cache import ArtifactCache
from tktune.core.device_cuda import cuda_device_classes
from tktune.core.topology_cuda import topology
from tktune.families.link_model import PEER_WAYS, WAYS, LinkFacts
from tktune.gang import link_survey
from tktune.gang.gang import Gang
from tktune.gang.link_survey import curve_plan, survey

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def own_cache(tmp_path_factory):
    return ArtifactCache(tmp_path_factory.mktemp("doctor"))


def doctor(places, *words):
    environment = {**os.environ, "TKTUNE_DB": str(places / "t.db"), "TKTUNE_CACHE_DIR": str(places / "cache")}
    return subprocess.Popen(
        [sys.executable, "-m", "tktune", "doctor", "--json", *words],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_one_gpu_is_measured_alone(own_cache):
    device = cuda_device_classes()[0]
    found = survey(1, device, own_cache)
    assert found.missing == () and found.gates == len(curve_plan(1, device)) + 1
    assert {curve.way for curve in found.facts.curves} == set(WAYS) - set(PEER_WAYS)
    assert found.facts.copy_engine_gb_s is None and found.facts.round_trip_us is None
    assert 2 < found.facts.launch_us < 50
    own = found.facts.curve("own")
    assert own.at(8) > 4 * own.at(1)
    assert 0 < found.facts.lost_share(8) < 0.2


@needs_a_gpu_each("what doctor measures of a link")
def test_a_pair_is_measured_once_and_remembered(tmp_path):
    begin = time.monotonic()
    first = doctor(tmp_path)
    out, err = first.communicate(timeout=100)
    seconds = time.monotonic() - begin
    assert first.returncode == 0, err
    said = json.loads(out)
    facts = LinkFacts.from_json(said["link"]["facts"])
    assert said["link"]["missing"] == [] and facts.world == len(cuda_device_classes())
    assert {curve.way for curve in facts.curves} == set(WAYS)
    assert all(pair["access"] for pair in said["topology"]["pairs"])
    if facts.world == 2:
        assert seconds <= 30, f"{seconds:.0f} s"
    again = doctor(tmp_path)
    out, _ = again.communicate(timeout=30)
    assert json.loads(out)["link"]["measured_at"] == pytest.approx(said["link"]["measured_at"], abs=5)
    assert json.loads(out)["link"]["seconds"] == 0


@needs_a_gpu_each("what doctor measures of a link after a rank died")
def test_a_rank_that_dies_leaves_a_sentence_and_the_rest_is_measured(own_cache, monkeypatch):
    device, killed = cuda_device_classes()[0], []
    timed = Gang.time

    def time_and_kill(gang, config, *words):
        if config["way"] == "scatter" and config["sms"] == 4 and not killed:
            killed.append(gang.pids[1])
            os.kill(gang.pids[1], signal.SIGKILL)
        return timed(gang, config, *words)

    monkeypatch.setattr(Gang, "time", time_and_kill)
    monkeypatch.setattr(link_survey, "curve_plan", lambda world, device: [("scatter", 1, 8192, (2, 4, 8))])
    found = survey(2, device, own_cache)
    assert killed and "SIGKILL" in found.missing[0]
    (curve,) = found.facts.curves
    assert curve.sms == (2, 8)  # what came before, and what a fresh gang measured after


@needs_a_gpu_each("what the link between two GPUs is called")
def test_the_topology_names_the_link():
    found = topology()
    assert found is not None and len(found.pairs) == found.gpus * (found.gpus - 1)
    assert found.driver and all(pair.over for pair in found.pairs)
