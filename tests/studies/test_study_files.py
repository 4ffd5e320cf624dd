"""Study files: what they expand to, and the one sentence a mistake gets."""

from __future__ import annotations

import numpy as np
import pytest

from tktune.core.device import DeviceClass, device_class
from tktune.core.errors import StudyError, WordsError
from tktune.core.policy import serving_policy
from tktune.search.study import list_studies, load_study

CPU = DeviceClass("cpu", "x86-64-v3.2c", 4, 1 << 20, 32 << 20, "shm")
HEAD = 'name = "mine"\nfamily = "dispatch_gemm"\n'
SHAPE = "hidden = 64\ncols = 64\nexperts = 4\ntop_k = 2\ntokens = 8\n"
GOOD = f"{HEAD}[problem]\n{SHAPE}"


@pytest.fixture
def load(tmp_path):
    def write_and_load(text):
        (tmp_path / "mine.toml").write_text(text)
        return load_study(tmp_path / "mine.toml")

    return write_and_load


def test_a_small_study_has_sane_defaults(load):
    study = load(GOOD)
    assert (study.name, study.family, study.device) == ("mine", "dispatch_gemm", "cpu")
    assert (study.trials, study.seconds, study.seed, study.finalists) == (200, 600.0, 0, 4)
    assert len(study.problems) == 1
    assert study.problems[0].world == 1
    assert study.policy(CPU) == serving_policy("cpu", CPU.l2_bytes)


def test_lists_expand_to_their_product(load):
    study = load(
        f"{HEAD}[problem]\nhidden = [64, 128]\ncols = [64, 96]\nexperts = 4\ntop_k = 2\ntokens = [8, 16]\n"
        'pad = [32, 64]\nrouting = ["uniform", "zipf:1.0", "zipf:1"]\n'
    )
    assert len(study.problems) == 32 == len(set(study.problems))
    assert {p.routing for p in study.problems} == {"uniform", "zipf:1"}


def test_separate_problems_share_defaults(load):
    study = load(
        f"{GOOD}world = 2\n[[problems]]\ntokens = [8, 16]\n[[problems]]\nhidden = 128\n[[problems]]\ntokens = 8\n"
    )
    assert [(p.hidden, p.tokens, p.world) for p in study.problems] == [(64, 8, 2), (64, 16, 2), (128, 8, 2)]


def test_policy_search_and_pins_are_read(load):
    study = load(
        f'{GOOD}[policy]\niterations = 9\nfirst_iterations = 2\ncache_state = "warm"\nrouting_seeds = [1, 2]\n'
        "[search]\ntrials = 5\nseconds = 10\nseed = 3\nfinalists = 2\n[pins]\nSTAGES = 2\norder = ['slot']\n"
    )
    policy = study.policy(CPU)
    assert (policy.iterations, policy.first_iterations, policy.cache_state) == (9, 2, "warm")
    assert policy.routing_seeds == (1, 2)
    assert policy.flush_bytes == 2 * CPU.l2_bytes
    assert (study.trials, study.seconds, study.seed, study.finalists) == (5, 10.0, 3, 2)
    assert study.pins == {"STAGES": (2,), "order": ("slot",)}
    space = study.space(study.problems[0].replace(pad=64), CPU)
    assert {(c["STAGES"], c["order"]) for c in space.feasible} == {(2, "slot")}


def test_a_study_can_be_aimed_at_another_device(load):
    study = load(GOOD)
    assert study.on("sm_120a").device == "sm_120a"
    assert study.on("sm_120a").problems == study.problems
    assert study.policy(device_class("sm_90a")).launch_mode == "graph"


def test_a_grouped_gemm_study_names_the_rank(load):
    study = load(f'name = "g"\nfamily = "grouped_gemm"\n[problem]\n{SHAPE}ep_world = 2\nep_rank = 1\n')
    assert (study.problems[0].ep_world, study.problems[0].ep_rank) == (2, 1)


def test_a_trace_is_found_beside_its_study(load, tmp_path):
    np.save(tmp_path / "t.npy", np.tile([0, 1], (8, 1)))
    study = load(f'{GOOD}routing = "trace:t.npy"\n')
    assert study.problems[0].routing.startswith(f"trace:{tmp_path / 't.npy'}#")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "name is missing. Add a line such as"),
        ('name = "a"\n', "family is missing"),
        (HEAD, r"\[problem\] lacks hidden. Add a line such as hidden = 4096"),
        (GOOD.replace("tokens = 8", ""), r"\[problem\] lacks tokens"),
        (f"{HEAD}[[problems]]\nhidden = 64\n", r"\[\[problems\]\] number 1 lacks cols"),
        (
            GOOD.replace("hidden", "hiden"),
            r"\[problem\] has no key 'hiden'; the nearest known key is 'hidden'",
        ),
        (f"famly = 1\n{GOOD}", "no key 'famly'; the nearest known key is 'family'"),
        (f"zzz = 1\n{GOOD}", "the file has no key 'zzz'. Use one of: name, family"),
        (f"{GOOD}[serch]\n", "nearest known key is 'search'"),
        (
            f"{GOOD}[search]\ntrails = 3\n",
            r"\[search\] has no key 'trails'; the nearest known key is 'trials'",
        ),
        (f"{GOOD}[[problems]]\ntoken = 3\n", r"\[\[problems\]\] has no key 'token'; the nearest"),
        (
            GOOD.replace("hidden = 64", "hidden = '64'"),
            "hidden = '64' is wrong: it should be a whole number or a list",
        ),
        (GOOD.replace("tokens = 8", "tokens = [8, true]"), "tokens = .* should be a whole number"),
        (GOOD.replace("tokens = 8", "tokens = 0"), "tokens = 0 is wrong: it should be at least 1"),
        (GOOD.replace("tokens = 8", "tokens = []"), "tokens = .* is wrong"),
        (f"{GOOD}world = 0\n", "world = 0 is wrong: it should be at least 1"),
        (
            f"{GOOD}pad = []\n",
            "pad = \\[\\] is wrong: it should be a whole number or a list of at least one value",
        ),
        (
            f"{GOOD}finish = []\n",
            "finish = \\[\\] is wrong: it should be a text or a list of at least one value",
        ),
        (f"{GOOD}finish = true\n", "finish = True is wrong: it should be a text or a list"),
        (f"{GOOD}[search]\ngangs = 0\n", "gangs = 0 is wrong: it should be at least 1"),
        (f"{GOOD}[search]\ngangs = '2'\n", "gangs = '2' is wrong: it should be a whole number"),
        (f"{GOOD}[policy]\ninclude_plan = 1\n", "include_plan = 1 is wrong: it should be true or false"),
        (f"{GOOD}world = 3\n", "experts = 4 cannot be shared evenly by 3 ranks"),
        (f"{GOOD}world = 99\n", "not in 1..8"),
        (GOOD.replace("top_k = 2", "top_k = 5"), "top_k = 5 is more than experts = 4"),
        (f'{GOOD}routing = "zip"\n', "The routing 'zip' is not understood"),
        (f'{GOOD}routing = "one:4"\n', "names expert 4"),
        (f'{GOOD}routing = "trace:none.npy"\n', "none.npy cannot be read"),
        (f'{GOOD}dtype = "fp4"\n', "dtype = 'fp4' is not known"),
        (f"{GOOD}ep_world = 2\n", "takes no ep_world"),
        (GOOD.replace("dispatch_gemm", "gemm"), "no family called 'gemm'"),
        (f"{GOOD}[search]\ntrials = 0\n", "trials = 0 is wrong"),
        (f"{GOOD}[search]\nseconds = 'long'\n", "seconds = 'long' is wrong: it should be a number"),
        (f'{GOOD}[policy]\ncache_state = "hot"\n', "it should be 'cold' or 'warm'"),
        (f"{GOOD}[policy]\niterations = 2\n", "first_iterations = 3 is more than iterations = 2"),
        (f"{GOOD}[pins]\nSTAGES = 1.5\n", "STAGES = 1.5 is wrong"),
        (f"name = 3\n{GOOD[GOOD.index('family') :]}", "name = 3 is wrong: it should be a text"),
        ("problem = 3\n" + HEAD, "problem = 3 is wrong: it should be a table"),
        ("name = \n", "is not TOML"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_file_key_and_way_out(load, text, says):
    with pytest.raises(StudyError, match=says) as caught:
        load(text)
    assert "mine.toml" in str(caught.value)
    assert caught.value.way_out
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_a_pin_of_another_space_is_refused(load):
    study = load(f"{GOOD}[pins]\nWARP_M = 16\n")
    with pytest.raises(WordsError, match="no parameter 'WARP_M'"):
        study.space(study.problems[0], CPU)


def test_a_study_that_is_not_there_names_those_that_are(tmp_path):
    with pytest.raises(StudyError, match=r"Did you mean quickstart\?"):
        load_study("quickstrat")
    with pytest.raises(StudyError, match="There is no study"):
        load_study(tmp_path / "none.toml")
    with pytest.raises(StudyError, match="is a folder"):
        load_study(tmp_path)
    (tmp_path / "b.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StudyError, match="cannot be read"):
        load_study(tmp_path / "b.toml")


NAMES = (
    "deepseek-v3-combine",
    "deepseek-v3",
    "glm-4.5",
    "gpt-oss-120b",
    "mixtral-8x7b",
    "quickstart",
    "qwen3-235b-a22b-combine",
    "qwen3-235b-a22b",
    "qwen3-30b-a3b-combine",
    "qwen3-30b-a3b",
)
MODELS = {
    "deepseek-v3": (7168, 4096, 256, 8),
    "deepseek-v3-combine": (2048, 7168, 256, 8),
    "glm-4.5": (5120, 3072, 160, 8),
    "gpt-oss-120b": (2880, 5760, 128, 4),
    "mixtral-8x7b": (4096, 28672, 8, 2),
    "qwen3-235b-a22b": (4096, 3072, 128, 8),
    "qwen3-235b-a22b-combine": (1536, 4096, 128, 8),
    "qwen3-30b-a3b": (2048, 1536, 128, 8),
    "qwen3-30b-a3b-combine": (768, 2048, 128, 8),
}


def test_these_studies_ship():
    assert tuple(path.stem for path in list_studies()) == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("device", ["cpu", "sm_90a", "sm_120a"])
def test_every_shipped_problem_is_tunable_on_every_device_class(name, device):
    study = load_study(name)
    found = CPU if device == "cpu" else device_class(device)
    seen = set()
    for problem in study.problems:
        shape = (problem.hidden, problem.cols, problem.pad, problem.top_k)
        if shape in seen:  # tokens and routing leave the space as it is
            continue
        seen.add(shape)
        space = study.space(problem, found)
        builds = space.restrict({name: [space.default[name]] for name in space.launch_names})
        assert len(builds.feasible) > 100
        assert space.is_feasible(builds.default_config())


@pytest.mark.parametrize("name", MODELS)
def test_models_have_their_published_shapes(name):
    study = load_study(f"{name}.toml")
    assert {(p.hidden, p.cols, p.experts, p.top_k) for p in study.problems} == {MODELS[name]}
    assert len({p.tokens for p in study.problems}) >= 3
    assert len({p.pad for p in study.problems}) >= 2


def test_gpt_oss_loses_what_does_not_divide_and_keeps_the_rest():
    study = load_study("gpt-oss-120b")
    found = study.space(study.problems[0], CPU).feasible
    assert {c["RED_BLOCK"] for c in found} == {32, 64}
    assert next(row.removed for row in found.waterfall if row.name == "red_block_divides_hidden") > 0


def test_quickstart_is_small_and_on_the_cpu():
    study = load_study("quickstart")
    assert (study.device, study.family, len(study.problems)) == ("cpu", "dispatch_gemm", 1)
    assert study.problems[0].world == 2
    assert study.trials >= 40
    assert study.seconds <= 100
