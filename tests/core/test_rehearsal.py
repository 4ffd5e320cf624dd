"""A rehearsed device class is one of its own: limited like the class it rehearses, measured on what is here, mixed with
neither.
"""

from __future__ import annotations

import dataclasses

import pytest

import tktune
from tktune.cli.tuning import present
from tktune.core import device_cuda
from tktune.core.device import PRESETS, DeviceClass, device_class
from tktune.core.device_cuda import gpus_for
from tktune.core.errors import DeviceAbsent, WordsError
from tktune.core.policy import serving_policy
from tktune.core.problem import Problem
from tktune.core.rehearsal import NAMES, rehearsal, rehearsal_name, serves
from tktune.families.base import family
from tktune.report.model import lookup_command
from tktune.search.driver import present_device
from tktune.search.seats import seats_of
from tktune.store.results import Store
from tktune.store.rows import VerificationRow

NAME = "sm_120a-rehearsed"
HOPPER = dataclasses.replace(PRESETS["sm_90a"], l2_bytes=52428800, display_name="NVIDIA H100")
BLACKWELL = PRESETS["sm_120a"]
PROBLEM = Problem("dispatch_gemm", 2048, 768, 128, 8, 2048, world=2, weight_layout="enk")


@pytest.fixture
def host(monkeypatch):
    def of(*classes: DeviceClass) -> None:
        monkeypatch.setattr(device_cuda, "cuda_device_classes", lambda: list(classes))

    return of


def test_it_is_limited_like_the_rehearsed_class_and_keeps_what_cannot_be_taken_off():
    found = rehearsal(HOPPER, "sm_120a")
    assert found is not None
    for name in ("sm_count", "smem_optin_bytes", "registers_per_sm", "remote_atomics"):
        assert getattr(found, name) == getattr(BLACKWELL, name), name
    for name in ("backend", "l2_bytes", "interconnect"):
        assert getattr(found, name) == getattr(HOPPER, name), name
    assert found.arch == "sm_90"  # code for it has no wgmma and runs on sm_90a
    assert str(found) == "NVIDIA H100, rehearsing sm_120a"


@pytest.mark.parametrize(
    "changes",
    [
        {"arch": "sm_89"},
        {"arch": "sm_120a"},
        {"sm_count": 109},
        {"smem_optin_bytes": 101375},
        {"backend": "cpu"},
        {"registers_per_sm": 32768},
    ],
)
def test_a_device_that_lacks_anything_cannot_rehearse(changes, host):
    unable = dataclasses.replace(HOPPER, **changes)
    assert rehearsal(unable, "sm_120a") is None
    host(unable)
    with pytest.raises(DeviceAbsent, match=r"No device of this host rehearses sm_120a.*NVIDIA H100"):
        device_class(NAME)


def test_its_name_means_this_hosts_gpu_and_a_preset_where_there_is_none(host):
    host(dataclasses.replace(HOPPER, arch="sm_89"), HOPPER)
    assert device_class(NAME) == rehearsal(HOPPER, "sm_120a")
    host()
    assert device_class(NAME) == rehearsal(PRESETS["sm_90a"], "sm_120a")
    with pytest.raises(WordsError, match=NAME):
        device_class("sm_121a-rehearsed")


def test_no_class_of_a_device_is_ever_equal_to_a_rehearsal():
    found = rehearsal(HOPPER, "sm_120a")
    assert len({found, HOPPER, BLACKWELL}) == 3 == len({one.digest for one in (found, HOPPER, BLACKWELL)})
    # Even of a GPU that is exactly what is rehearsed, apart from its arch.
    twin = dataclasses.replace(found, arch="sm_90a")
    assert twin != found and serves(HOPPER, found) and not serves(twin, BLACKWELL)
    assert [rehearsal_name(one) for one in (found, HOPPER, BLACKWELL, twin)] == [NAME, None, None, None]
    assert NAMES == (NAME,)


def test_it_is_measured_on_the_gpus_that_rehearse_it_and_nowhere_else(host):
    other = dataclasses.replace(HOPPER, l2_bytes=1 << 20)
    host(HOPPER, BLACKWELL, other, HOPPER)
    found = device_class(NAME)
    assert gpus_for(found) == [0, 3] and gpus_for(HOPPER) == [0, 3] and gpus_for(BLACKWELL) == [1]
    assert seats_of(PROBLEM, found) == [(0, 3)]
    assert present_device(NAME) == found == present(NAME) and present_device("sm_90a") == HOPPER
    host(HOPPER)
    assert gpus_for(BLACKWELL) == []
    for asked in (present, present_device):
        with pytest.raises(DeviceAbsent, match="sm_120a"):
            asked("sm_120a")
    host()
    with pytest.raises(DeviceAbsent, match="it has no GPU"):
        present(NAME)


def test_its_space_is_that_of_the_rehearsed_class():
    """Same parameters, same feasible configs: what is tuned in rehearsal can be built for the class itself."""
    bench, found = family("dispatch_gemm"), rehearsal(HOPPER, "sm_120a")
    whole = [bench.space(PROBLEM, device) for device in (BLACKWELL, found)]
    assert whole[0].parameters == whole[1].parameters and whole[0].default == whole[1].default
    few = {"RED_BLOCK": (64,), "order": ("token",), "raster_rows": (0,), "DRAW": ("dispenser",)}
    there, here = (space.restrict(few) for space in whole)
    assert set(there.feasible.configs) == set(here.feasible.configs)
    assert here.default_config()["CONSUMER_WARPS"] == 8
    model = bench.roles(here.default_config(), PROBLEM, found)
    assert model.resident_blocks == 110
    spec = bench.build_spec(here.build_part(here.default_config()), PROBLEM, found)
    assert spec.arch == "sm_90" and spec.facts["smem_bytes"] <= 101376


def test_a_rehearsed_winner_is_served_under_its_own_name_alone(tmp_path, host):
    host(HOPPER, HOPPER)
    url, found = f"sqlite:///{tmp_path / 'r.db'}", device_class(NAME)
    space = family("dispatch_gemm").space(PROBLEM, found)
    config = space.default_config().replace(num_comm_sms=12)
    with Store.open(url) as store:
        toolchain = store.toolchain_id("nvcc", "nvcc 13.0", "cd" * 32, {})
        key = store.key(PROBLEM, found, serving_policy("cuda", found.l2_bytes), toolchain)
        trial = store.start_trial(key, config, "ab" * 32, "run")
        store.finish_trial(trial, "ok", time_us=10.0)
        store.add_verification(
            key, "run", [VerificationRow(config, "ab" * 32, "finalist", 10.0, (10.0,), True, "faster")]
        )
    with Store.open(url, mode="ro") as store:
        stored = store.winner(PROBLEM, found, "serving")
        assert stored is not None and str(stored.device) == "NVIDIA H100, rehearsing sm_120a"
        assert store.winner(PROBLEM, HOPPER, "serving") is store.winner(PROBLEM, BLACKWELL, "serving") is None
    words = {"hidden": 2048, "cols": 768, "experts": 128, "top_k": 8, "tokens": 2048, "world": 2}

    def asked(device: str) -> tktune.runtime.choice.Choice:
        tktune.lookup.cache_clear()
        return tktune.lookup("dispatch_gemm", **words, weight_layout="enk", device=device, db=url)

    assert (asked(NAME).provenance, asked(NAME).config) == ("exact", config)
    assert {asked(name).provenance for name in ("cuda", "sm_90a", "sm_120a")} == {"default"}
    assert lookup_command(PROBLEM, found, "serving").endswith(f"--device {NAME}")
    assert "--device" not in lookup_command(PROBLEM, HOPPER, "serving")
