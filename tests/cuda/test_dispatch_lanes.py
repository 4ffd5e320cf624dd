"""The dispatch role's own source, run on the CPU lane by lane with a copy engine that is always late: rows reach every
slot, or their place among all ranks' tokens, no row slot is reused early, and a pad block is never complete before its
rows are. Mistakes planted in the source are caught.
"""

from __future__ import annotations

import shutil

import lane_programs
import pytest
from lane_programs import int32_file, ran

from tktune.core import tables
from tktune.core.paths import csrc_root
from tktune.core.problem import Problem
from tktune.core.routing import parse_routing

REAL = [f"comm/{name}.cuh" for name in ("row_ring", "dispatch", "dispatch_config")]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH")


def compiled(folder, form, mistake=None):
    """The role's program; `mistake` is a text of its source and what stands there instead."""
    lane_programs.laid_out(folder, ["lanes"], REAL)
    if mistake is not None:
        lane_programs.plant(folder, REAL, *mistake)
    return lane_programs.compiled(
        folder, "-O2", f"-DINDEXED={int(form == 'indexed')}", "-I", str(csrc_root())
    )


@pytest.fixture(scope="module")
def runners(tmp_path_factory):
    return {form: compiled(tmp_path_factory.mktemp(form), form) for form in ("gathered", "indexed")}


def tables_file(path, problem, rank, routing, seed, form="gathered"):
    ids = parse_routing(routing).draw(problem, seed)
    built = tables.build(ids, problem, rank)
    head = [
        *(built.rows, built.num_pad_blocks, len(built.pull_tokens), problem.top_k),
        *(problem.hidden, problem.pad, problem.world, problem.tokens, rank),
    ]
    slack = built.own_slack if form == "indexed" else built.slack
    return int32_file(path, (head, built.pull_indices, built.pull_tokens, built.pull_slots, slack))


PROBLEMS = [
    (Problem("dispatch_gemm", 16, 16, 8, 3, 40, world=2, pad=16), "uniform"),
    (Problem("dispatch_gemm", 24, 16, 64, 40, 6, world=1, pad=8), "uniform"),  # more destinations than lanes
    (Problem("dispatch_gemm", 16, 16, 12, 2, 30, world=3, pad=32), "empty:0,5"),
    (Problem("dispatch_gemm", 8, 16, 16, 4, 20, world=8, pad=8), "hot:0.9@3"),
    (Problem("dispatch_gemm", 16, 16, 4, 1, 9, world=2, pad=8), "one:3"),  # rank 0 wants nothing
]
# blocks, warps, slots of a warp, pending, unread, pieces of a row, wave, opening compute blocks, their waves, pad blocks
# that each of those brings rows for (0: for as many waves)
MANY = 2**30
SHAPES = [
    (2, 3, 2, 1, 1, 1, 4, 0, 0, 0),
    (1, 1, 1, 0, 0, 1, 1, 0, 0, 0),
    (3, 2, 4, 2, 1, 1, 1, 2, 1, 0),
    (3, 2, 4, 2, 1, 2, 1, 2, MANY, 1),
    (2, 2, 8, 8, 4, 4, 8, 1, MANY, 2),
    (1, 2, 3, 8, 1, 2, 32, 0, 0, 0),
    (2, 1, 3, 1, 2, 4, 2, 1, 2, 0),
]


def launch_words(problem, head, shape, seed):
    """The program's arguments; a row of few bytes moves in as many pieces of 16 bytes as it has."""
    pieces = shape[5]
    while 2 * problem.hidden % (16 * pieces):
        pieces //= 2
    return (head, *shape[:5], pieces, *shape[6:], seed)


FORMS = [("gathered", head) for head in (2**31 - 1, 0, 32, 96)] + [("indexed", 0), ("indexed", 96)]


@pytest.mark.parametrize(("form", "head"), FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_row_arrives_before_it_is_counted(runners, tmp_path, form, head, shape):
    """`head`: rows that are fetched slot by slot (all, none, some); indexed rows have no slots and ignore it."""
    for number, (problem, routing) in enumerate(PROBLEMS):
        for rank in {0, problem.world - 1}:
            path = tables_file(tmp_path / "tables", problem, rank, routing, number, form)
            words = launch_words(problem, head, shape, 11 * number + rank)
            done = ran(runners[form], path, *words)
            assert done.returncode == 0, f"{problem} {routing} rank {rank} {words}: {done.stderr}"


@pytest.mark.parametrize("form", ["gathered", "indexed"])
def test_the_check_would_notice_a_slot_that_is_reused_too_early(runners, tmp_path, form):
    """With as many unread slots as there are, the wait no longer protects the slot that is loaded next."""
    problem, routing = PROBLEMS[0]
    path = tables_file(tmp_path / "tables", problem, 0, routing, 0, form)
    assert ran(runners[form], path, 2**31 - 1, 1, 1, 2, 8, 2, 1, 4, 0, 0, 0, 1).returncode == 1


FULL_WAIT = "wait_performed(pending);"
LAST = "        close_slots(full, team.slots);\n"
MISTAKES = {
    "a row is counted when its slot was read": (FULL_WAIT, "wait_read(pending);"),
    "a row is counted before the wait": (FULL_WAIT, f"if (pending == 0) {FULL_WAIT}"),
    "a slot is freed before its stores have read it": ("wait_read(unread);", ""),
    "one store too many is thought read": ("freed = stored - unread;", "freed = stored - unread + 1;"),
    "one store too many is thought performed": (
        "for (; retired < stored - pending; ++retired)",
        "for (; retired < min(stored, stored - pending + 1); ++retired)",
    ),
    "the last stores are not waited for": (f"        retire(0);\n{LAST}", LAST),
    "a row is counted with its first piece": ("if (last_piece(retired))", "if (first_piece(retired))"),
    "an opening block leaves before its rows are there": (
        "look(G.arrivals + until.first + lane_id()) >= G.gemm.pad",
        "look(G.arrivals + until.first + lane_id()) >= 1",
    ),
    "all pieces are the first": (
        "from + (loaded & (team.pieces - 1)) * piece_bytes",
        "from + 0 * piece_bytes",
    ),
    "a slot's phase never turns": ("            phase ^= 1;\n", ""),
    "the tail seeds nothing": ("G.arrivals[block] = __ldg(G.slack + block)", "G.arrivals[block] = 0"),
    "a slot forgets whose row it holds": (
        "            held = first + lane;\n",
        "            held = first;\n",
    ),
}
GATHERED_MISTAKES = {  # by index the first rows are own ones, which nobody misses
    "the wave that was drawn ahead is lost": (
        "            if (until.count > 0 && complete()) draws = 0;  // this wave is the last\n            draw_ahead();\n",
        "            draw_ahead();\n            if (until.count > 0 && complete()) draws = 0;\n",
    ),
}
INDEXED_MISTAKES = {
    "own rows are fetched too": ("if (kIndexed && request.x == G.gemm.guard.rank)", "if (false)"),
    "rows of all ranks go to one section": (
        "held_row = source * G.tokens[source].rows + token",
        "held_row = token",
    ),
    "rows go to their slots": ("store_to(__shfl_sync(kAll, held_row, entry))", "store_to(held)"),
}


@pytest.mark.parametrize(
    ("form", "name", "mistake"),
    [
        *(("gathered", name, mistake) for name, mistake in {**MISTAKES, **GATHERED_MISTAKES}.items()),
        *(("indexed", name, mistake) for name, mistake in {**MISTAKES, **INDEXED_MISTAKES}.items()),
    ],
)
def test_a_mistake_in_the_role_is_caught(tmp_path, form, name, mistake):
    program = compiled(tmp_path / "lanes", form, mistake)
    for number, (problem, routing) in enumerate(PROBLEMS[:3]):
        path = tables_file(tmp_path / "tables", problem, 0, routing, number, form)
        for shape in (
            (2, 2, 3, 2, 1, 2, 4, 0, 0, 0),
            (2, 2, 3, 2, 1, 2, 4, 1, MANY, 2),
            (3, 2, 3, 2, 1, 2, 1, 2, MANY, 1),
        ):
            if ran(program, path, *launch_words(problem, 48, shape, number)).returncode not in (0, 2):
                return
    pytest.fail(f"nothing notices when {name}")
