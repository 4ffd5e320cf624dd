"""How a cost model, recordings and other rows of a store become an expectation for our rows."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from fakes import CPU, GPU, PROBLEM, FakeFamily, true_us
from recorded import FAILED, recording

from tktune.core.config import Config
from tktune.core.policy import Policy
from tktune.search.prior import Elsewhere, distance, family_prior, in_store, log_prior, of_recording
from tktune.store.results import Store

ROWS = [Config(A=a, B=b, C=c) for a, b, c in itertools.product((16, 32, 64, 128), (1, 2, 3), (0, 1))]


def model(row: Config) -> float:
    return 10.0 * row.number("A")


def there(row: Config) -> float:
    """What the model misses: B matters, and C twice as much."""
    return model(row) * (1 + 0.2 * row.number("B")) * (1 + row.number("C"))


def everything(rows: list[Config] = ROWS, weight: float = 1.0) -> Elsewhere:
    return Elsewhere({r: there(r) for r in rows}, {r: model(r) for r in rows}, weight=weight)


def ups(prior: np.ndarray) -> np.ndarray:
    """A prior up to its constant."""
    return prior - prior[0]


def test_a_cost_model_alone_is_its_logarithm_and_may_be_silent():
    found = log_prior(ROWS, {ROWS[1]: 7.0})
    assert found[1] == pytest.approx(np.log(7.0))
    assert np.isnan(np.delete(found, 1)).all()
    assert np.isnan(log_prior(ROWS, None)).all()
    assert len(log_prior([], None, [everything()])) == 0


def test_what_was_measured_elsewhere_corrects_the_cost_model():
    here = {row: 3 * model(row) for row in ROWS}  # here everything is three times as slow
    found = log_prior(ROWS, here, [everything()])
    assert ups(found) == pytest.approx(ups(np.log([there(row) for row in ROWS])))


def test_without_a_cost_model_the_times_themselves_speak():
    place = Elsewhere({row: there(row) for row in ROWS if row["A"] != 128})
    found = log_prior(ROWS, None, [place])
    known = np.array([row["A"] != 128 for row in ROWS])
    assert ups(found)[known] == pytest.approx(ups(np.log([there(row) for row in ROWS]))[known])
    assert np.isnan(found[~known]).all()


def test_rows_not_measured_there_are_interpolated():
    seen = [row for i, row in enumerate(ROWS) if i % 3]
    found = log_prior(ROWS, {row: model(row) for row in ROWS}, [everything(seen)])
    truth = np.log([there(row) for row in ROWS])
    plain = np.log([model(row) for row in ROWS])
    assert np.abs(ups(found) - ups(truth)).max() < 0.5 * np.abs(ups(plain) - ups(truth)).max()


def test_values_that_do_not_occur_there_fall_back_to_the_cost_model():
    seen = [row for row in ROWS if row["A"] != 128]
    found = log_prior(ROWS, {row: model(row) for row in ROWS}, [everything(seen)])
    absent = [i for i, row in enumerate(ROWS) if row["A"] == 128]
    assert np.ptp(found[absent]) == pytest.approx(0)  # the model knows A alone


def test_parameters_are_matched_by_name_and_the_fastest_of_several_speaks():
    """There is no C here, and an E that is not there."""
    rows = [Config(A=a, B=b, E=e) for a in (16, 32, 64) for b in (1, 2, 3) for e in (5, 6)]
    place = Elsewhere({row: there(row) for row in ROWS})
    found = log_prior(rows, None, [place])
    assert ups(found) == pytest.approx(ups(np.log([there(r.replace(C=0)) for r in rows])))
    strangers = [Config(X=x) for x in range(4)]
    assert np.isnan(log_prior(strangers, None, [place])).all()


def test_what_failed_elsewhere_is_not_expected_to_work():
    place = replace(everything(ROWS[4:]), failed=frozenset(ROWS[:2]))
    found = log_prior(ROWS, {row: model(row) for row in ROWS}, [place])
    assert np.isnan(found[:2]).all() and np.isfinite(found[2:]).all()
    both = log_prior(ROWS, {row: model(row) for row in ROWS}, [place, everything()])
    assert np.isfinite(both).all()  # it works somewhere


def test_nearer_places_count_more_and_tiny_ones_not_at_all():
    flat = Elsewhere({row: model(row) for row in ROWS}, {row: model(row) for row in ROWS}, weight=0.01)
    estimate = {row: model(row) for row in ROWS}
    found = ups(log_prior(ROWS, estimate, [everything(), flat]))
    truth = ups(np.log([there(row) for row in ROWS]))
    assert found == pytest.approx(truth, abs=0.05)
    few = Elsewhere(dict.fromkeys(ROWS[:3], 1.0))
    assert log_prior(ROWS, estimate, [few]) == pytest.approx(log_prior(ROWS, estimate))


def test_a_recording_tells_times_estimates_and_failures():
    found = of_recording(recording())
    assert FAILED not in {config.only(["TILE", "STAGES"]) for config in found.times_us}
    assert all(config.only(["TILE", "STAGES"]) == FAILED or config in found.failed for config in found.failed)
    assert len(found.failed) > 1


def test_distance_grows_with_sizes_and_devices_and_some_things_cannot_be_compared():
    same = distance(PROBLEM, CPU, PROBLEM, CPU)
    tokens = distance(replace(PROBLEM, tokens=32), CPU, PROBLEM, CPU)
    device = distance(PROBLEM, replace(CPU, sm_count=8), PROBLEM, CPU)
    arch = distance(PROBLEM, replace(CPU, arch="x86-64-v4.4c"), PROBLEM, CPU)
    assert same == 0 and tokens == 1 and device == 1 and arch == 2
    assert distance(PROBLEM, GPU, PROBLEM, CPU) is None
    assert distance(replace(PROBLEM, weight_layout="enk"), CPU, PROBLEM, CPU) is None


def test_the_nearest_places_of_a_store_speak_and_ours_does_not(url):
    space = FakeFamily().space(PROBLEM, CPU)
    configs = list(space.feasible)[:20]
    policy = Policy()
    with Store.open(url) as store:
        compiler = store.toolchain_id("g++", "12", "a" * 64)
        ours = store.key(PROBLEM, CPU, policy, compiler)

        def measured(key, factor):
            for config in configs:
                store.record_trial(key, config, "", "ok", time_us=factor * true_us(config))
            store.record_trial(key, space.feasible.configs[-1], "", "wrong")

        measured(ours, 1.0)
        for factor, tokens in enumerate((32, 64, 256, 1024), 2):
            measured(store.key(replace(PROBLEM, tokens=tokens), CPU, policy, compiler), float(factor))
        measured(store.key(PROBLEM, CPU, policy, store.toolchain_id("g++", "13", "b" * 64)), 9.0)
        measured(store.key(PROBLEM, CPU, Policy(cache_state="warm"), compiler), 10.0)
        measured(store.key(PROBLEM, GPU, policy, compiler), 11.0)
        found = in_store(store, ours, FakeFamily(model_us=true_us))
    factors = [place.times_us[configs[0]] / true_us(configs[0]) for place in found]
    assert factors == pytest.approx([9.0, 2.0, 3.0])
    assert [place.weight for place in found] == [1.0, 0.5, 0.25]
    assert all(place.failed == {space.feasible.configs[-1]} for place in found)
    rows = list(space.feasible)
    prior = family_prior(FakeFamily(model_us=true_us), rows, PROBLEM, CPU, found)
    assert rows[int(np.nanargmin(prior))] == min(rows, key=true_us)
