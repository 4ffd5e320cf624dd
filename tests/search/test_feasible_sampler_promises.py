"""What our sampler promises whoever shares a study or a database: no repeats whatever is open, and nothing lost."""

from __future__ import annotations

import itertools
import pickle
import random
import subprocess
import sys
import threading
from pathlib import Path

import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tktune.core.config import Config
from tktune.search.feasible_sampler import FeasibleSampler, ModelSampler
from tktune.search.prior import log_prior

optuna.logging.set_verbosity(optuna.logging.ERROR)


def rows_of(seed: int = 0, keep: float = 0.7) -> list[Config]:
    draw = random.Random(seed)
    everything = itertools.product((16, 32, 48, 64, 96, 128), (1, 2, 3, 4), ("slot", "token", "both"), (0, 1))
    return [Config(A=a, B=b, ORDER=o, F=f) for a, b, o, f in everything if draw.random() < keep]


def cost(row: Config) -> float:
    return 10.0 + abs(row.number("A") - 64) + 3 * abs(row.number("B") - 2) + 5 * (row["ORDER"] == "slot")


def breaks(row: Config) -> bool:
    return row.number("A") * row.number("B") > 200


def run(sampler: ModelSampler, evaluations: int) -> list[Config]:
    seen = []
    for _ in range(evaluations):
        (row,) = sampler.ask(1)
        seen.append(row)
        sampler.tell(row, None if breaks(row) else cost(row))
    return seen


@given(seed=st.integers(0, 50), batch=st.integers(1, 7), failing=st.integers(1, 4))
@settings(max_examples=10, deadline=None)
def test_no_row_comes_twice_or_from_outside_and_all_come_in_the_end(seed, batch, failing):
    rows = rows_of(seed, keep=0.4)
    sampler = ModelSampler(rows, seed)
    seen: list[Config] = []
    waiting: list[Config] = []
    while True:
        asked = sampler.ask(batch)
        assert len(asked) == min(batch, len(rows) - len(seen))
        if not asked:
            break
        seen += asked
        waiting += asked
        while len(waiting) > batch // 2:  # some asks stay open
            row = waiting.pop(0)
            sampler.tell(row, None if len(seen) % failing == 1 else cost(row))
    assert sorted(map(str, seen)) == sorted(map(str, rows))


def test_rows_told_by_an_earlier_run_are_never_proposed_and_are_learnt_from():
    rows = rows_of()
    sampler = ModelSampler(rows, 0)
    told = [row for row in rows if row["ORDER"] != "token"]
    for row in told:
        sampler.tell(row, cost(row))
    asked = sampler.ask(6)
    assert not set(asked) & set(told)
    assert min(map(cost, asked)) == min(cost(row) for row in rows if row["ORDER"] == "token")


def test_few_evaluations_go_to_rows_that_break_once_it_has_seen_some():
    rows = rows_of(keep=1.0)
    assert sum(map(breaks, rows)) > 0.2 * len(rows)
    wasted = [sum(map(breaks, run(ModelSampler(rows, seed), 60)[20:])) for seed in range(3)]
    assert sum(wasted) < 0.2 * 3 * 40  # the bottom lies at the edge of what works


def test_tells_of_strangers_and_second_tells_are_refused():
    rows = rows_of()
    sampler = ModelSampler(rows[1:], 0)
    with pytest.raises(ValueError, match="not in the set"):
        sampler.tell(rows[0], 1.0)
    sampler.tell(rows[1], 1.0)
    with pytest.raises(ValueError, match="told before"):
        sampler.tell(rows[1], 1.0)


@pytest.mark.parametrize("rows", [[], [Config(A=1)], [Config(A=1, B=2), Config(A=1, B=3)]])
def test_tiny_sets_are_no_special_case(rows):
    sampler = ModelSampler(rows, 0)
    asked = sampler.ask(5)
    assert set(asked) == set(rows)
    for row in asked:
        sampler.tell(row, 7.0)
    assert sampler.ask(1) == []


def test_equal_costs_and_only_failures_leave_it_working():
    flat, broken = ModelSampler(rows_of(), 0), ModelSampler(rows_of(), 0)
    for _ in range(20):
        flat.tell(flat.ask(1)[0], 5.0)
        broken.tell(broken.ask(1)[0], None)


def test_a_good_prior_is_tried_first_and_a_reversed_one_does_little_harm():
    rows = rows_of(keep=1.0)
    good = log_prior(rows, {row: cost(row) for row in rows})
    assert cost(run(ModelSampler(rows, 0, good), 1)[0]) == min(map(cost, rows))
    best = min(cost(row) for row in rows if not breaks(row))
    seen = run(ModelSampler(rows, 0, -good), 25)
    assert min(cost(row) for row in seen if not breaks(row)) == best


def test_a_prior_may_know_only_some_rows_or_none():
    rows = rows_of(keep=1.0)
    for known in (rows[::3], []):
        seen = run(ModelSampler(rows, 0, log_prior(rows, {row: cost(row) for row in known})), 20)
        assert len(set(seen)) == 20


# As a sampler of anybody's study.


def ask(study: optuna.Study, sampler: FeasibleSampler) -> optuna.Trial:
    return study.ask(fixed_distributions=sampler.distributions)


def test_a_study_may_hold_many_open_trials_and_suggest_in_the_objective():
    rows = rows_of()
    sampler = FeasibleSampler(rows, seed=0)
    study = optuna.create_study(sampler=sampler)
    trials = [ask(study, sampler) for _ in range(20)]
    assert len({Config(trial.params) for trial in trials}) == 20

    def objective(trial: optuna.Trial) -> float:
        names = {n: trial.suggest_categorical(n, d.choices) for n, d in sampler.distributions.items()}
        return cost(Config(names))

    study.optimize(objective, n_trials=15)
    assert len({Config(trial.params) for trial in study.trials}) == 35
    assert all(Config(trial.params) in rows for trial in study.trials)


def test_threads_share_a_study_without_repeats():
    sampler = FeasibleSampler(rows_of(), seed=0)
    study = optuna.create_study(sampler=sampler)

    def work() -> None:
        for _ in range(8):
            trial = ask(study, sampler)
            study.tell(trial, cost(Config(trial.params)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({Config(trial.params) for trial in study.trials}) == 32


def test_two_samplers_of_the_same_seed_share_a_database_without_repeats(tmp_path: Path):
    rows = rows_of(keep=0.3)
    url = f"sqlite:///{tmp_path / 'study.db'}"
    samplers = [FeasibleSampler(rows, seed=0) for _ in range(2)]
    studies = [
        optuna.create_study(storage=url, study_name="one", sampler=sampler, load_if_exists=True)
        for sampler in samplers
    ]
    for _ in range(8):
        opened = [(study, ask(study, sampler)) for study, sampler in zip(studies, samplers, strict=True)]
        for study, trial in opened:
            study.tell(trial, cost(Config(trial.params)))
    assert len({Config(trial.params) for trial in studies[0].trials}) == 16


def test_who_sees_another_claim_on_its_row_gives_way_and_no_row_is_lost():
    rows = rows_of(keep=0.2)
    here, there = FeasibleSampler(rows, seed=0), FeasibleSampler(rows, seed=0)
    study = optuna.create_study(sampler=here)
    rival, mine = study.ask(), study.ask()  # rows are drawn when they are first needed
    look, here._look = here._look, lambda study, number: None  # both look before either claims
    drawn = there.sample_relative(study, study.trials[rival.number], {})
    found = here.sample_relative(study, study.trials[mine.number], {})
    assert found != drawn
    given_up = rows.index(Config(drawn))
    assert here._search._free[given_up]  # until it learns who holds it
    look(study, mine.number)
    assert not here._search._free[given_up]
    assert len(here._search) == len(rows) - 2


def test_enqueued_added_pruned_and_failed_trials_count():
    rows = rows_of()
    sampler = FeasibleSampler(rows, seed=0)
    study = optuna.create_study(sampler=sampler)
    study.enqueue_trial(dict(rows[5]))
    study.add_trial(
        optuna.trial.create_trial(params=dict(rows[6]), distributions=sampler.distributions, value=3.0)
    )
    first = ask(study, sampler)
    assert Config(first.params) == rows[5]
    study.tell(first, state=optuna.trial.TrialState.FAIL)
    study.tell(ask(study, sampler), state=optuna.trial.TrialState.PRUNED)
    study.tell(ask(study, sampler), 4.0)
    ask(study, sampler)
    assert len(sampler._search._failed) == 2 and len(sampler._search._cost) == 2


def test_wrong_studies_are_refused_with_a_sentence():
    rows = rows_of()
    study = optuna.create_study(direction="maximize", sampler=FeasibleSampler(rows, 0))
    with pytest.raises(ValueError, match="minimised"):
        ask(study, study.sampler)
    study = optuna.create_study(sampler=FeasibleSampler(rows, 0))
    with pytest.raises(ValueError, match="not a parameter of the feasible set"):
        study.ask().suggest_int("depth", 1, 3)
    study.tell(ask(study, study.sampler), -1.0)
    with pytest.raises(ValueError, match="above 0"):
        ask(study, study.sampler)


def test_a_sampler_can_be_pickled():
    sampler = pickle.loads(pickle.dumps(FeasibleSampler(rows_of(), seed=0)))
    study = optuna.create_study(sampler=sampler)
    assert Config(ask(study, sampler).params) in rows_of()


def test_samplers_are_made_by_name_and_import_nothing_before():
    code = (
        "import sys; from tktune.search.samplers import SAMPLERS; from tktune.core.config import Config\n"
        "assert not {'numpy', 'optuna'} & sys.modules.keys()\n"
        "rows = [Config(A=a) for a in (1, 2, 3)]\n"
        "assert {len(set(make(rows, 0).ask(5))) for make in SAMPLERS.values()} == {3}\n"
        "first = SAMPLERS['model'](rows, 0, {rows[2]: 1.0, rows[0]: 9.0}).ask(1)\n"
        "assert first == [rows[2]], first"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
