"""Which configs a layer runs: the winner of the pair, else its kernels' own winners at one pad, else defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tktune
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.errors import NothingFeasible
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.families.base import family
from tktune.moe.choosing import LayerChoice, choose
from tktune.moe.parts import COMBINE, DISPATCH, FAMILIES, joined_config, part_problem
from tktune.store.results import Store
from tktune.store.rows import VerificationRow

DEVICE = DeviceClass("cpu", "test", 4, 1 << 20, 1 << 22, "shm")
LAYER = Problem("moe_layer", 128, 64, 8, 2, 64, world=2, weight_layout="enk")


@pytest.fixture
def url(tmp_path: Path) -> str:
    tktune.lookup.cache_clear()
    made = f"sqlite:///{tmp_path}/store.db"
    Store.open(made).close()
    return made


def chosen(url: str, layer: Problem = LAYER, *, any_pad: bool = True) -> LayerChoice:
    tktune.lookup.cache_clear()
    return choose(layer, any_pad=any_pad, policy="serving", device=DEVICE, db=url)


def configs(layer: Problem) -> dict[str, Config]:
    return {
        part: family(FAMILIES[part]).space(part_problem(layer, part), DEVICE).default_config()
        for part in (DISPATCH, COMBINE)
    }


def win(url: str, problem: Problem, config: Config, time_us: float) -> None:
    with Store.open(url) as store:
        toolchain = store.toolchain_id("g++", "13", "t" * 64, {})
        key = store.key(problem, DEVICE, Policy(), toolchain)
        artifact = (problem.digest[:32] + config.digest[:32])[:64]
        trial = store.start_trial(key, config, artifact, f"run {problem.pad} {problem.family} {time_us}")
        store.finish_trial(trial, "ok", time_us=time_us, samples=[time_us])
        row = VerificationRow(config, artifact, "finalist", time_us, (time_us,), True, "fastest")
        store.add_verification(key, f"session {problem.pad} {problem.family} {time_us}", [row])


def kernels_win(url: str, pad: int, time_us: float, **changes: Any) -> None:
    layer = LAYER.replace(pad=pad)
    for part, config in configs(layer).items():
        win(url, part_problem(layer, part), config.replace(**changes), time_us)


def test_without_winners_both_kernels_run_their_defaults_at_one_pad(url: str) -> None:
    choice = chosen(url)
    assert choice.pair is None
    assert {c.provenance for c in choice.parts.values()} == {"default"}
    assert choice.dispatch.problem.pad == choice.combine.problem.pad == choice.problem.pad
    assert choice.problem == LAYER.replace(pad=choice.problem.pad)
    assert "not tuned together" in choice.explain() and "moe_layer" in choice.explain()


def test_the_kernels_own_winners_run_where_the_pair_was_not_tuned(url: str) -> None:
    kernels_win(url, 64, 50.0, num_comm_sms=2)
    kernels_win(url, 32, 40.0, num_comm_sms=2)
    choice = chosen(url)
    assert choice.pair is None and choice.problem.pad == 32
    assert all(c.provenance == "exact" and c.config["num_comm_sms"] == 2 for c in choice.parts.values())


def test_pads_that_only_one_kernel_has_do_not_mix(url: str) -> None:
    kernels_win(url, 64, 50.0)
    first = part_problem(LAYER.replace(pad=32), DISPATCH)
    win(url, first, configs(LAYER.replace(pad=32))[DISPATCH], 1.0)
    choice = chosen(url)
    assert choice.dispatch.problem.pad == choice.combine.problem.pad == 64


def test_the_winner_of_the_pair_comes_before_the_kernels_own(url: str) -> None:
    kernels_win(url, 64, 10.0)
    layer = LAYER.replace(pad=32)
    own = configs(layer)
    pair = joined_config(own[DISPATCH].replace(num_comm_sms=3), own[COMBINE].replace(num_comm_sms=2))
    win(url, layer, pair, 90.0)
    choice = chosen(url)
    assert choice.pair is not None and choice.pair.provenance == "exact" and choice.pair.time_us == 90.0
    assert choice.problem.pad == 32
    assert (choice.dispatch.config["num_comm_sms"], choice.combine.config["num_comm_sms"]) == (3, 2)
    assert LayerChoice.from_record(choice.as_record()) == choice
    near = chosen(url, LAYER.replace(tokens=100))
    assert near.pair is not None and near.pair.provenance == "near"
    assert near.combine.problem.tokens == 100 and near.combine.measured_on is not None
    assert near.combine.measured_on.tokens == 64


def test_an_asked_pad_is_kept(url: str) -> None:
    kernels_win(url, 64, 10.0)
    choice = chosen(url, LAYER.replace(pad=32), any_pad=False)
    assert choice.problem.pad == 32 and choice.dispatch.provenance == "default"


def test_a_pair_that_was_found_wrong_here_is_not_served_from_nearby(url: str) -> None:
    layer, asked = LAYER.replace(pad=32), LAYER.replace(pad=32, tokens=100)
    pair = joined_config(*configs(layer).values())
    win(url, layer, pair, 90.0)
    assert chosen(url, asked).pair is not None
    with Store.open(url) as store:
        key = store.key(asked, DEVICE, Policy(), store.toolchain_id("g++", "13", "t" * 64, {}))
        store.record_trial(key, pair, "f" * 64, "wrong", run_id="later", detail={"sentence": "differs"})
    assert chosen(url, asked).pair is None


def test_a_device_on_which_a_kernel_has_no_config_gives_its_sentence(url: str) -> None:
    tiny = DeviceClass("cpu", "tiny", 1, 1 << 10, 1 << 22, "shm")
    tktune.lookup.cache_clear()
    with pytest.raises(NothingFeasible):
        choose(LAYER, any_pad=True, policy="serving", device=tiny, db=url)
