"""What every backend of the store must do, run against each of them."""

from __future__ import annotations

import math

import pytest
from store_cases import ART, DEVICE, POLICY, PROBLEM, config, open_key, prove, toolchain, verify, win

import tktune
from tktune.core.config import Config
from tktune.core.errors import AlreadyMeasured, DatabaseError
from tktune.families.base import family
from tktune.store.reader import reader
from tktune.store.results import Store
from tktune.store.rows import AttributionRow, Sample, VerificationRow
from tktune.store.winners import winners_near, wrong_configs


def test_one_fact_has_one_row_however_often_and_by_whomever_it_is_named(store: Store, url: str) -> None:
    key = open_key(store)
    with Store.open(url) as other:
        assert open_key(other) == key
    assert store.stats()["problems"] == store.stats()["policies"] == store.stats()["toolchains"] == 1


def test_a_key_can_be_spelt_out_again(store: Store) -> None:
    facts = store.key_facts(open_key(store))
    assert (facts.problem, facts.device, facts.policy) == (PROBLEM, DEVICE, POLICY)
    assert facts.device.display_name == "a test machine"
    assert facts.toolchain.kind == "g++" and facts.toolchain.detail == {"flags": ["-O3"]}


def test_a_started_row_stands_before_the_launch_and_ends_with_its_samples(store: Store, url: str) -> None:
    key = open_key(store)
    trial_id = store.start_trial(key, config(1), ART, "run-1")
    with Store.open(url, mode="ro") as reader:
        (row,) = reader.trials(key)
        assert (row.status, row.ended_at, row.run_id, row.attempt) == ("started", None, "run-1", 1)
    store.finish_trial(
        trial_id,
        "ok",
        time_us=12.5,
        samples=[(0, 0, 0, 12.0), (0, 0, 1, 12.5), (1, 0, 0, 13.0)],
        detail={"sentence": "fine"},
        build_us=3.0,
        gate_error=0.001,
        clocks={"sm_mhz": 1980},
    )
    (row,) = store.trials(key)
    assert (row.status, row.time_us, row.samples, row.config) == ("ok", 12.5, 3, config(1))
    assert (row.detail, row.build_us, row.gate_error, row.clocks) == (
        {"sentence": "fine"},
        3.0,
        0.001,
        {"sm_mhz": 1980},
    )
    assert store.samples(trial_id) == [Sample(0, 0, 0, 12.0), Sample(0, 0, 1, 12.5), Sample(1, 0, 0, 13.0)]
    assert row.ended_at is not None and row.ended_at >= row.started_at


def test_samples_without_ranks_are_those_of_the_slowest_rank_in_order(store: Store) -> None:
    trial_id = prove(store, open_key(store), config(1), 100.0)
    assert [(s.rank, s.iteration, s.time_us) for s in store.samples(trial_id)] == [
        (-1, 0, 99.0),
        (-1, 1, 100.0),
        (-1, 2, 101.0),
    ]


@pytest.mark.parametrize("status", ["ok", "censored", "wrong", "build_failed", "refused:smem"])
def test_a_verdict_is_never_measured_again(store: Store, status: str) -> None:
    key = open_key(store)
    trial_id = store.start_trial(key, config(1), ART, "run")
    store.finish_trial(trial_id, status, time_us=5.0 if status == "ok" else None)
    with pytest.raises(AlreadyMeasured, match=status) as refusal:
        store.start_trial(key, config(1), ART, "run")
    assert refusal.value.status == status
    with pytest.raises(AlreadyMeasured):
        store.finish_trial(trial_id, "ok", time_us=1.0)
    assert store.start_trial(key, config(1), "b" * 64, "run") != trial_id  # a new artifact is another matter


def test_a_running_config_is_not_started_twice(store: Store) -> None:
    key = open_key(store)
    store.start_trial(key, config(1), ART, "run")
    with pytest.raises(AlreadyMeasured, match="being measured by process"):
        store.start_trial(key, config(1), ART, "run")


def test_two_ends_without_a_verdict_are_a_quarantine(store: Store) -> None:
    key = open_key(store)
    for attempt in (1, 2):
        assert store.attempts(key, config(1)) == attempt - 1
        assert store.quarantined(key) == set()
        trial_id = store.start_trial(key, config(1), ART, "run")
        store.finish_trial(trial_id, "timeout:time", detail={"sentence": "rank 1 was late"})
    with pytest.raises(AlreadyMeasured, match="quarantined"):
        store.start_trial(key, config(1), ART, "run")
    assert store.quarantined(key) == {config(1)}
    assert store.quarantined(key, lambda _: "b" * 64) == set()
    assert [row.attempt for row in store.trials(key)] == [1, 2]
    assert store.measured(key) == {}


def test_the_user_stopping_a_run_does_not_count_against_the_config(store: Store) -> None:
    key = open_key(store)
    for _ in range(3):
        store.finish_trial(store.start_trial(key, config(1), ART, "run"), "abandoned")
    prove(store, key, config(1))
    assert store.quarantined(key) == set() and config(1) in store.measured(key)


def test_a_trial_that_was_never_launched_is_recorded_once(store: Store) -> None:
    key = open_key(store)
    first = store.record_trial(key, config(1), "", "refused:smem", detail={"sentence": "too big"})
    assert store.record_trial(key, config(1), "", "refused:smem") == first
    with pytest.raises(AlreadyMeasured):
        store.record_trial(key, config(1), "", "refused:threads")
    assert store.measured(key, lambda _: ART)[config(1)].status == "refused:smem"


def test_wrong_overrules_the_verdict_that_stands_and_takes_the_winner_away(store: Store) -> None:
    key = win(store, PROBLEM, config(1))
    trial_id = store.record_trial(key, config(1), ART, "wrong", detail={"sentence": "found while verifying"})
    assert store.record_trial(key, config(1), ART, "wrong") == trial_id
    assert store.winner(PROBLEM, DEVICE) is None
    assert store.measured(key)[config(1)].status == "wrong"
    assert [row.status for row in store.trials(key)] == ["ok", "wrong"]
    for refused in ("build_failed", "censored"):
        with pytest.raises(AlreadyMeasured, match="verdict wrong"):
            store.record_trial(key, config(1), ART, refused)
    with pytest.raises(AlreadyMeasured, match="verdict wrong"):
        store.start_trial(key, config(1), ART, "run")
    assert store.check() == []


def test_measured_keeps_to_the_artifact_that_would_be_built_today(store: Store) -> None:
    key = open_key(store)
    prove(store, key, config(1), 100.0, artifact="b" * 64)
    prove(store, key, config(2), 90.0)
    assert set(store.measured(key)) == {config(1), config(2)}
    assert set(store.measured(key, lambda _: ART)) == {config(2)}


@pytest.mark.parametrize(
    "ending",
    [
        {"status": "splendid"},
        {"status": "ok"},
        {"status": "ok", "time_us": -1.0},
        {"status": "ok", "time_us": math.nan},
        {"status": "ok", "time_us": 1.0, "samples": [1.0, math.inf]},
    ],
)
def test_an_end_that_contradicts_itself_is_refused_and_changes_nothing(store: Store, ending: dict) -> None:
    key = open_key(store)
    trial_id = store.start_trial(key, config(1), ART, "run")
    with pytest.raises(ValueError):
        store.finish_trial(trial_id, **ending)
    assert store.trials(key)[0].status == "started"
    with pytest.raises(DatabaseError, match="no trial 999"):
        store.finish_trial(999, "wrong")


def test_a_gate_of_nan_is_stored_as_a_verdict(store: Store) -> None:
    key = open_key(store)
    trial_id = store.start_trial(key, config(1), ART, "run")
    store.finish_trial(trial_id, "wrong", gate_error=math.nan, detail={"errors": [math.nan, 1.0]})
    (row,) = store.trials(key)
    assert row.gate_error is None and row.detail == {"errors": ["nan", 1.0]}


def test_doubled_samples_of_one_iteration_are_refused_whole(store: Store) -> None:
    key = open_key(store)
    trial_id = store.start_trial(key, config(1), ART, "run")
    with pytest.raises(DatabaseError):
        store.finish_trial(trial_id, "ok", time_us=1.0, samples=[(0, 0, 0, 1.0), (0, 0, 0, 2.0)])
    (row,) = store.trials(key)
    assert (row.status, row.samples) == ("started", 0)


def test_the_winner_is_the_last_verified_one_not_the_fastest(store: Store) -> None:
    assert store.winner(PROBLEM, DEVICE) is None
    key = win(store, PROBLEM, config(1), 80.0, session="s1")
    prove(store, key, config(2), 70.0)
    verify(store, key, "s2", config(2), 95.0, others=(config(1),))
    winner = store.winner(PROBLEM, DEVICE)
    assert winner is not None
    assert (winner.config, winner.time_us, winner.session_id, winner.samples) == (config(2), 95.0, "s2", 2)
    assert (winner.problem, winner.device, winner.policy) == (PROBLEM, DEVICE, POLICY)
    assert winner.toolchain.version == "g++ one" and winner.artifact_digest == ART
    assert store.winners() == [winner]
    assert [v.session_id for v in store.verifications(key)] == ["s1", "s2", "s2"]
    assert store.check() == []


def test_a_winner_found_wrong_later_never_comes_back_under_any_policy_or_toolchain(store: Store) -> None:
    key = win(store, PROBLEM, config(1), session="s1")
    prove(store, key, config(2))
    verify(store, key, "s2", config(2))
    warm = open_key(store, policy=POLICY.__class__(name="warm", cache_state="warm"), built_by="two")
    store.finish_trial(store.start_trial(warm, config(2), ART, "run"), "wrong")
    winner = store.winner(PROBLEM, DEVICE)
    assert winner is not None and winner.config == config(1)  # the last verification that still stands
    store.finish_trial(store.start_trial(warm, config(1), ART, "run"), "wrong")
    assert store.winner(PROBLEM, DEVICE) is None and store.winners() == []
    with pytest.raises(ValueError, match="cannot be chosen"):
        verify(store, key, "s3", config(1))
    assert store.check() == []


def test_wrong_on_another_problem_or_in_another_artifact_does_not_unseat_a_winner(store: Store) -> None:
    key = win(store, PROBLEM, config(1))
    other = open_key(store, PROBLEM.replace(tokens=256))
    store.finish_trial(store.start_trial(other, config(1), ART, "run"), "wrong")
    store.finish_trial(store.start_trial(key, config(1), "b" * 64, "run"), "wrong")
    winner = store.winner(PROBLEM, DEVICE)
    assert winner is not None and winner.artifact_digest == ART


def test_the_newest_verification_over_all_toolchains_and_policies_of_a_name_wins(store: Store) -> None:
    win(store, PROBLEM, config(1), 50.0, session="s1")
    win(store, PROBLEM, config(2), 60.0, session="s2", built_by="two", artifact="b" * 64)
    winner = store.winner(PROBLEM, DEVICE)
    assert winner is not None and winner.config == config(2) and winner.toolchain.version == "g++ two"
    win(store, PROBLEM, config(3), 70.0, session="s3", policy=POLICY.__class__(flush_bytes=9))
    winner = store.winner(PROBLEM, DEVICE)
    assert winner is not None and winner.config == config(3)
    assert [w.config for w in store.winners()] == [config(3), config(2), config(1)]
    assert store.winner(PROBLEM, DEVICE, "warm") is None


def test_sessions_keep_their_order_when_the_clock_steps_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = win(store, PROBLEM, config(1), session="s1")
    prove(store, key, config(2))
    with monkeypatch.context() as patch:
        patch.setattr("time.time", lambda: 1000.0)
        verify(store, key, "s2", config(2))
    winner = store.winner(PROBLEM, DEVICE)
    assert winner is not None and winner.session_id == "s2"


def test_a_session_chooses_at_most_one_and_only_a_proved_config(store: Store) -> None:
    key = open_key(store)
    with pytest.raises(ValueError, match="no ok trial"):
        verify(store, key, "s1", config(1))
    prove(store, key, config(1))
    row = VerificationRow(config(1), ART, "default", 1.0, (1.0,), True, "")
    with pytest.raises(ValueError, match="chooses 2"):
        store.add_verification(key, "s1", [row, row])
    store.add_verification(key, "s1", [VerificationRow(config(1), ART, "default", 1.0, (1.0,), False, "")])
    assert store.winner(PROBLEM, DEVICE) is None


def test_near_winners_differ_in_tokens_alone_nearest_in_log_ratio_first(store: Store) -> None:
    for tokens in (31, 32, 64, 256, 512, 513):
        win(store, PROBLEM.replace(tokens=tokens), config(tokens % 7))
    win(store, PROBLEM.replace(tokens=128, pad=64), config(0))
    win(store, PROBLEM.replace(tokens=64, hidden=512), config(0))
    near = [w.problem.tokens for w in store.near_winners(PROBLEM, DEVICE)]
    assert near == [256, 64, 512, 32]
    assert store.near_winners(PROBLEM, DEVICE.__class__(**{**DEVICE.key, "sm_count": 8})) == []


def test_attributions_come_back_as_they_were_given(store: Store) -> None:
    key = open_key(store)
    rows = [
        AttributionRow(config(1), ART, "comp", None, 80.0, (79.0, 80.0)),
        AttributionRow(config(1), ART, "comm", 1, 30.0, (30.0,)),
        AttributionRow(config(1), ART, "comm", 2, 25.0, (25.0,)),
    ]
    store.add_attribution(key, "s1", rows)
    found = store.attributions(key)
    assert [(a.mode, a.split, a.time_us, a.samples) for a in found] == [
        ("comp", None, 80.0, (79.0, 80.0)),
        ("comm", 1, 30.0, (30.0,)),
        ("comm", 2, 25.0, (25.0,)),
    ]
    assert {a.session_id for a in found} == {"s1"}


def test_an_artifact_built_anew_replaces_its_facts(store: Store) -> None:
    tool = toolchain(store)
    part = Config(STAGES=2)
    first = store.artifact_id(
        ART, "shared", "dispatch_gemm", part, {"smem_bytes": 1}, 10, 1.5, tool, "c" * 64
    )
    again = store.artifact_id(
        ART, "shared", "dispatch_gemm", part, {"smem_bytes": 1}, 11, 1.4, tool, "d" * 64
    )
    row = store.artifact(ART)
    assert first == again and row is not None
    assert (row.sha256, row.bytes, row.build_part, row.facts) == ("d" * 64, 11, part, {"smem_bytes": 1})
    assert store.artifact("0" * 64) is None


def test_wanted_problems_are_counted_until_they_have_a_winner(store: Store) -> None:
    assert all(store.want(PROBLEM, DEVICE) for _ in range(3))
    assert store.want(PROBLEM.replace(tokens=7), DEVICE, "warm")
    wanted = store.wanted()
    assert [(w.problem, w.device, w.policy_name, w.asked) for w in wanted] == [
        (PROBLEM, DEVICE, "serving", 3),
        (PROBLEM.replace(tokens=7), DEVICE, "warm", 1),
    ]
    assert wanted[0].last_seen >= wanted[0].first_seen
    win(store, PROBLEM, config(1))
    assert [w.policy_name for w in store.wanted()] == ["warm"]


def test_events_and_device_facts_are_kept(store: Store) -> None:
    store.event("note", "The gang was renewed.", {"loads": 200})
    (event,) = store.events("note")
    assert (event.sentence, event.detail, event.trial_id) == ("The gang was renewed.", {"loads": 200}, None)
    assert store.device_facts(DEVICE) == {}
    store.note_device_facts(DEVICE, {"link_gbps": 300, "hops": 1})
    store.note_device_facts(DEVICE, {"link_gbps": 310})
    assert store.device_facts(DEVICE) == {"link_gbps": 310, "hops": 1}


def test_stats_count_trials_by_status(store: Store) -> None:
    key = win(store, PROBLEM, config(1))
    store.record_trial(key, config(2), "", "refused:smem")
    stats = store.stats()
    assert stats["statuses"] == {"ok": 1, "refused:smem": 1} and stats["trials"] == 2
    assert (stats["samples"], stats["winners"], stats["sessions"]) == (3, 1, 1)
    assert stats["schema"] == store.schema_version and stats["bytes"] > 0
    assert store.keys() == [key]


def test_a_store_opened_for_reading_changes_nothing(store: Store, url: str) -> None:
    key = open_key(store)
    with Store.open(url, mode="ro") as reader:
        assert open_key(reader) == key
        with pytest.raises(DatabaseError, match="reading only"):
            reader.start_trial(key, config(1), ART, "run")


def test_upgrading_what_is_up_to_date_changes_nothing(store: Store, url: str) -> None:
    win(store, PROBLEM, config(1))
    assert Store.upgrade(url) == (store.schema_version, store.schema_version)
    assert store.winner(PROBLEM, DEVICE) is not None


def test_the_light_reader_of_lookups_answers_as_the_store_does(store: Store, url: str) -> None:
    win(store, PROBLEM, config(1), 80.0)
    win(store, PROBLEM.replace(tokens=64), config(2), 40.0)
    store.record_trial(open_key(store), config(3), ART, "wrong")
    with reader(url) as opened:
        assert opened is not None
        found = winners_near(opened.rows, PROBLEM, DEVICE, "serving")
        assert found == [store.winner(PROBLEM, DEVICE), *store.near_winners(PROBLEM, DEVICE)]
        assert wrong_configs(opened.rows, PROBLEM, DEVICE) == {config(3).digest}
        assert opened.want(PROBLEM, DEVICE, "warm")
    assert [(w.policy_name, w.asked) for w in store.wanted()] == [("warm", 1)]


def test_a_lookup_reads_every_backend(store: Store, url: str) -> None:
    changes = {"family": "grouped_gemm", "world": 1, "ep_world": 1, "ep_rank": 0}
    problem = PROBLEM.replace(**changes)
    space = family("grouped_gemm").space(problem, DEVICE)
    win(store, problem, space.default_config(), 80.0)
    asked = {"hidden": 256, "cols": 256, "experts": 8, "top_k": 2, "device": DEVICE, "db": url}
    assert tktune.lookup("grouped_gemm", tokens=128, **asked).provenance == "exact"
    assert tktune.lookup("grouped_gemm", tokens=256, **asked).provenance == "near"
    assert tktune.lookup("grouped_gemm", tokens=9999, **asked).provenance == "default"
    assert len(store.wanted()) == 2


def test_a_stopped_run_leaves_no_started_row(store: Store) -> None:
    key = open_key(store)
    prove(store, key, config(0))
    store.start_trial(key, config(1), ART, "mine")
    store.start_trial(key, config(2), ART, "another")
    assert store.abandon("mine") == 1 and store.abandon("mine") == 0
    assert [row.status for row in store.trials(key)] == ["ok", "abandoned", "started"]
