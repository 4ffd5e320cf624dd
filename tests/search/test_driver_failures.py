"""What goes wrong in the driver's world, and what becomes of it: statuses, quarantine, sentences, the others going on."""

from __future__ import annotations

import pytest
from fakes import (
    BOTTOM,
    CPU,
    DEFAULT,
    PROBLEM,
    FakeCache,
    FakeFamily,
    World,
    of_kind,
    rows,
    study,
    tune_in,
)

from tktune.core import status
from tktune.core.config import Config
from tktune.core.errors import DeviceAbsent, GangError
from tktune.core.policy import Policy
from tktune.core.roles import Role, RoleModel, Wait
from tktune.search.driver import present_device
from tktune.search.events import BuildDone, FinalistRound, Note, TrialDone
from tktune.store.results import Store


def test_a_config_that_ends_twice_without_a_verdict_is_quarantined(url):
    world = World(fate=lambda config, command: status.timeout("gate") if config == BOTTOM else status.OK)
    result = tune_in(world, url, study(100))
    ends = [row.status for row in rows(url) if row.config == BOTTOM]
    assert ends == ["timeout:gate", "timeout:gate"]
    assert any("quarantined" in note.sentence for note in of_kind(world, Note))
    assert result.winner not in (None, BOTTOM)
    again = World(published=world.published)
    tune_in(again, url, study(100))
    assert BOTTOM not in again.gated and not of_kind(again, TrialDone)


def test_a_crash_that_does_not_repeat_costs_nothing(url):
    ends = iter([status.CRASHED])
    world = World(fate=lambda config, command: next(ends, status.OK) if config == BOTTOM else status.OK)
    result = tune_in(world, url, study(100))
    assert [row.status for row in rows(url) if row.config == BOTTOM] == ["crashed", "ok"]
    assert result.winner == BOTTOM


def test_a_build_that_fails_is_one_row_and_its_configs_are_never_issued(url):
    world = World(fails_to_build=lambda spec: spec.defines["TILE"] == "64")
    result = tune_in(world, url, study(100))
    failed = [row for row in rows(url) if row.status == status.BUILD_FAILED]
    assert len(failed) == 3 and all(row.config["TILE"] == 64 for row in failed)
    assert not any(config["TILE"] == 64 for config in world.gated)
    assert result.winner is not None and len([e for e in of_kind(world, BuildDone) if e.sentence]) == 3


def test_a_build_whose_points_are_wrong_is_left_alone(url):
    world = World(
        fate=lambda config, command: status.WRONG if config["TILE"] == 16 and command == "gate" else status.OK
    )
    tune_in(world, url, study(100))
    wrong = [row for row in rows(url) if row.status == status.WRONG]
    assert len(wrong) == 6  # two points of each of its three builds


def test_when_everything_fails_there_is_a_sentence(url):
    world = World(fate=lambda config, command: status.WRONG if command == "gate" else status.OK)
    result = tune_in(world, url, study(30))
    assert result.winner is None and "24 wrong" in result.sentence and "tktune report" in result.sentence


def test_a_default_that_fails_leaves_the_others_to_win(url):
    world = World(fate=lambda config, command: status.WRONG if config == DEFAULT else status.OK)
    result = tune_in(world, url, study(100))
    assert result.winner == BOTTOM and result.default_us is None


def test_a_finalist_that_is_wrong_on_fresh_inputs_is_out(url):
    def fate(config: Config, command: str) -> str:
        done = any(event.config == BOTTOM for event in of_kind(world, TrialDone))
        return status.WRONG if config == BOTTOM and command == "gate" and done else status.OK

    world = World(fate=fate)
    result = tune_in(world, url, study(100))
    assert result.winner not in (None, BOTTOM)
    assert any("is out" in note.sentence for note in of_kind(world, Note))


@pytest.mark.parametrize(("end", "told"), [(status.refused("mode"), False), (status.timeout("time"), True)])
def test_a_mode_that_a_family_lacks_is_left_out_and_one_that_fails_is_told(url, end, told):
    world = World(fate=lambda config, command: end if command == "peer" else status.OK)
    result = tune_in(world, url, study(10))
    assert result.attribution is not None and result.attribution.peer_us is None
    assert any("peer" in note.sentence for note in of_kind(world, Note)) is told


def test_a_config_that_another_run_is_measuring_is_left_to_it(url):
    first = World()
    tune_in(first, url, study(1))
    held = DEFAULT.replace(order="token")
    with Store.open(url) as store:
        (key,) = store.keys()
        store.start_trial(key, held, next(iter(first.published)), "another run")
        world = World(published=first.published)
        tune_in(world, url, study(72))
        assert held not in world.gated
        assert any(f"measuring {held}" in note.sentence for note in of_kind(world, Note))


def test_without_a_gang_the_run_ends_and_the_trial_is_abandoned(url):
    def fate(config: Config, command: str) -> str:
        if len(world.gated) > 20:
            raise GangError("A gang could not start.", "Run `tktune doctor`.")
        return status.OK

    world = World(fate=fate)
    with pytest.raises(GangError, match="doctor"):
        tune_in(world, url, study(20))
    ends = [row.status for row in rows(url)]
    assert ends[-1] == status.ABANDONED and ends.count(status.ABANDONED) == 1 and len(ends) > 3


def test_when_every_finalist_fails_the_next_best_are_verified_and_then_a_sentence_says_so(url):
    def fate(config: Config, command: str) -> str:
        if len(of_kind(world, TrialDone)) < 12:
            return status.OK
        return status.fault("spin_limit") if command == "time" else status.OK

    world = World(fate=fate, truth=lambda config: 100.0 + config.number("STAGES") / 10)
    result = tune_in(world, url, study(12))
    assert result.winner is None and "every finalist failed" in result.sentence
    out = [note for note in of_kind(world, Note) if "is out" in note.sentence]
    assert len(out) == len({note.sentence for note in out}) > 4
    assert {row.status for row in rows(url)} <= {status.OK, status.CENSORED}
    again = World(published=world.published)
    assert tune_in(again, url, study(12)).winner is not None


def test_a_role_model_that_breaks_a_deadlock_rule_is_refused_by_name(url):
    class Deadlocked(FakeFamily):
        def roles(self, config, problem, device):
            if config["num_comm_sms"] == 3:
                return RoleModel(
                    (Role("gemm", 9, (Wait("arrivals", "dispatch"),)), Role("dispatch", 3)), 4, 2.0
                )
            return super().roles(config, problem, device)

    world = World()
    tune_in(world, url, study(72), family=Deadlocked())
    refused = [row for row in rows(url) if row.status == status.refused("D1")]
    assert len(refused) == 24 and not any(config["num_comm_sms"] == 3 for config in world.gated)


def test_a_formula_that_the_compiler_contradicts_is_said(url):
    world = World(mismatch="smem_bytes is 9 and the formula says 1024.")
    tune_in(world, url, study(4))
    assert world.mismatch in [note.sentence for note in of_kind(world, Note)]
    with Store.open(url) as store:
        assert store.events("formula")


def test_a_chosen_config_that_is_wrong_under_another_policy_is_not_chosen(url):
    world = World()
    other = Policy(name="other")
    with Store.open(url) as store:
        spec = FakeFamily().build_spec(BOTTOM.only(("TILE", "STAGES")), PROBLEM, CPU)
        toolchain = store.toolchain_id("g++", "fake 1", "f" * 64)
        key = store.key(PROBLEM, CPU, other, toolchain)
        store.record_trial(key, BOTTOM, FakeCache(world).digest(spec), status.WRONG)
    result = tune_in(world, url, study(100))
    assert result.winner not in (None, BOTTOM)
    assert any("is not chosen" in note.sentence for note in of_kind(world, Note))


def test_a_finalist_whose_artifact_cannot_be_built_again_is_left_out(url):
    def interrupted(event: object) -> None:
        if isinstance(event, FinalistRound):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        tune_in(World(), url, study(72), listen=interrupted)
    world = World(fails_to_build=lambda spec: spec.defines["TILE"] == "64")
    result = tune_in(world, url, study(72))
    assert result.winner == DEFAULT and result.measured == 0
    assert any("TILE=64" in note.sentence for note in of_kind(world, Note))


def test_a_device_that_is_not_here_is_named():
    with pytest.raises(DeviceAbsent, match="sm_90a"):
        present_device("sm_90a")
    assert present_device("cpu").backend == "cpu"
