"""Random sequences of store operations against a plain model in Python, with reopening and dying drivers between."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from store_cases import ART, DEVICE, PROBLEM, config, edit, open_key, verify

from tktune.core.errors import AlreadyMeasured
from tktune.core.status import is_final
from tktune.store.results import Store

MEMORY = Path("/dev/shm")
CONFIGS = st.integers(0, 4)
ARTIFACTS = st.sampled_from([ART, "b" * 64])
ENDS = st.sampled_from(
    ["ok", "ok", "censored", "wrong", "timeout:gate", "crashed", "fault:aborted", "abandoned"]
)


class StoreMachine(RuleBasedStateMachine):
    """`ends` holds every status of (config, artifact) in order; `running` the ids of started rows."""

    template: Path

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="tktune-test-", dir=MEMORY if MEMORY.is_dir() else None))
        self.path = Path(shutil.copy(self.template, self.folder / "tktune.db"))
        self.store = Store.open(str(self.path))
        self.ends: dict[tuple[int, str], list[str]] = {}
        self.running: dict[tuple[int, str], int] = {}
        self.sessions: list[tuple[int, str]] = []
        self.refuted: set[tuple[int, str]] = set()
        self.wants = 0

    @initialize()
    def a_key(self) -> None:
        self.key = open_key(self.store)

    def may_start(self, pair: tuple[int, str]) -> bool:
        ends = self.ends.get(pair, [])
        counted = [e for e in ends if not is_final(e) and e != "abandoned"]
        return pair not in self.running and not any(map(is_final, ends)) and len(counted) < 2

    @rule(number=CONFIGS, artifact=ARTIFACTS)
    def start(self, number: int, artifact: str) -> None:
        pair = (number, artifact)
        if self.may_start(pair):
            self.running[pair] = self.store.start_trial(self.key, config(number), artifact, "run")
        else:
            with pytest.raises(AlreadyMeasured):
                self.store.start_trial(self.key, config(number), artifact, "run")

    @rule(status=ENDS, data=st.data())
    def finish(self, status: str, data: st.DataObject) -> None:
        if not self.running:
            return
        pair = data.draw(st.sampled_from(sorted(self.running)))
        time_us = 5.0 if status == "ok" else None
        self.store.finish_trial(self.running.pop(pair), status, time_us=time_us, samples=[1.0, 2.0])
        self.ends.setdefault(pair, []).append(status)

    @rule(number=CONFIGS, status=st.sampled_from(["build_failed", "refused:smem"]))
    def record(self, number: int, status: str) -> None:
        pair = (number, "")
        if pair in self.ends and self.ends[pair] != [status]:
            with pytest.raises(AlreadyMeasured):
                self.store.record_trial(self.key, config(number), "", status)
        else:
            self.store.record_trial(self.key, config(number), "", status)
            self.ends[pair] = [status]

    @rule()
    def reap_while_alive(self) -> None:
        assert self.store.reap("run") == []

    @rule()
    def driver_dies(self) -> None:
        self.store.close()
        edit(
            self.path, "UPDATE trial SET driver_start_ticks = driver_start_ticks + 1 WHERE status = 'started'"
        )
        self.store = Store.open(str(self.path))
        assert sorted(row.id for row in self.store.reap("next")) == sorted(self.running.values())
        for pair in self.running:
            self.ends.setdefault(pair, []).append("lost")
        self.running.clear()

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = Store.open(str(self.path))
        self.key = open_key(self.store)

    @rule(number=CONFIGS, artifact=ARTIFACTS)
    def choose(self, number: int, artifact: str) -> None:
        session = f"s{len(self.sessions)}"
        if "ok" in self.ends.get((number, artifact), []) and (number, artifact) not in self.refuted:
            verify(self.store, self.key, session, config(number), artifact=artifact)
            self.sessions.append((number, artifact))
        else:
            with pytest.raises(ValueError):
                verify(self.store, self.key, session, config(number), artifact=artifact)

    @rule(number=CONFIGS, artifact=ARTIFACTS)
    def found_wrong_after_all(self, number: int, artifact: str) -> None:
        pair = (number, artifact)
        self.store.record_trial(self.key, config(number), artifact, "wrong")
        self.refuted.add(pair)
        if "wrong" not in self.ends.setdefault(pair, []):
            self.ends[pair].append("wrong")

    @rule(number=CONFIGS, artifact=ARTIFACTS)
    def found_wrong_under_another_policy(self, number: int, artifact: str) -> None:
        key = open_key(self.store, built_by="two")
        self.store.record_trial(key, config(number), artifact, "wrong")
        self.refuted.add((number, artifact))

    @rule()
    def want(self) -> None:
        assert self.store.want(PROBLEM.replace(tokens=9), DEVICE)
        self.wants += 1

    @invariant()
    def rows_are_those_of_the_model(self) -> None:
        found: dict[tuple[str, str], list[str]] = {}
        for row in self.store.trials(self.key):
            found.setdefault((row.config.digest, row.artifact_digest), []).append(row.status)
        expected: dict[tuple[str, str], list[str]] = {}
        for (number, artifact), ends in self.ends.items():
            expected.setdefault((config(number).digest, artifact), []).extend(ends)
        for number, artifact in self.running:
            expected.setdefault((config(number).digest, artifact), []).append("started")
        assert {pair: sorted(ends) for pair, ends in found.items()} == {
            pair: sorted(ends) for pair, ends in expected.items()
        }

    @invariant()
    def the_winner_is_that_of_the_model(self) -> None:
        winner = self.store.winner(PROBLEM, DEVICE)
        standing = [pair for pair in self.sessions if pair not in self.refuted]
        if not standing:
            assert winner is None
        else:
            number, artifact = standing[-1]
            assert winner is not None
            assert (winner.config, winner.artifact_digest) == (config(number), artifact)
        assert sum(w.asked for w in self.store.wanted()) == self.wants

    @invariant()
    def the_database_is_sound(self) -> None:
        assert self.store.check() == []

    def teardown(self) -> None:
        self.store.close()
        shutil.rmtree(self.folder)


def test_any_sequence_of_operations_leaves_what_the_model_says(template: Path) -> None:
    StoreMachine.template = template
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=25,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
