"""Ranks that share a GPU: where a gang seats them, that what they take is never a time, and that an operator's ranks may
only when all of them say so.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import types

import pytest
from cuda_artifacts import problem_of

pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed (the extra `cuda`)")

from tktune.build.cache import ArtifactCache
from tktune.core.config import Config
from tktune.core.device import device_class
from tktune.core.errors import DeviceAbsent, GangError, WordsError
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.core.sharing import VARIABLE
from tktune.gang import link_survey, telemetry
from tktune.gang.gang import Gang, Outcome
from tktune.gang.protocol import seat_from_json, seat_to_json
from tktune.gang.trial import TrialPlan, measure_trial
from tktune.search.driver import tune
from tktune.search.study import load_study

HOPPER = device_class("sm_90a")
PAIR = Problem("dispatch_gemm", 512, 768, 16, 4, 200, world=2, weight_layout="enk")


@pytest.fixture
def one_gpu(monkeypatch):
    """A host with one GPU, that ranks may share."""
    monkeypatch.setattr("tktune.core.device_cuda.cuda_device_classes", lambda: [HOPPER])
    monkeypatch.setattr(telemetry.Telemetry, "open", lambda indices: None)
    monkeypatch.setenv(VARIABLE, "1")
    return monkeypatch


def test_a_gang_seats_both_ranks_at_the_one_gpu_and_knows_it(one_gpu):
    gang = Gang(PAIR, HOPPER, Policy())
    assert gang._device_indices == (0, 0) and gang.takes_turns
    gang._control = types.SimpleNamespace(fd=3)
    for rank in range(2):
        seat = seat_from_json(json.loads(json.dumps(seat_to_json(gang._seat(rank)))))
        assert (seat.rank, seat.device_index) == (rank, 0)
    gang._control = None
    assert not Gang(problem_of(), HOPPER, Policy()).takes_turns  # one rank has it to itself
    one_gpu.setenv(VARIABLE, "0")
    apart = Gang(PAIR, HOPPER, Policy())
    assert apart._device_indices == (0, 1) and not apart.takes_turns


def test_ranks_that_are_told_their_gpus_keep_them(one_gpu):
    assert Gang(PAIR, HOPPER, Policy(), device_indices=[2, 1])._device_indices == (2, 1)


def test_telemetry_is_asked_of_the_shared_gpu_for_each_rank(one_gpu):
    asked = []
    one_gpu.setattr(telemetry.Telemetry, "open", asked.append)
    Gang(PAIR, HOPPER, Policy())
    assert asked == [(0, 0)]


class Turns:
    """A gang whose ranks share a GPU, as far as a trial looks at it."""

    survived = 0

    def load(self, path, sha256, part):
        return Outcome("ok", replies=[{"facts": {}}] * 2)

    def gate(self, config, routing, seed):
        body = {"passed": True, "worst_error": 0.0, "tolerance": 1.0}
        return Outcome("ok", replies=[body, body])

    def time(self, config, mode, seed, iterations):
        us = [2000.0] * iterations
        return Outcome("ok", replies=[{"us": us}] * 2, worst_us=us, took_turns=True)


def test_a_trial_takes_no_times_from_ranks_that_took_turns():
    artifact = types.SimpleNamespace(path="nowhere", sha256="0")
    with pytest.raises(GangError, match=r"took turns.*Give each rank a GPU of its own"):
        measure_trial(Turns(), Config(A=1), Config(A=1), artifact, TrialPlan(("uniform",)))


def test_an_outcome_of_a_gang_says_whether_its_ranks_took_turns(one_gpu, monkeypatch):
    def timed(gang, *_):
        return Outcome("ok", replies=[{"us": [5.0]}, {"us": [7.0]}])

    monkeypatch.setattr(Gang, "_launch", timed)
    shared = Gang(PAIR, HOPPER, Policy()).time(Config(A=1), "fused", 0, 1)
    assert shared.worst_us == [7.0] and shared.took_turns
    apart = Gang(PAIR, HOPPER, Policy(), device_indices=[0, 1]).time(Config(A=1), "fused", 0, 1)
    assert apart.worst_us == [7.0] and not apart.took_turns


def test_a_run_is_refused_before_anything_is_opened(one_gpu, tmp_path):
    study = tmp_path / "study.toml"
    study.write_text(
        'name = "two"\nfamily = "dispatch_gemm"\ndevice = "cuda"\n[problem]\nhidden = 512\ncols = 512\n'
        "experts = 8\ntop_k = 2\ntokens = 64\nworld = 2\n"
    )
    with pytest.raises(WordsError, match=VARIABLE):
        tune(load_study(str(study)), f"sqlite:///{tmp_path}/t.db", ArtifactCache(tmp_path / "cache"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["study.toml"]


def test_a_link_between_ranks_that_share_a_gpu_is_not_measured(one_gpu, tmp_path):
    one_gpu.setattr(ArtifactCache, "toolchain", lambda self, spec: None)
    with pytest.raises(GangError, match="no link to measure"):
        link_survey.survey(2, HOPPER, ArtifactCache(tmp_path))


def test_too_few_gpus_name_the_way_to_check_results(monkeypatch):
    from tktune.families.cuda import driver

    monkeypatch.setattr(driver.torch.cuda, "device_count", lambda: 1)
    with pytest.raises(DeviceAbsent, match=rf"no GPU number 1; 1 answer.*{VARIABLE}=1"):
        driver.attach(1)


# An operator's ranks.


def sit(rank, rendezvous, uuids, words, said):
    import torch
    import torch.distributed as dist

    from tktune.core.errors import ProblemError
    from tktune.runtime import cuda_exchange

    os.environ[VARIABLE] = words[rank]
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    torch.cuda.get_device_properties = lambda index: types.SimpleNamespace(uuid=uuids[rank])
    try:
        cuda_exchange.each_on_its_own_gpu(dist.group.WORLD, 0)
        said.put((rank, ""))
    except ProblemError as error:
        said.put((rank, str(error)))
    dist.barrier()
    os._exit(0)


@pytest.mark.parametrize(
    ("uuids", "words", "seated"),
    [
        ("aa", "11", True),
        ("ab", "00", True),
        ("aa", "00", False),
        ("aa", "10", False),  # the other one does not know that it is waited for
        ("aa", "1?", False),
    ],
)
def test_ranks_sit_at_one_gpu_only_when_all_may(tmp_path, monkeypatch, uuids, words, seated):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    spawn = multiprocessing.get_context("spawn")
    said = spawn.SimpleQueue()
    ranks = [
        spawn.Process(target=sit, args=(r, str(tmp_path / "meet"), uuids, words, said)) for r in range(2)
    ]
    for one in ranks:
        one.start()
    for one in ranks:
        one.join(60)
        assert one.exitcode == 0
    found = dict(said.get() for _ in ranks)
    for rank in range(2):
        if seated:
            assert found[rank] == ""
        else:
            assert "Ranks 0 and 1 use the same GPU. " in found[rank] and f"{VARIABLE}=1 on all" in found[rank]
