"""The commands where ranks may share a GPU: nothing is measured, and nothing that is asked for is noted to be tuned."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tktune.core import device_cuda
from tktune.core.device import device_class
from tktune.core.sharing import VARIABLE
from tktune.core.topology_cuda import Topology

Run = Callable[..., Any]
HOPPER = device_class("sm_90a")
SHAPE = [
    "--hidden",
    "512",
    "--cols",
    "512",
    "--experts",
    "8",
    "--top-k",
    "2",
    "--tokens",
    "64",
    "--world",
    "2",
]


@pytest.fixture(autouse=True)
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_cuda, "cuda_device_classes", lambda: [HOPPER])
    monkeypatch.setattr("tktune.cli.doctor_link.topology", lambda: Topology(1, (), "580.65.06"))
    monkeypatch.setenv(VARIABLE, "1")


@pytest.fixture
def pair(study: Run) -> str:
    path: str = study('family = "dispatch_gemm"', 'device = "cuda"')
    return path


def test_a_run_ends_with_2_and_one_sentence_and_leaves_nothing(tktune: Run, pair: str, places: Path) -> None:
    before = sorted(places.rglob("*"))
    ended = tktune("run", pair)
    assert ended.code == 2 and VARIABLE in ended.err and "Traceback" not in ended.err
    assert len(ended.err.strip().splitlines()) == 1
    assert sorted(places.rglob("*")) == before


def test_a_dry_run_shows_the_space_all_the_same(tktune: Run, study: Run) -> None:
    path = study('device = "cuda"', "hidden = 512", "cols = 768", "pad = 128", "tokens = 200")
    ended = tktune("run", path, "--dry-run")
    assert ended.code == 0 and "configs" in ended.out, ended


def test_doctor_says_that_gpus_may_be_shared_and_measures_no_link(
    tktune: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def survey(*_: Any, **__: Any) -> None:
        raise AssertionError("it measured")

    monkeypatch.setattr("tktune.gang.link_survey.survey", survey)
    ended = tktune("doctor", "--measure")
    assert ended.code == 0, ended.out
    (said,) = [line for line in ended.out.splitlines() if "sharing" in line.split()]
    assert f"{VARIABLE}=1" in said and "nothing can be timed" in said
    assert "not measured: The link measures" in ended.out


def test_doctor_names_a_word_that_is_none(tktune: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "yes")
    ended = tktune("doctor")
    assert ended.code == 1 and f"{VARIABLE} is 'yes'." in ended.out


@pytest.mark.parametrize(("word", "rows"), [("1", 0), ("0", 1)])
def test_a_lookup_asks_for_no_tuning(
    tktune: Run, places: Path, monkeypatch: pytest.MonkeyPatch, word: str, rows: int
) -> None:
    from tktune.store.results import Store

    monkeypatch.setenv(VARIABLE, word)
    url = f"sqlite:///{places / 't.db'}"
    with Store.open(url):
        pass
    assert tktune("lookup", "--family", "dispatch_gemm", *SHAPE, "--device", "cuda", "--db", url).code == 0
    with Store.open(url) as store:
        assert len(list(store.wanted())) == rows
