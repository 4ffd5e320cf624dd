"""What survives: full disks, killed writers, vanished drivers, several writers at once, readers beside a writer."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from store_cases import (
    ART,
    DEVICE,
    PROBLEM,
    child,
    config,
    edit,
    ended_well,
    heard,
    open_key,
    prove,
    verify,
    win,
)

from tktune.core.errors import AlreadyMeasured, DatabaseError
from tktune.store.driver_identity import DriverIdentity, boot_id, start_ticks, this_driver
from tktune.store.results import Store

DEAD = "UPDATE trial SET driver_start_ticks = driver_start_ticks + 1 WHERE status = 'started'"


def limit_pages(store: Store, pages: int) -> None:
    """A database that may not grow answers exactly as a full disk does (SQLITE_FULL)."""
    with contextlib.closing(store._database._engine.raw_connection()) as connection:
        connection.cursor().execute(f"PRAGMA max_page_count = {pages}")


def test_a_full_disk_is_a_sentence_and_nothing_is_lost(sqlite_store: Store) -> None:
    store = sqlite_store
    key = open_key(store)
    prove(store, key, config(1))
    before = store.trials(key)
    limit_pages(store, 1)  # SQLite keeps the pages it has
    with pytest.raises(DatabaseError, match=r"is full; what was stored before is safe\. Free some space"):
        for number in range(2, 200):
            trial_id = store.start_trial(key, config(number), ART, "run")
            store.finish_trial(trial_id, "ok", time_us=1.0, samples=[1.0 + i for i in range(400)])
            before = store.trials(key)
    stored = {row.id: row for row in store.trials(key)}
    assert all(stored[row.id] == row for row in before)
    limit_pages(store, 1000000)
    assert store.check() == []
    prove(store, key, config(500))


def test_a_file_that_cannot_grow_is_a_sentence_and_nothing_is_lost(path: Path) -> None:
    def work(say: Callable[[str], None]) -> None:
        with Store.open(str(path)) as store:
            key = open_key(store)
            prove(store, key, config(1))
            limit = path.stat().st_size + 20000
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            try:
                for number in range(2, 100):
                    prove(store, key, config(number))
                    say(str(number))
            except DatabaseError as error:
                say(str(error))
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    pid, descriptor = child(work)
    *acknowledged, sentence = heard(descriptor)
    os.waitpid(pid, 0)
    assert "disk" in sentence
    with Store.open(str(path)) as store:
        stored = store.measured(open_key(store))
        assert {config(int(n)) for n in acknowledged} <= set(stored) and store.check() == []


def test_the_row_of_a_vanished_driver_is_lost_and_the_event_names_the_config(path: Path) -> None:
    def work(say: Callable[[str], None]) -> None:
        store = Store.open(str(path))
        store.start_trial(open_key(store), config(3), ART, "the-run-that-died")
        os.kill(os.getpid(), signal.SIGKILL)

    pid, _ = child(work)
    os.waitpid(pid, 0)
    with Store.open(str(path)) as store:
        key = open_key(store)
        mine = store.start_trial(key, config(4), ART, "run-2")
        (lost,) = store.reap("run-2")
        assert (lost.status, lost.config, lost.run_id) == ("lost", config(3), "the-run-that-died")
        (event,) = store.events("lost")
        assert event.trial_id == lost.id and str(config(3)) in event.sentence
        assert f"process {pid}, vanished" in event.sentence
        assert event.detail["reaped_by"] == "run-2" and event.detail["host_went_down"] is False
        assert store.reap("run-2") == []
        assert {row.id: row.status for row in store.trials(key)} == {lost.id: "lost", mine: "started"}
        store.finish_trial(mine, "ok", time_us=1.0)
        assert store.start_trial(key, config(3), ART, "run-2") > lost.id  # one more chance
        assert store.check() == []


def test_the_row_of_a_living_driver_is_left_alone(path: Path) -> None:
    def work(say: Callable[[str], None]) -> None:
        with Store.open(str(path)) as store:
            trial_id = store.start_trial(open_key(store), config(1), ART, "other")
            say("started")
            signal.pause()
            del trial_id

    pid, descriptor = child(work)
    try:
        assert os.read(descriptor, 100) == b"started\n"
        with Store.open(str(path)) as store:
            assert store.reap("mine") == []
            with pytest.raises(AlreadyMeasured, match=f"being measured by process {pid}"):
                store.start_trial(open_key(store), config(1), ART, "mine")
            os.kill(pid, signal.SIGSTOP)
            assert store.reap("mine") == []  # stopped is not dead
    finally:
        os.kill(pid, signal.SIGKILL)
    while start_ticks(pid) is not None:
        time.sleep(0.001)
    with Store.open(str(path)) as store:  # a zombie is dead, though its id is still taken
        assert [row.config for row in store.reap("mine")] == [config(1)]
    os.waitpid(pid, 0)
    os.close(descriptor)


def test_starting_again_reaps_the_dead_attempt_of_the_same_config(path: Path) -> None:
    with Store.open(str(path)) as store:
        key = open_key(store)
        store.start_trial(key, config(1), ART, "run-1")
    edit(path, DEAD)
    with Store.open(str(path)) as store:
        store.start_trial(key, config(1), ART, "run-2")
        assert [row.status for row in store.trials(key)] == ["lost", "started"]
        assert len(store.events("lost")) == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("boot_id = 'an earlier boot'", "the host went down"),
        ("host = 'elsewhere', started_at = started_at - 4000", "not heard of for an hour"),
    ],
)
def test_a_crash_is_told_by_how_the_driver_went(path: Path, change: str, words: str) -> None:
    with Store.open(str(path)) as store:
        store.start_trial(open_key(store), config(1), ART, "run")
    edit(path, f"UPDATE trial SET {change}")
    with Store.open(str(path)) as store:
        assert len(store.reap("next")) == 1
        assert words in store.events("lost")[0].sentence


def test_a_driver_on_another_host_is_given_its_time(path: Path) -> None:
    with Store.open(str(path)) as store:
        store.start_trial(open_key(store), config(1), ART, "run")
    edit(path, "UPDATE trial SET host = 'elsewhere', boot_id = 'other'")
    with Store.open(str(path)) as store:
        assert store.reap("next") == []


def test_a_process_is_known_by_its_start_time_not_by_its_number_alone() -> None:
    me = this_driver()
    assert me.life() == "alive" and me.pid == os.getpid() and me.boot_id == boot_id()
    assert DriverIdentity(me.pid, me.start_ticks - 1, me.boot_id, me.host).life() == "dead"
    assert start_ticks(2**30) is None


def measure_until_killed(path: Path, say: Callable[[str], None]) -> None:
    """A small driver: reaps, resumes, and measures configs one by one, saying what it has been promised."""
    with Store.open(str(path)) as store:
        store.reap("driver")
        key = open_key(store)
        done = store.measured(key)
        for number in range(100000):
            if config(number) in done:
                continue
            trial_id = store.start_trial(key, config(number), ART, "driver")
            say(f"started {number}")
            store.finish_trial(trial_id, "ok", time_us=1.0 + number, samples=[1.0, 2.0, 3.0])
            say(f"finished {number}")


def test_writers_killed_at_random_moments_lose_nothing_and_double_nothing(path: Path) -> None:
    draw = random.Random(7)
    finished: set[int] = set()
    for round_number in range(25):
        pid, descriptor = child(lambda say: measure_until_killed(path, say))
        stream = os.fdopen(descriptor)
        said = [stream.readline() for _ in range(draw.randrange(1, 40))]
        for _ in range(draw.randrange(0, 3000)):  # a moment between two lines, too
            pass
        os.kill(pid, signal.SIGKILL)
        said += stream.readlines()
        stream.close()
        os.waitpid(pid, 0)
        words = [line.split() for line in said if line.endswith("\n")]
        finished |= {int(number) for word, number in words if word == "finished"}
        with Store.open(str(path)) as store:
            key = open_key(store)
            open_rows = [row for row in store.trials(key) if row.status == "started"]
            lost = store.reap("next")
            assert [row.id for row in lost] == [row.id for row in open_rows] and len(lost) <= 1
            if words and words[-1][0] == "started":
                number = int(words[-1][1])
                assert number in {int(row.time_us or 0) - 1 for row in store.trials(key)} or (
                    [row.config for row in lost] == [config(number)]
                )
            oks = [row for row in store.trials(key) if row.status == "ok"]
            assert Counter(row.config for row in oks).most_common(1)[0][1] == 1 if oks else True
            assert {config(n) for n in finished} <= {row.config for row in oks}, round_number
            assert all(row.samples == 3 for row in oks)
            assert len(store.events("lost")) == sum(row.status == "lost" for row in store.trials(key))
            assert store.check() == []
    assert len(finished) > 25


def test_a_killed_program_is_resumed_by_another_program(path: Path) -> None:
    program = (
        "import sys, pathlib; sys.path.insert(0, sys.argv[2]); import test_store_faults as faults\n"
        "faults.measure_until_killed(pathlib.Path(sys.argv[1]), lambda line: print(line, flush=True))"
    )
    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(path), str(Path(__file__).parent)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(7)]
        process.kill()
        process.communicate()
    with Store.open(str(path)) as store:
        store.reap("test")
        stored = store.measured(open_key(store))
        assert {config(int(s.split()[1])) for s in said if s.startswith("finished")} <= set(stored)
        assert store.check() == []


def test_a_database_whose_making_was_killed_is_made_by_the_next(tmp_path: Path) -> None:
    draw = random.Random(3)
    for number in range(12):
        path = tmp_path / f"{number}.db"
        pid, descriptor = child(lambda say, path=path: Store.open(str(path)).close())  # type: ignore[misc]
        while not path.exists():
            pass
        for _ in range(draw.randrange(0, 400000)):
            pass
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(descriptor)
        with Store.open(str(path)) as store:
            assert store.check() == []


def test_two_writers_at_once_measure_every_config_once(path: Path) -> None:
    def work(order: list[int], say: Callable[[str], None]) -> None:
        with Store.open(str(path)) as store:
            key = open_key(store)
            for number in order:
                try:
                    prove(store, key, config(number))
                    say(str(number))
                except AlreadyMeasured:
                    pass

    numbers = list(range(40))
    children = [
        child(lambda say: work(numbers, say)),
        child(lambda say: work(numbers[::-1], say)),
        child(lambda say: work(random.Random(1).sample(numbers, 40), say)),
    ]
    said = [int(line) for _, descriptor in children for line in heard(descriptor)]
    assert [pid for pid, _ in children if not ended_well(pid)] == []
    assert sorted(said) == numbers
    with Store.open(str(path)) as store:
        assert store.stats()["statuses"] == {"ok": 40} and store.check() == []


def test_a_reader_beside_a_writer_sees_whole_trials_and_never_fewer(path: Path) -> None:
    with Store.open(str(path)) as store:
        key = win(store, PROBLEM, config(900))

    def work(say: Callable[[str], None]) -> None:
        with Store.open(str(path)) as store:
            for number in range(60):
                prove(store, key, config(number), 50.0)
                verify(store, key, f"session {number}", config(number), 50.0)
            say("done")

    pid, descriptor = child(work)
    seen = 0
    with Store.open(str(path), mode="ro") as reader:
        while seen < 61:
            rows = [row for row in reader.trials(key) if row.status == "ok"]
            assert len(rows) >= seen and all(row.samples == 3 for row in rows)
            assert reader.winner(PROBLEM, DEVICE) is not None
            seen = len(rows)
    assert heard(descriptor) == ["done"] and ended_well(pid)


def test_check_finds_what_was_edited_behind_the_stores_back(path: Path) -> None:
    with Store.open(str(path)) as store:
        key = win(store, PROBLEM, config(1))
        prove(store, key, config(2))
        assert store.check() == []
    content = path.read_bytes()
    for statement, words in [
        ("DELETE FROM problem", "rows of trial point to a problem that is not there"),
        ("DELETE FROM trial WHERE id = 2", "rows of sample point to a trial that is not there"),
        ("UPDATE trial SET attempt = 2 WHERE id = 2", "do not count from 1"),
        ("UPDATE trial SET config = '{\"STAGES\":1}' WHERE id = 2", "a digest that is not its own"),
        ("UPDATE problem SET key = replace(key, '256', '512')", "Problem 1 has a digest that is not its own"),
        ("UPDATE device_class SET key = replace(key, 'shm', 'pcie')", "Device class 1 has a digest"),
        ("UPDATE policy SET key = replace(key, 'cold', 'warm')", "Policy 1 has a digest"),
        ("UPDATE trial SET status = 'censored' WHERE id = 1", "chose a config that no trial proved"),
        (
            "INSERT INTO trial SELECT id + 9, config_digest, config, artifact_digest, 2, status, time_us, build_us,"
            " gate_error, clocks, detail, run_id, driver_pid, driver_start_ticks, boot_id, host, started_at, ended_at,"
            " problem_id, device_class_id, policy_id, toolchain_id FROM trial WHERE id = 2",
            "measured again after a verdict",
        ),
        (
            "CREATE TEMP TABLE t AS SELECT 1; DROP VIEW winner; CREATE VIEW winner AS SELECT * FROM standing WHERE 0",
            "The winner view disagrees",
        ),
    ]:
        path.write_bytes(content)
        edit(path, *statement.split(";"))
        with Store.open(str(path)) as store:
            assert any(words in fault for fault in store.check()), (words, store.check())


def test_check_finds_a_page_that_rotted(path: Path) -> None:
    with Store.open(str(path)) as store:
        key = open_key(store)
        for number in range(200):
            prove(store, key, config(number))
    content = bytearray(path.read_bytes())
    middle = len(content) // 2 // 4096 * 4096
    content[middle : middle + 4096] = b"\xff" * 4096
    path.write_bytes(content)
    with Store.open(str(path)) as store:
        try:
            faults = store.check()
        except DatabaseError as error:
            faults = [str(error)]
    assert "damaged" in faults[0]
