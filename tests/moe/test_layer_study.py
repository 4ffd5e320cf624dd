"""A study of a layer: what it stands for, what is pinned, and from an empty store to the winners of both kernels and the pair."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tktune.build.cache import ArtifactCache
from tktune.core import status
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.errors import StudyError, WordsError
from tktune.families.base import family
from tktune.moe.parts import joined_config, part_config, part_pins, part_problem, part_problems
from tktune.moe.space import narrowed
from tktune.search.driver import tune
from tktune.search.events import Event, Note, SpaceReady, Tee
from tktune.search.layer_study import MeasuredLayer, with_kernels
from tktune.search.study import Study, parse_study
from tktune.store.results import Store

DEVICE = DeviceClass("cpu", "test", 4, 1 << 20, 1 << 22, "shm")
FILE: dict[str, Any] = {
    "name": "layer",
    "family": "moe_layer",
    "device": "cpu",
    "problem": {
        "hidden": 128, "cols": 64, "experts": 4, "top_k": 2, "tokens": 32, "world": 2, "pad": [32, 64], "weight_layout": "enk",
    },
    "search": {"trials": 6, "seconds": 60, "finalists": 2, "rounds": 3, "stop_early": False},
    "policy": {"first_iterations": 1, "iterations": 2, "flush_bytes": 0},
    "pins": {"dispatch": {"STAGES": 2, "CONSUMER_WARPS": 2}, "combine.STAGES": [2], "combine": {"CONSUMER_WARPS": [1, 2]}},
}  # fmt: skip


def study_of(**changes: Any) -> Study:
    return parse_study({**FILE, **changes}, Path("layer.toml"))


def test_a_study_stands_for_both_kernels_at_each_pad_then_for_the_pairs() -> None:
    found = [(p.family, p.hidden, p.cols, p.finish, p.pad) for p in study_of().problems]
    assert found == [
        ("dispatch_gemm", 128, 128, "swiglu", 32),
        ("gemm_combine", 64, 128, "none", 32),
        ("dispatch_gemm", 128, 128, "swiglu", 64),
        ("gemm_combine", 64, 128, "none", 64),
        ("moe_layer", 128, 64, "none", 32),
        ("moe_layer", 128, 64, "none", 64),
    ]


def test_what_stands_twice_stands_once_and_layers_stand_last() -> None:
    layers = [
        problem.replace(tokens=tokens)
        for tokens in (16, 32)
        for problem in study_of().problems
        if problem.family == "moe_layer"
    ]
    found = with_kernels([*layers, *layers])
    assert len(found) == len(set(found)) == 12
    assert [problem.family == "moe_layer" for problem in found] == [False] * 8 + [True] * 4


def test_pins_are_those_of_a_kernel_and_say_which() -> None:
    study = study_of()
    by_family = {problem.family: problem for problem in study.problems}
    assert study.pins_of(by_family["dispatch_gemm"]) == {"STAGES": (2,), "CONSUMER_WARPS": (2,)}
    assert study.pins_of(by_family["gemm_combine"]) == {"STAGES": (2,), "CONSUMER_WARPS": (1, 2)}
    assert set(study.pins_of(by_family["moe_layer"])) == {
        "dispatch.STAGES", "dispatch.CONSUMER_WARPS", "combine.STAGES", "combine.CONSUMER_WARPS",
    }  # fmt: skip
    with pytest.raises(WordsError, match=r"Write dispatch\.STAGES or combine\.STAGES"):
        part_pins({"STAGES": (2,)}, "dispatch")
    with pytest.raises(WordsError, match=r"Write dispatch\.STAGES or combine\.STAGES"):
        part_pins({"reduce.STAGES": (2,)}, "dispatch")
    with pytest.raises(WordsError, match="none of its parameters"):
        part_pins({"dispatch": (2,)}, "dispatch")


def test_a_layer_whose_gate_and_up_cannot_be_packed_is_refused_before_anything_is_built() -> None:
    with pytest.raises(StudyError, match=r"cols = 20.*multiple of 8"):
        study_of(problem={**FILE["problem"], "cols": 20})


def test_a_config_of_a_layer_comes_apart_into_those_it_was_joined_from() -> None:
    layer = study_of().problems[-1]
    spaces = {part: family(p.family).space(p, DEVICE) for part, p in part_problems(layer).items()}
    one, other = (spaces[part].default for part in ("dispatch", "combine"))
    joined = joined_config(one, other)
    assert (part_config(joined, "dispatch"), part_config(joined, "combine")) == (one, other)
    space = family("moe_layer").space(layer, DEVICE)
    assert {p.name for p in space.parameters} == set(joined)
    assert space.is_feasible(joined)


def test_the_space_of_a_layer_has_the_constraints_of_both_kernels() -> None:
    layer = study_of().problems[-1]
    space = family("moe_layer").space(layer, DEVICE)
    config = space.default
    for name, value in {"dispatch.RED_BLOCK": 48, "combine.num_comm_sms": 4}.items():
        broken = [rule.name for rule, _ in space.broken(config.replace(**{name: value}))]
        assert broken and all(rule.startswith(name.partition(".")[0] + ".") for rule in broken)


def test_a_narrowed_space_has_the_values_of_these_configs_and_their_canonical_forms() -> None:
    layer = study_of().problems[-1]
    space = family("moe_layer").space(layer, DEVICE)
    one, other = part_config(space.default, "dispatch"), part_config(space.default, "combine")
    pull = other.replace(form="pull", order="token")
    cut = narrowed(space, [one, one.replace(num_comm_sms=2)], [other, pull])
    assert cut.size == 2 * 2 * 2
    assert cut.default_config() == joined_config(one, other)
    for config in cut.feasible:
        assert cut.canonical(config) == config and space.is_feasible(config)


def test_a_start_is_refused_since_it_names_one_config_of_two_kernels(tmp_path: Path) -> None:
    study = study_of(search={**FILE["search"], "start_from": "STAGES=2"})
    with pytest.raises(WordsError, match="start_from"):
        tune(study, f"sqlite:///{tmp_path}/store.db", ArtifactCache(tmp_path / "cache"), device=DEVICE)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, Path, list[Event], list[Any]]:
    folder = tmp_path_factory.mktemp("layer")
    events: list[Event] = []
    study = study_of()
    results = tune(
        study,
        f"sqlite:///{folder}/store.db",
        ArtifactCache(folder / "cache"),
        listener=Tee(events.append),
        device=DEVICE,
    )
    return study, folder, events, results


def test_a_study_ends_in_winners_of_both_kernels_and_of_the_pair(tuned: Any) -> None:
    study, folder, events, results = tuned
    assert all(result.winner is not None for result in results)
    assert [result.problem for result in results if result.problem.family != "moe_layer"] == list(
        study.problems[:4]
    )
    pairs = [result for result in results if result.problem.family == "moe_layer"]
    left_out = [
        event for event in events if isinstance(event, Note) and "is not tuned: alone" in event.sentence
    ]
    assert len(pairs) + len(left_out) == 2 and pairs
    with Store.open(f"sqlite:///{folder}/store.db", mode="ro") as store:
        for result in pairs:
            winner = store.winner(result.problem, DEVICE)
            assert winner is not None and winner.config == result.winner
            kernels = [store.winner(p, DEVICE) for p in part_problems(result.problem).values()]
            assert all(kernel is not None for kernel in kernels)
            space = family("moe_layer").space(result.problem, DEVICE)
            own = joined_config(*(kernel.config for kernel in kernels if kernel is not None))
            assert result.default == own, "the pair is compared with the kernels' own winners"
            assert space.build_part(winner.config) == space.build_part(own), "builds stay as they are"
            artifact = store.artifact(winner.artifact_digest)
            assert artifact is not None and artifact.kind == "pair"


def test_the_pair_is_searched_around_the_kernels_winners(tuned: Any) -> None:
    _, folder, events, _ = tuned
    ready = [
        event for event in events if isinstance(event, SpaceReady) and event.problem.family == "moe_layer"
    ]
    assert ready and all(event.builds == 1 and event.feasible > 1 for event in ready)
    with Store.open(f"sqlite:///{folder}/store.db", mode="ro") as store:
        for key in store.keys():  # noqa: SIM118
            if store.key_facts(key).problem.family == "moe_layer":
                ends = [row.status for row in store.trials(key)]
                assert ends and set(ends) <= {status.OK, status.CENSORED}


def test_a_layer_is_expected_to_take_what_its_kernels_took_alone() -> None:
    layer = study_of().problems[-1]
    space = family("moe_layer").space(layer, DEVICE)
    one, other = part_config(space.default, "dispatch"), part_config(space.default, "combine")
    more = one.replace(num_comm_sms=2)
    layer_family = MeasuredLayer({"dispatch": {one: 100.0, more: 70.0}, "combine": {other: 40.0}})
    assert layer_family.cost_us(joined_config(one, other), layer, DEVICE) == 140.0
    assert layer_family.cost_us(joined_config(more, other), layer, DEVICE) == 110.0
    kernel, problem = family("gemm_combine"), part_problem(layer, "combine")
    unknown = other.replace(num_comm_sms=3)
    scaled = 40.0 * kernel.cost_us(unknown, problem, DEVICE) / kernel.cost_us(other, problem, DEVICE)
    assert layer_family.cost_us(joined_config(one, unknown), layer, DEVICE) == pytest.approx(100.0 + scaled)


def test_the_same_command_again_measures_nothing(tuned: Any) -> None:
    study, folder, _, results = tuned
    again = tune(study, f"sqlite:///{folder}/store.db", ArtifactCache(folder / "cache"), device=DEVICE)
    assert [r.winner for r in again] == [r.winner for r in results]
    assert sum(result.measured for result in again) == 0


def test_a_kernel_without_a_winner_leaves_the_pair_out_with_a_sentence(tmp_path: Path) -> None:
    study = study_of(problem={**FILE["problem"], "pad": 32})
    layer = study.problems[-1]
    from tktune.search.layer_study import at_their_turn

    said: list[Event] = []
    with Store.open(f"sqlite:///{tmp_path}/store.db") as store:
        space = family("moe_layer").space(layer, DEVICE)
        turned = at_their_turn([(family("moe_layer"), space)], study, store, Tee(said.append))
        assert list(turned) == []
    assert "has no winner" in said[0].sentence  # type: ignore[union-attr]


def test_a_pair_is_named_by_its_parts(tuned: Any) -> None:
    _, folder, _, results = tuned
    from tktune.build.pairs import pair_digest, parts_of

    cache = ArtifactCache(folder / "cache")
    pair = next(result for result in results if result.problem.family == "moe_layer")
    with Store.open(f"sqlite:///{folder}/store.db", mode="ro") as store:
        winner = store.winner(pair.problem, DEVICE)
        assert winner is not None
        found = cache.find(winner.artifact_digest)
        assert found is not None
        digests = [part.digest for part in parts_of(found.path, found.sha256)]
        assert winner.artifact_digest == pair_digest(digests)
        for part, digest in zip(("dispatch", "combine"), digests, strict=True):
            kernel = store.winner(part_problem(pair.problem, part), DEVICE)
            assert kernel is not None and kernel.artifact_digest == digest
    kept = cache.gc([winner.artifact_digest], older_than_s=-1.0)
    assert not {winner.artifact_digest, *digests} & set(kept.digests), "a pair keeps its parts"
    assert isinstance(winner.config, Config)
