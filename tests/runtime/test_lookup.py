"""What `tktune.lookup` answers: exact, near, default; what it leaves out, writes, raises and says."""

from __future__ import annotations

import hashlib
import shutil
import sqlite3
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lookup_family import NAME

import tktune
from tktune.core.config import Config
from tktune.core.device import DeviceClass, device_class
from tktune.core.errors import NothingFeasible, ProblemError, RoutingError, WordsError
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.runtime.choice import Choice
from tktune.store.results import Store
from tktune.store.rows import TrialKey, VerificationRow

DEVICE = DeviceClass("cpu", "x86-64-v3.2c", 4, 262144, 33554432, "shm", display_name="a test machine")
ART = "a" * 64
SMALL = Config(ROW_BLOCK=16, STAGES=1)
BIG = Config(ROW_BLOCK=64, STAGES=4)
DEFAULT = Config(ROW_BLOCK=32, STAGES=2)


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("empty") / "empty.db"
    Store.open(str(path)).close()
    return path


@pytest.fixture
def path(empty_database: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(empty_database, tmp_path / "tktune.db"))


@pytest.fixture(autouse=True)
def fresh_answers() -> Iterator[None]:
    tktune.lookup.cache_clear()
    yield
    tktune.lookup.cache_clear()


def problem(**changes: Any) -> Problem:
    return Problem(NAME, 64, 64, 8, 2, 128).replace(**changes)


def ask(path: Path | str, **changes: Any) -> Choice:
    words: dict[str, Any] = {"hidden": 64, "cols": 64, "experts": 8, "top_k": 2, "tokens": 128}
    words |= {"device": DEVICE, "db": path, **changes}
    return tktune.lookup(words.pop("family", NAME), **words)


def key_of(store: Store, asked: Problem, device: DeviceClass, policy: Policy, built_by: str) -> TrialKey:
    return store.key(
        asked, device, policy, store.toolchain_id("g++", f"g++ {built_by}", built_by.ljust(64, "0"))
    )


def win(
    path: Path,
    asked: Problem,
    config: Config,
    time_us: float,
    *,
    device: DeviceClass = DEVICE,
    policy: Policy = Policy(),  # noqa: B008
    built_by: str = "12.2",
    artifact: str = ART,
) -> None:
    with Store.open(str(path)) as store:
        key = key_of(store, asked, device, policy, built_by)
        trial_id = store.start_trial(key, config, artifact, "run")
        store.finish_trial(trial_id, "ok", time_us=time_us, samples=[time_us])
        row = VerificationRow(config, artifact, "finalist", time_us, (time_us,) * 9, True, "fastest by 4 %")
        store.add_verification(key, f"session {trial_id}", [row])


def wrong(path: Path, asked: Problem, config: Config, artifact: str = ART) -> None:
    with Store.open(str(path)) as store:
        store.record_trial(key_of(store, asked, DEVICE, Policy(), "12.2"), config, artifact, "wrong")


def wanted(path: Path) -> list[tuple[Problem, int]]:
    with Store.open(str(path)) as store:
        return [(w.problem, w.asked) for w in store.wanted()]


def test_a_tuned_problem_is_answered_exactly(path: Path) -> None:
    win(path, problem(), SMALL, 80.0)
    choice = ask(path)
    assert (choice.config, choice.provenance, choice.time_us) == (SMALL, "exact", 80.0)
    assert (choice.problem, choice.device, choice.artifact_digest) == (problem(), DEVICE, ART)
    told = choice.explain()
    assert "exactly this problem" in told and "80.0 µs, the median of 9 samples of the slowest rank" in told
    assert "policy serving (direct launch, cold cache), built with g++ 12.2" in told
    assert "chosen because: fastest by 4 %." in told
    assert wanted(path) == []


def test_the_newest_verification_over_toolchains_answers(path: Path) -> None:
    win(path, problem(), SMALL, 80.0)
    win(path, problem(), BIG, 90.0, built_by="13.1", artifact="b" * 64)
    choice = ask(path)
    assert (choice.config, choice.artifact_digest) == (BIG, "b" * 64)


def test_twice_the_tokens_are_answered_by_the_near_winner(path: Path) -> None:
    win(path, problem(), SMALL, 80.0)
    choice = ask(path, tokens=256)
    assert (choice.config, choice.provenance, choice.time_us) == (SMALL, "near", 80.0)
    assert (choice.problem, choice.measured_on) == (problem(tokens=256), problem())
    assert "the same shape at 128 tokens" in choice.explain() and "tokens = 256" in choice.explain()
    assert wanted(path) == [(problem(tokens=256), 1)]


def test_near_is_nearest_in_log_ratio_and_ties_go_to_the_larger(path: Path) -> None:
    for tokens, stages in ((32, 1), (64, 2), (256, 4)):
        win(path, problem(tokens=tokens), Config(ROW_BLOCK=16, STAGES=stages), 50.0)
    assert ask(path, tokens=128).measured_on == problem(tokens=256)
    assert ask(path, tokens=90).measured_on == problem(tokens=64)
    assert ask(path, tokens=8).measured_on == problem(tokens=32)
    assert ask(path, tokens=7).provenance == "default"
    assert ask(path, tokens=1024).measured_on == problem(tokens=256)
    assert ask(path, tokens=1025).provenance == "default"


@pytest.mark.parametrize(
    "change",
    [{"hidden": 128}, {"routing": "zipf:1.2"}, {"experts": 16}, {"weight_layout": "enk"}, {"policy": "warm"},
     {"world": 2}, {"device": DeviceClass(**{**DEVICE.key, "sm_count": 8})}, {"pad": 64}],
)  # fmt: skip
def test_another_problem_device_or_policy_is_answered_by_the_default(
    path: Path, change: dict[str, Any]
) -> None:
    win(path, problem(), SMALL, 80.0)
    choice = ask(path, **change)
    assert (choice.config, choice.provenance, choice.time_us, choice.artifact_digest) == (
        DEFAULT,
        "default",
        None,
        None,
    )
    assert "not measured here" in choice.explain() and "No winner is stored" in choice.explain()
    assert wanted(path) == [(choice.problem, 1)]


def test_a_near_winner_that_does_not_fit_here_is_left_out_and_the_next_one_taken(path: Path) -> None:
    win(path, problem(tokens=700), BIG, 50.0)  # 64 × 4 × 1024 bytes fit no more
    win(path, problem(tokens=300), SMALL, 50.0)
    choice = ask(path, tokens=1100)
    assert (choice.config, choice.measured_on) == (SMALL, problem(tokens=300))
    assert "it breaks memory here (needs 281600 bytes, the device gives 262144)" in choice.explain()


def test_a_config_of_another_version_of_the_family_is_left_out(path: Path) -> None:
    win(path, problem(), Config(ROW_BLOCK=16, STAGES=1, order="slot"), 50.0)
    choice = ask(path)
    assert choice.provenance == "default" and "another version of" in choice.explain()
    assert "No stored winner of this shape can run here" in choice.explain()


def test_wrong_is_never_returned_neither_exact_nor_near_nor_default(path: Path) -> None:
    win(path, problem(), SMALL, 50.0)
    win(path, problem(tokens=256), BIG, 50.0)
    wrong(path, problem(), SMALL, artifact="b" * 64)
    assert ask(path).config == SMALL  # another artifact was wrong, this one stands
    with Store.open(str(path)) as store:
        key = key_of(store, problem(), DEVICE, Policy(name="warm"), "12.2")
        store.record_trial(key, SMALL, ART, "wrong")
    tktune.lookup.cache_clear()
    assert ask(path).config == BIG
    wrong(path, problem(), BIG)
    wrong(path, problem(), DEFAULT)
    tktune.lookup.cache_clear()
    choice = ask(path)
    assert choice.provenance == "default" and choice.config not in (SMALL, BIG, DEFAULT)
    assert "found wrong on this problem" in choice.explain() and "neighbour stands in" in choice.explain()
    for rows in (16, 32, 64):
        for stages in (1, 2, 4):
            wrong_config = Config(ROW_BLOCK=rows, STAGES=stages)
            if wrong_config not in (SMALL, BIG, DEFAULT):
                wrong(path, problem(), wrong_config)
    tktune.lookup.cache_clear()
    with pytest.raises(NothingFeasible, match="was found wrong"):
        ask(path)


def test_a_repaired_config_comes_back_as_default(path: Path) -> None:
    wrong(path, problem(), DEFAULT)
    assert ask(path).config != DEFAULT
    with Store.open(str(path)) as store:
        key = key_of(store, problem(), DEVICE, Policy(), "12.2")
        store.finish_trial(store.start_trial(key, DEFAULT, "b" * 64, "run"), "ok", time_us=1.0)
    tktune.lookup.cache_clear()
    assert ask(path).config == DEFAULT


def test_with_the_pad_left_open_the_fastest_stored_pad_answers(path: Path) -> None:
    win(path, problem(pad=128), BIG, 90.0)
    win(path, problem(pad=64), SMALL, 70.0)
    assert ask(path).problem.pad == 64 and ask(path).config == SMALL
    assert ask(path, pad=128).config == BIG
    assert ask(path, pad=64).provenance == "exact" and ask(path, pad=32).provenance == "default"
    assert ask(path, tokens=200).problem == problem(tokens=200, pad=64)


def test_the_default_takes_the_largest_pad_that_is_feasible(path: Path) -> None:
    assert ask(path).problem.pad == 128
    assert ask(path, pad=48).config == Config(ROW_BLOCK=16, STAGES=2)
    with pytest.raises(NothingFeasible):
        ask(path, pad=8)
    with pytest.raises(NothingFeasible):
        ask(path, tokens=10**6)


def test_a_missing_database_is_a_default_without_an_error_or_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        choice = ask(tmp_path / "a" / "none.db")
        assert choice.provenance == "default" and "No database has been made yet at" in choice.explain()
        monkeypatch.setenv("TKTUNE_DB", str(tmp_path / "other.db"))
        assert "other.db" in ask(tmp_path, db=None).explain()
        (tmp_path / "empty.db").touch()
        assert ask(tmp_path / "empty.db").provenance == "default"
    assert [p.name for p in tmp_path.iterdir()] == ["empty.db"]


@pytest.mark.parametrize("content", [b"\x07", b"no database at all" * 100, b"newer", b"truncated"])
def test_an_unreadable_database_is_one_warning_and_a_default(path: Path, content: bytes) -> None:
    if content == b"newer":
        connection = sqlite3.connect(path)
        connection.execute("UPDATE alembic_version SET version_num = '9000'")
        connection.commit()
        connection.close()
    elif content == b"truncated":
        path.write_bytes(path.read_bytes()[:-2000])
    else:
        path.write_bytes(content)
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    with pytest.warns(RuntimeWarning, match="tktune uses default configs: The ") as caught:
        choice = ask(path)
        ask(path, tokens=256)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert choice.provenance == "default" and "could not be read" in choice.explain()
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_lookup_answers_while_a_writer_holds_the_database(path: Path) -> None:
    win(path, problem(), SMALL, 80.0)
    with Store.open(str(path)) as store, store._database.write():
        assert ask(path).provenance == "exact"
        assert ask(path, tokens=256).provenance == "near"
    assert wanted(path) == []  # it did not wait to write that row


def test_an_answer_is_kept_until_it_is_cleared(path: Path) -> None:
    first = ask(path)
    win(path, problem(), SMALL, 80.0)
    assert ask(path) is first
    tktune.lookup.cache_clear()
    assert ask(path).provenance == "exact"


def test_words_that_cannot_be_meant_are_refused(path: Path) -> None:
    with pytest.raises(WordsError, match="no family called"):
        ask(path, family="nonsense")
    with pytest.raises(ProblemError, match="top_k"):
        ask(path, top_k=9)
    with pytest.raises(ProblemError, match="tokens"):
        ask(path, tokens=[128])
    with pytest.raises(RoutingError):
        ask(path, routing="sideways")
    with pytest.raises(WordsError, match="no device class"):
        ask(path, device="sm_1")


def test_the_device_is_the_first_gpu_or_else_the_cpu(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tktune.core.device_cuda.cuda_device_classes", list)
    assert ask(path, device=None).device == device_class("cpu")
    hopper = device_class("sm_90a")
    monkeypatch.setattr("tktune.core.device_cuda.cuda_device_classes", lambda: [hopper])
    assert ask(path, device=None, tokens=64).device == hopper
    assert ask(path, device="sm_120a").device.arch == "sm_120a"


def test_a_built_in_family_of_one_rank_is_looked_up_by_its_share(path: Path) -> None:
    choice = ask(path, family="grouped_gemm", ep_world=2, ep_rank=1, device="cpu")
    assert choice.provenance == "default" and (choice.problem.ep_world, choice.problem.ep_rank) == (2, 1)
