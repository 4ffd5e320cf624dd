"""The roles of pushed rows and their gate, their own source, on all ranks at once, lane by lane on the CPU, with a copy
engine that is always late and stores that other ranks see only behind a fence: no flag, no count and no gate is ahead of
its rows, launch after launch. Mistakes planted in the source are caught.
"""

from __future__ import annotations

import shutil

import lane_programs
import pytest
from lane_programs import int32_file, ran

from tktune.core import push_tables, tables
from tktune.core.paths import csrc_root
from tktune.core.problem import Problem
from tktune.core.routing import parse_routing

REAL = [
    f"comm/{name}.cuh"
    for name in ("row_ring", "dispatch", "dispatch_config", "push", "push_config", "scatter")
]
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not on PATH")


def compiled(folder, world, form="indexed", mistake=None):
    """The program for `world` ranks; `mistake` is a text of a role's source, what stands there instead, and in which
    header where several have it.
    """
    lane_programs.laid_out(folder, ["lanes", "push_lanes"], REAL)
    if mistake is not None:
        text, instead, *names = mistake
        lane_programs.plant(folder, [f"comm/{name}" for name in names] or REAL, text, instead)
    defines = (f"-DRANKS={world}", f"-DINDEXED={int(form == 'indexed')}")
    return lane_programs.compiled(folder, "-O0", *defines, "-I", str(csrc_root()))


def tables_file(path, problem, seed, form="indexed"):
    ids = parse_routing(problem.routing).draw(problem, seed)
    arrays = [[problem.tokens, problem.hidden, problem.pad, problem.top_k, problem.world]]
    for rank in range(problem.world):
        here = tables.build(ids, problem, rank)
        push = push_tables.build(ids, problem, rank)
        arrays.append([here.rows, here.num_pad_blocks, len(here.pull_tokens)])
        arrays.append([*push.offsets, push.turns])
        arrays += [push.tokens, push.blocks, push.expected, push.gate_sources]
        slack = here.own_slack if form == "indexed" else here.slack
        arrays += [here.pull_indices, here.pull_tokens, here.pull_slots, slack]
    return int32_file(path, arrays)


def problem_of(world, *shape, pad, routing="uniform"):
    return Problem("dispatch_gemm", *shape, world=world, pad=pad, routing=routing)


PROBLEMS = {  # hidden, cols, experts, top-k, tokens
    1: [problem_of(1, 16, 16, 4, 2, 9, pad=8)],
    2: [
        problem_of(2, 16, 16, 8, 3, 40, pad=16),
        problem_of(2, 16, 16, 4, 1, 9, pad=8, routing="one:3"),  # rank 0 gets nothing
        problem_of(2, 8, 16, 96, 70, 5, pad=8),  # more pad blocks a token than lanes
    ],
    3: [
        problem_of(3, 16, 16, 12, 2, 30, pad=32, routing="empty:0,5"),
        problem_of(3, 24, 16, 6, 3, 17, pad=8, routing="hot:0.9@3"),
    ],
    8: [problem_of(8, 8, 16, 16, 4, 12, pad=8, routing="hot:0.9@3")],
}
# blocks of a rank, warps, slots of a warp, pending, unread, wave; and blocks that push before they scatter
SHAPES = [
    (2, 2, 3, 2, 1, 4),
    (2, 3, 2, 1, 1, 4),
    (1, 1, 1, 0, 0, 1),
    (1, 2, 8, 8, 4, 8),
    (3, 1, 3, 2, 0, 32),
    (1, 2, 2, 5, 7, 2),
]
PUSHING = [1, 2, 1, 1, 2, 1]


@pytest.mark.parametrize("form", ["indexed", "gathered"])
@pytest.mark.parametrize("world", PROBLEMS)
def test_nothing_is_ahead_of_its_rows(tmp_path, world, form):
    program = compiled(tmp_path, world, form)
    for number, problem in enumerate(PROBLEMS[world]):
        path = tables_file(tmp_path / "tables", problem, number, form)
        for shape, pushing in list(zip(SHAPES, PUSHING, strict=True))[: 2 if world == 8 else 6]:
            done = ran(program, path, *shape, 7 * number + 1, pushing)
            assert done.returncode == 0, f"{problem} {shape}: {done.stderr}"


def test_the_check_would_notice_a_slot_that_is_reused_too_early(tmp_path):
    early = ("freed = stored - unread;", "freed = stored;", "push.cuh")
    program = compiled(tmp_path, 2, "indexed", early)
    path = tables_file(tmp_path / "tables", PROBLEMS[2][0], 0)
    assert ran(program, path, *SHAPES[1], 1, 1).returncode == 1


COUNTED = "for (; retired < stored - open; ++retired)"
FULL_WAIT = "tma::store_async_wait<n.value>()"
LAST = "        retire(0);\n        close_slots(full, G.warp_slots);"
FLAG = "announce_fenced(G.flags[its_to] + static_cast<int64_t>(block) * Globals::world + me, *G.sequence);"
MISTAKES = {
    "a row is counted before its store is performed": (COUNTED, COUNTED.replace(" - open", "")),
    "a row is counted when its store has read it": (FULL_WAIT, FULL_WAIT.replace("async_", "async_read_")),
    "the last stores are not waited for": (LAST, LAST.split("\n")[1]),
    "whoever announces does not fence": (
        "            fence_system();\n            G.missing",
        "            G.missing",
    ),
    "the first row of a block raises the flag": (
        "fetch_add_release(G.missing + counter, -1) != 1",
        "fetch_add_release(G.missing + counter, -1) != G.push_expected[counter]",
    ),
    "the last but one raises it": ("G.missing + counter, -1) != 1", "G.missing + counter, -1) != 2"),
    "the flag of the launch before": (FLAG, FLAG.replace("sequence", "sequence - 2")),
    "the flag of a launch to come": (FLAG, FLAG.replace("sequence", "sequence + 2")),
    "the flag of another rank": (FLAG, FLAG.replace("+ me", "+ its_to")),
    "the flag of another block": (FLAG, FLAG.replace("(block)", "(0)")),
    "counters are not put back": ("G.missing[counter] = __ldg(G.push_expected + counter);", ""),
    "destinations share their counters": ("__ldg(G.push_plan + its_to) + block", "block"),
    "rows go to another destination": (
        "G.sections[to_of(its_target)].at",
        "G.sections[(to_of(its_target) + 1) % Globals::world].at",
    ),
    "a slot forgets where its row goes": ("            held_target = its_target;\n", ""),
    "a slot forgets which row it holds": ("held_place = its_place;", "held_place = place;"),
    "rows of all ranks go to one section": (
        "me * tokens + token_of(its_target), 0",
        "token_of(its_target), 0",
    ),
    "another rank's row is loaded": ("G.tokens[me].at(", "G.tokens[to_of(its_target)].at("),
    "one destination is left out": ("to = me + 1 + item % kOthers", "to = me + 1 + item % 1"),
    "the gate takes the flag of the launch before": (
        "&& seen < sequence;",
        "&& seen + 2 < sequence;",
    ),
    "the gate waits for the flag of the launch before": (
        "[&] { return look_at_peers(word) >= sequence; }",
        "[&] { return look_at_peers(word) + 2 >= sequence; }",
    ),
    "the gate waits for one source alone": (
        "const int source = lane_id();",
        "const int source = 2 * lane_id();",
    ),
    "the gate looks at another block": (
        "G.flags[G.gemm.guard.rank] + index",
        "G.flags[G.gemm.guard.rank] + source",
    ),
    "the gate looks at its own flags on a peer": (
        "G.flags[G.gemm.guard.rank] + index",
        "G.flags[source] + index",
    ),
    "the gate waits for nobody": ("if (!(G.roles & kGated)) return;", "if (G.roles & kGated) return;"),
    "the gate waits for whoever pushes nothing": (
        "(sources >> source & 1) && seen",
        "seen",
    ),
}


OF_ROW = "G.flags[to_of(its_target)] + me * tokens + token_of(its_target)"
GATHERED_MISTAKES = {
    "a row is announced before its store is performed": (COUNTED, COUNTED.replace(" - open", ""), "push.cuh"),
    "a row is announced when its store has read it": (
        FULL_WAIT,
        FULL_WAIT.replace("async_", "async_read_"),
        "push.cuh",
    ),
    "rows are announced without a fence": (
        "            if (!Globals::kIndexed && retired < stored - open) fence_system();\n",
        "",
    ),
    "another row is announced": (OF_ROW, OF_ROW.rpartition(" + ")[0]),
    "a row is announced to another rank": (
        OF_ROW,
        OF_ROW.replace("[to_of(its_target)]", "[(to_of(its_target) + 1) % Globals::world]"),
    ),
    "rows go to another destination": MISTAKES["rows go to another destination"],
    "nobody waits for a row that is not staged": ("if (!there && idle) await_staged(row);", ""),
    "the flag of the launch before will do": (
        "there = look_at_peers(word(row)) >= sequence;",
        "there = look_at_peers(word(row)) + 2 >= sequence;",
    ),
    "the row of another token is waited for": (
        "return G.flags[me] + row; }",
        "return G.flags[me] + row / tokens * tokens; }",
    ),
    "peers' rows are taken for own ones": ("return row / tokens == me; }", "return row / tokens != me; }"),
    "a row is counted before it is stored": (COUNTED, COUNTED.replace(" - open", ""), "scatter.cuh"),
    "a row is counted when its stores have read it": (
        "wait_performed(open);",
        "wait_read(open);",
        "scatter.cuh",
    ),
    "a slot is loaded before it is free": ("freed = stored - unread;", "freed = stored;", "scatter.cuh"),
    "rows in flight are forgotten at the end": (
        "            if (stored < loaded)\n                advance();\n            else if",
        "if",
    ),
    "a scattering slot forgets whose row it holds": ("held = first + lane;", "held = first;", "scatter.cuh"),
    "a row goes to its first slot only": (
        "left; left &= left - 1) {\n                const int64_t",
        "left; left = 0) {\nconst int64_t",
    ),
    "the staged row of another source": ("request.x * tokens + request.y", "request.y"),
}


def told(folder, form, mistake):
    """Whether some case ends otherwise than that of a right program."""
    program = compiled(folder, 3, form, mistake)
    for seed in range(6):
        path = tables_file(folder / "tables", PROBLEMS[3][seed % 2], seed, form)
        if ran(program, path, *SHAPES[0], seed, PUSHING[0]).returncode not in (0, 2):
            return True
    return False


@pytest.mark.parametrize("form", ["indexed", "gathered"])
def test_without_a_mistake_the_cases_that_follow_pass(tmp_path, form):
    assert not told(tmp_path, form, None)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_the_role_or_the_gate_is_caught(tmp_path, name):
    assert told(tmp_path, "indexed", (*MISTAKES[name], "push.cuh"))


@pytest.mark.parametrize("name", GATHERED_MISTAKES)
def test_a_mistake_where_rows_are_staged_is_caught(tmp_path, name):
    assert told(tmp_path, "gathered", GATHERED_MISTAKES[name])
