"""The survey of a machine with real gangs whose ranks claim their times: what it plans, and what faults leave of it."""

from __future__ import annotations

import dataclasses

import pytest

from tktune.build.artifact import Artifact, BuildOutcome
from tktune.build.toolchain import Toolchain
from tktune.core.device import device_class
from tktune.core.errors import ArtifactError, GangError, ToolchainError
from tktune.families.link_model import PEER_WAYS, WAYS
from tktune.families.link_probe import space
from tktune.gang import link_survey
from tktune.gang.limits import Deadlines
from tktune.gang.link_survey import curve_plan, survey

DEVICE = device_class("sm_90a")


class Shelf:
    """Stands for the cache where there is no nvcc: an artifact a spec, never opened by the ranks of these tests."""

    def __init__(self, folder, fails=()):
        self.folder, self.fails = folder, fails

    def toolchain(self, spec):
        if "toolchain" in self.fails:
            raise ToolchainError("No nvcc was found.", "Install it.")
        return Toolchain("nvcc", self.folder, "nvcc 13", ())

    def build(self, specs):
        outcomes = []
        for number, spec in enumerate(specs):
            path = self.folder / f"{number}.cubin"
            path.touch()
            made = Artifact(str(number), path, str(number) * 64, 0, {}, "t", "now")
            failed = spec.source.stem in self.fails
            outcomes.append(
                BuildOutcome(spec, str(number), None if failed else made, error_sentence="No." * failed)
            )
        return outcomes


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    problem = space.probe_problem

    def stand_in(world):
        return dataclasses.replace(problem(world), family="probe_family:FAMILY")

    monkeypatch.setattr(space, "probe_problem", stand_in)
    monkeypatch.setattr(
        link_survey,
        "DEADLINES",
        Deadlines(prepare_s=20, load_s=5, gate_s=5, time_s=3, iteration_s=0, grace_s=0.3),
    )
    monkeypatch.setenv("PROBE_FLAG", str(tmp_path / "flag"))
    return Shelf(tmp_path)


def test_everything_is_gated_and_measured(shelf):
    said = []
    found = survey(2, DEVICE, shelf, listen=said.append)
    facts = found.facts
    assert found.missing == () and said == ["2 ranks sit at their GPUs; measuring."]
    assert {curve.way for curve in facts.curves} == set(WAYS)
    assert found.gates == len(curve_plan(2, DEVICE)) + 1
    assert facts.curve("scatter", 4).at(8) == pytest.approx(320)
    assert {c.row_bytes for c in facts.curves if c.way == "scatter"} == set(space.ROW_BYTES)
    assert (facts.round_trip_us, facts.launch_us) == (2.5, 5.0)
    assert facts.lost_share(8) == pytest.approx(8 / 132, rel=1e-3)
    assert found.toolchain.version == "nvcc 13" and 0 < found.seconds < 30


def test_one_gpu_has_local_parts_only(shelf):
    found = survey(1, DEVICE, shelf)
    assert found.missing == ()
    assert {curve.way for curve in found.facts.curves} == set(WAYS) - set(PEER_WAYS)
    assert found.facts.round_trip_us is None and found.facts.launch_us == 5.0


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("sigkill scatter 1 once", "died while timing: killed by SIGKILL"),
        ("hang pull 0 once", "still timing after 3 s"),
        ("raise echo 1 once", "asked to raise"),
    ],
)
def test_a_fault_costs_one_point_and_a_sentence(shelf, monkeypatch, fault, sentence):
    monkeypatch.setenv("PROBE_FAULT", fault)
    found = survey(2, DEVICE, shelf)
    (missing,) = found.missing
    assert sentence in missing, missing
    whole = sum(len(sms) for *_, sms in curve_plan(2, DEVICE))
    there = sum(len(curve.sms) for curve in found.facts.curves)
    assert there == whole - (0 if fault.startswith("raise") else 1)
    assert found.facts.gemm_us[0][0] == 0


def test_a_second_death_ends_it(shelf, monkeypatch):
    monkeypatch.setenv("PROBE_FAULT", "sigkill pull 0")
    found = survey(2, DEVICE, shelf)
    assert len(found.missing) == 2
    assert {curve.way for curve in found.facts.curves} == {"scatter", "scatter_own"}
    assert found.facts.gemm_us == ()


def test_copies_that_come_wrong_are_not_timed(shelf, monkeypatch):
    monkeypatch.setenv("PROBE_FAULT", "wrong push 0")
    found = survey(2, DEVICE, shelf)
    assert {curve.way for curve in found.facts.curves} == set(WAYS) - {"push"}
    assert "push is not measured (wrong)" in found.missing[0] and "rows came wrong" in found.missing[0]


def test_time_that_is_up_leaves_what_there_is(shelf):
    found = survey(2, DEVICE, shelf, budget_s=0.0)
    assert found.facts.curves == () and found.missing[0].startswith("Time is up")


def test_ranks_that_cannot_sit_down_are_an_error_in_words(shelf, monkeypatch):
    monkeypatch.setenv("PROBE_FAULT", "absent")
    with pytest.raises(GangError, match="There is no peer access"):
        survey(2, DEVICE, shelf)


def test_what_cannot_be_built_is_an_error_or_a_sentence(shelf):
    with pytest.raises(ArtifactError, match="cannot be built"):
        survey(1, DEVICE, Shelf(shelf.folder, fails=("link_probe",)))
    with pytest.raises(ToolchainError):
        survey(1, DEVICE, Shelf(shelf.folder, fails=("toolchain",)))
    found = survey(1, DEVICE, Shelf(shelf.folder, fails=("grouped_gemm",)))
    assert found.facts.gemm_us == () and found.facts.curves and "GEMM" in found.missing[0]


def test_the_plan_asks_for_scatters_first_and_for_what_fits():
    plan = curve_plan(2, DEVICE)
    assert [entry[0] for entry in plan[:6]] == ["scatter"] * 3 + ["scatter_own"] * 3
    small = curve_plan(2, device_class("sm_120a"))
    assert ("scatter", 4, 14336, (2, 8, 16, 32)) in plan
    assert 14336 not in {row_bytes for _, _, row_bytes, _ in small}
