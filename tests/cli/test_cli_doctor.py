"""`tktune doctor` on links: tables and advice from recorded numbers, when it measures, what it keeps and what it says.

The recorded facts are those of two GPUs; no GPU is needed.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import ROOT

from tktune.build.toolchain import Toolchain
from tktune.cli import doctor_link
from tktune.cli.doctor_text import KnownLink, advice, link_table, saturated_from, topology_lines
from tktune.core import device_cuda
from tktune.core.device import device_class
from tktune.core.errors import GangError, ToolchainError
from tktune.core.topology_cuda import Pair, Topology
from tktune.families.link_model import LinkFacts
from tktune.gang import link_survey
from tktune.gang.link_survey import Survey

Run = Callable[..., Any]
DEVICE = device_class("sm_90a")
PAIR = Topology(2, (Pair(0, 1, True, True, 0, 18), Pair(1, 0, True, True, 0, 18)), "580.65.06")
TOOLCHAIN = Toolchain("nvcc", Path("nvcc"), "nvcc release 13.0, V13.0.88", ())


@pytest.fixture(scope="module")
def recorded() -> LinkFacts:
    text = (ROOT / "bench" / "results" / "link_2026-11-29.json").read_text()
    return LinkFacts.from_json(json.loads(text)["facts"])


# Words.


def test_the_table_has_a_line_for_every_curve_and_leaves_gaps_where_nothing_was_measured(
    recorded: LinkFacts,
) -> None:
    lines = link_table(recorded).splitlines()
    assert lines[0].split()[-8:] == ["1", "2", "4", "8", "12", "16", "24", "32"]
    (pull,) = [line for line in lines if line.startswith("bulk pull") and "8192 B × 24" in line]
    assert pull.split()[-6:] == ["43", "84", "164", "324", "327", "326"]
    (scatter,) = [line for line in lines if line.startswith("scatter to 4 ") and "14336" in line]
    assert scatter.split()[-7:] == ["109", "218", "428", "637", "807", "1127", "970"]
    assert len({line.index("×") for line in lines[1:] if " × " in line}) <= 2
    assert lines[-1] == "copy engine 368 GB/s, signal round trip 2.60 µs, one launch 5.0 µs of host time"
    assert len(lines) == 1 + len(recorded.curves) + 1


def test_the_advice_names_saturation_the_cost_of_places_and_of_sms(recorded: LinkFacts) -> None:
    assert advice(recorded) == (
        "From 8 SMs on the link is saturated (324 GB/s) and storing each row in 4 places takes 2.7 × as long as in one "
        "(401 GB/s gathered there)."
    )
    with_gemm = dataclasses.replace(recorded, gemm_us=((0, 1000.0), (8, 1062.0), (16, 1130.0)))
    assert advice(with_gemm).endswith("and 8 SMs given away slow a GEMM by 6.2 %.")
    assert "a grouped GEMM of 1000 µs without 8 SMs +6.2 %, 16 SMs +13.0 %" in link_table(with_gemm)


def test_the_advice_of_one_gpu_speaks_of_its_own_memory(recorded: LinkFacts) -> None:
    local = LinkFacts(1, 132, tuple(c for c in recorded.curves if "own" in c.way), launch_us=5.0)
    assert advice(local).startswith("8 SMs copy 337 GB/s within the GPU")
    assert advice(LinkFacts(1, 132, ())) == "" and link_table(LinkFacts(1, 132, ())) == ""


def test_a_link_that_is_not_full_yet_is_said_to_be_so(recorded: LinkFacts) -> None:
    pull = dataclasses.replace(recorded.curve("pull"), sms=(1, 2, 4), gb_s=(43.0, 84.0, 164.0))
    assert advice(LinkFacts(2, 132, (pull,))) == "4 SMs do not saturate the link yet (164 GB/s)."


@pytest.mark.parametrize(
    ("points", "enough"), [([(1, 43), (8, 324), (16, 327)], 8), ([(1, 10)], 1), ([(1, 100), (2, 90)], 1)]
)
def test_saturation_is_within_a_twentieth_of_the_best(points: list[tuple[int, float]], enough: int) -> None:
    assert saturated_from(points) == enough


def test_topology_says_who_reaches_whom() -> None:
    assert topology_lines(PAIR) == ["both GPUs: peer access over NVLink (18 links), native atomics"]
    pairs = tuple(Pair(a, b, {a, b} != {0, 2}, False, 0, 0) for a in range(3) for b in range(3) if a != b)
    assert topology_lines(Topology(3, pairs, "")) == [
        "0→2, 2→0: no peer access, through host memory",
        "0→1, 1→0, 1→2, 2→1: peer access over PCIe, no native atomics",
    ]
    even = tuple(Pair(a, b, True, True, 0, 18) for a in range(4) for b in range(4) if a != b)
    assert topology_lines(Topology(4, even, ""))[0].startswith("all 4 GPUs: ")


def test_the_page_shows_what_stands_in_the_results() -> None:
    made = json.loads((ROOT / "bench" / "results" / "link_2026-11-30.json").read_text())
    facts = LinkFacts.from_json(made["facts"])
    page = (ROOT / "docs" / "doctor.md").read_text()
    assert link_table(facts) in page and advice(facts) in page


# When it measures and what it keeps. The device classes, the topology and the survey stand in for GPUs.


@pytest.fixture
def surveys(monkeypatch: pytest.MonkeyPatch, recorded: LinkFacts) -> list[int]:
    """The worlds that were measured, in order."""
    done: list[int] = []

    def survey(world: int, device: Any, cache: Any, **words: Any) -> Survey:
        done.append(world)
        facts = (
            recorded if world > 1 else LinkFacts(1, 132, tuple(c for c in recorded.curves if "own" in c.way))
        )
        return Survey(dataclasses.replace(facts, launch_us=float(len(done))), TOOLCHAIN, 14, 12.0)

    monkeypatch.setattr(device_cuda, "cuda_device_classes", lambda: [DEVICE, DEVICE])
    monkeypatch.setattr(doctor_link, "topology", lambda: PAIR)
    monkeypatch.setattr(doctor_link, "_lacking", lambda: None)
    monkeypatch.setattr(link_survey, "survey", survey)
    return done


def test_the_first_time_measures_and_later_ones_show_when(tktune: Run, surveys: list[int]) -> None:
    first = tktune("doctor")
    assert first.code == 0, first
    assert surveys == [2] and "took 12 s" in first.out and "Measuring 2 GPUs" in first.err
    assert "From 8 SMs on the link is saturated" in first.out and "All is well" in first.out
    second = tktune("doctor")
    assert surveys == [2] and second.err == "" and "took" not in second.out
    assert "2 GPUs at once, driver 580.65.06, nvcc release 13.0, V13.0.88" in second.out
    assert link_table(_facts(tktune)) in second.out
    third = tktune("doctor", "--measure")
    assert third.code == 0 and surveys == [2, 2]
    assert _facts(tktune).launch_us == 2.0  # the newest counts


def _facts(tktune: Run) -> LinkFacts:
    return LinkFacts.from_json(tktune("doctor", "--no-measure", "--json").json["link"]["facts"])


def test_json_has_the_topology_the_facts_and_where_they_come_from(tktune: Run, surveys: list[int]) -> None:
    said = tktune("doctor", "--json").json
    assert said["ok"] and said["topology"]["pairs"][0]["over"] == "NVLink (18 links)"
    link = said["link"]
    assert (link["driver"], link["toolchain"], link["gates"], link["missing"]) == (
        "580.65.06",
        TOOLCHAIN.version,
        14,
        [],
    )
    assert link["advice"].startswith("From 8 SMs on") and link["measured_at"] > 0
    again = tktune("doctor", "--json").json["link"]
    assert again["seconds"] == 0 and again["facts"] == link["facts"]


def test_no_measure_measures_nothing_and_says_how(tktune: Run, surveys: list[int], places: Path) -> None:
    ended = tktune("doctor", "--no-measure")
    assert ended.code == 0 and surveys == [] and "not measured yet" in ended.out
    assert not (places / "data").exists()


def test_without_a_gpu_there_is_nothing_to_measure(tktune: Run, places: Path) -> None:
    said = tktune("doctor", "--json").json
    assert said["link"] is None and said["topology"] is None
    assert "link" not in {check["name"] for check in said["checks"]}
    asked = tktune("doctor", "--measure")
    assert asked.code == 0 and "no GPU: nothing to measure" in asked.out
    assert not (places / "data").exists()


def test_gpus_that_cannot_be_measured_together_are_measured_alone(
    tktune: Run, surveys: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = link_survey.survey

    def survey(world: int, *words: Any, **more: Any) -> Survey:
        if world > 1:
            raise GangError("Rank 1 died while taking its seat.", "Run `tktune doctor`.")
        return whole(world, *words, **more)

    monkeypatch.setattr(link_survey, "survey", survey)
    ended = tktune("doctor")
    assert ended.code == 1 and surveys == [1]
    assert "Rank 1 died while taking its seat." in ended.out and "local parts only" in ended.out


def test_gpus_without_peer_access_are_measured_alone_and_that_is_well(
    tktune: Run, surveys: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    apart = tuple(dataclasses.replace(pair, access=False) for pair in PAIR.pairs)
    monkeypatch.setattr(doctor_link, "topology", lambda: dataclasses.replace(PAIR, pairs=apart))
    ended = tktune("doctor")
    assert ended.code == 0 and surveys == [1] and "no peer access, through host memory" in ended.out


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (GangError("The device is stuck.", "Restart the host."), 1, "Restart the host."),
        (ToolchainError("No nvcc was found.", "Install it."), 0, "not measured: No nvcc was found."),
    ],
)
def test_what_cannot_be_measured_is_a_sentence_and_an_exit_code(
    tktune: Run, surveys: list[int], monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, words: str
) -> None:
    def survey(*_: Any, **__: Any) -> Survey:
        raise error

    monkeypatch.setattr(link_survey, "survey", survey)
    ended = tktune("doctor")
    assert ended.code == code and words in ended.out and "Traceback" not in ended.err


def test_it_does_not_measure_beside_a_run(tktune: Run, surveys: list[int], places: Path) -> None:
    from tktune.build.folder import CacheFolder

    folder = CacheFolder(places / "cache" / "tktune")
    folder.create()
    with folder.lock("measuring") as turn:
        assert turn.try_acquire()
        ended = tktune("doctor")
    assert ended.code == 0 and surveys == [] and "a run is measuring on this machine" in ended.out


def test_facts_that_cannot_be_kept_are_still_shown(tktune: Run, surveys: list[int], places: Path) -> None:
    (places / "bad.db").write_text("this is no database" * 100)
    ended = tktune("doctor", "--db", str(places / "bad.db"))
    assert ended.code == 1 and "It is not kept" in ended.out and "From 8 SMs on" in ended.out


def test_facts_of_a_form_that_is_not_known_are_measured_again(
    tktune: Run, surveys: list[int], places: Path
) -> None:
    url = str(places / "t.db")
    known = KnownLink(_Unknown(), "1", "nvcc", "here", 0.0)  # type: ignore[arg-type]
    doctor_link.keep(url, DEVICE, ("nvcc", "nvcc 99", "0" * 64), known)
    assert doctor_link.stored(url, DEVICE) is None
    assert tktune("doctor", "--db", url).code == 0 and surveys == [2]


class _Unknown:
    def to_json(self) -> dict[str, Any]:
        return {"form": 99}
