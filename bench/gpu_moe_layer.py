"""An expert layer on two GPUs against the serial path, and against what its parts allow, in one run and one harness.

    python bench/gpu_moe_layer.py [--db URL] [--models qwen3-30b,seed] [--tokens 512 2048 8192] [--pad 128]
                                  [--modes graph,direct] [--out bench/results/NAME.json]

For each model and number of tokens a rank: the layer (rows copied, tables, both kernels, the meeting of ranks), the same
with rows in place, both serial forms (NCCL all-gather, tables, gather, grouped GEMM, silu · up, grouped GEMM, combine by
index_add in fp32 or by gather and weighted sum, NCCL reduce-scatter), and the parts: both GEMMs alone, tables, one meeting, the
final reduce. bound = the faster serial form ÷ the sum of the parts. Configs are the database's winners of the pair, else of
the kernels, else defaults; --dispatch and --combine give others. Before each launch L2 is flushed and the ranks meet on the
device; a launch counts by its slowest rank; everything is timed in interleaved rounds and checked against an fp32 reference
first.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from moe_bench.figures import Row, slowest_us, table
from two_gpus import driver

from tktune.build.cache import ArtifactCache
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.device_cuda import cuda_device_classes
from tktune.core.errors import TktuneError, WordsError
from tktune.core.problem import Problem
from tktune.families.base import family
from tktune.moe.choosing import choose
from tktune.moe.parts import COMBINE, DISPATCH, FAMILIES, PARTS, joined_config, part_config, part_problem
from tktune.search.start import start_configs

HERE = Path(__file__).resolve().parent
# hidden, intermediate, experts, top_k
MODELS = {
    "qwen3-30b": (2048, 768, 128, 8),
    "qwen3-235b": (4096, 1536, 128, 8),
    "deepseek-v3": (7168, 2048, 64, 8),
    "seed": (4096, 3072, 64, 8),
}


@dataclasses.dataclass
class Wanted:
    """One row of the bench: a layer, its config and where it comes from."""

    name: str
    layer: Problem
    config: Config
    provenance: str


def rows_of(arguments: argparse.Namespace, device: DeviceClass) -> list[Wanted]:
    """Raises `WordsError` for a model that there is none of, and what lookups raise."""
    names = [word for word in arguments.models.split(",") if word]
    unknown = [name for name in names if name not in MODELS]
    if unknown:
        raise WordsError(f"There is no model {unknown[0]!r}.", f"Use some of: {', '.join(MODELS)}.")
    rows = []
    for name in names or MODELS:
        hidden, intermediate, experts, top_k = MODELS[name]
        for tokens in arguments.tokens:
            layer = Problem(
                "moe_layer", hidden, intermediate, experts, top_k, tokens, driver.WORLD, weight_layout="enk",
                routing=arguments.routing, pad=arguments.pad or 128,
            )  # fmt: skip
            config, layer, provenance = config_of(layer, arguments, device)
            rows.append(Wanted(f"{name}, {tokens} tokens", layer, config, provenance))
    return rows


def config_of(
    layer: Problem, arguments: argparse.Namespace, device: DeviceClass
) -> tuple[Config, Problem, str]:
    """The config, the layer at its pad, and where the config comes from."""
    choice = choose(layer, any_pad=arguments.pad is None, policy="serving", device=device, db=arguments.db)
    layer, given = choice.problem, {DISPATCH: arguments.dispatch, COMBINE: arguments.combine}
    parts = {}
    for part in PARTS:
        space = family(FAMILIES[part]).space(part_problem(layer, part), device)
        text = given[part]
        parts[part] = choice.parts[part].config if text is None else start_configs(space, (text,))[0]
    where = "pair" if choice.pair is not None else "kernels"
    said = f"{where}, {choice.dispatch.provenance}" if given[DISPATCH] is given[COMBINE] is None else "given"
    return joined_config(parts[DISPATCH], parts[COMBINE]), layer, said


def build(rows: list[Wanted], device: DeviceClass, cache: ArtifactCache) -> list[dict[str, Any]]:
    """Rows as ranks take them. Raises `TktuneError` when an artifact cannot be built."""
    owner = family("moe_layer")
    parts = [
        Config({name: value for name, value in row.config.items() if name in built_names(row, device)})
        for row in rows
    ]
    specs = [owner.build_spec(part, row.layer, device) for row, part in zip(rows, parts, strict=True)]
    words = []
    for number, (row, part, outcome) in enumerate(zip(rows, parts, cache.build(specs), strict=True)):
        if outcome.artifact is None:
            raise TktuneError(f"{row.name} cannot be built: {outcome.error_sentence}")
        words.append(
            {
                "number": number,
                "problem": row.layer.key,
                "config": dict(row.config),
                "part": dict(part),
                "artifact": str(outcome.artifact.path),
                "sha256": outcome.artifact.sha256,
            }
        )
    return words


def built_names(row: Wanted, device: DeviceClass) -> set[str]:
    return {
        f"{part}.{name}"
        for part in PARTS
        for name in family(FAMILIES[part]).space(part_problem(row.layer, part), device).build_names
        if name in part_config(row.config, part)
    }


def results(
    rows: list[Wanted], found: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, list[tuple[str, Row]]]]:
    """JSON of every row that all ranks finished, and (name, row) by launch mode."""
    shown: list[dict[str, Any]] = []
    judged: dict[str, list[tuple[str, Row]]] = {}
    for number, wanted in enumerate(rows):
        here = driver.by_rank(found, number)
        if not here:
            continue
        modes = {}
        for mode in driver.shared_modes(here):
            runs = [one["modes"][mode] for one in here]
            us = {name: slowest_us([run[name] for run in runs]) for name in runs[0]}
            row = Row(us, wanted.layer.tokens)
            modes[mode] = row.facts()
            judged.setdefault(mode, []).append((wanted.name, row))
        shown.append(
            {
                "name": wanted.name,
                "problem": wanted.layer.key,
                "provenance": wanted.provenance,
                "config": here[0]["config"],
                "wrong": [one["wrong"] for one in here],
                "modes": modes,
            }
        )
    return shown, judged


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    driver.add_options(parser, modes="graph", seconds=300.0)
    parser.add_argument("--models", default="", help=f"of {', '.join(MODELS)} [default: all]")
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 2048, 8192], help="of one rank")
    parser.add_argument("--routing", default="uniform")
    parser.add_argument("--pad", type=int, help="[default: the fastest stored one, else 128]")
    parser.add_argument("--dispatch", help='a config in the winner\'s place, "PARAM=VALUE ..."')
    parser.add_argument("--combine", help='a config in the winner\'s place, "PARAM=VALUE ..."')
    parser.add_argument("--sweep", action="store_true", help="first try each launch parameter on the layer")
    arguments = driver.parsed(parser)
    if min(arguments.tokens) < 1:
        parser.error("--tokens are at least 1")
    try:
        device = driver.two_of(cuda_device_classes())
        rows = rows_of(arguments, device)
        words = build(rows, device, ArtifactCache(arguments.cache))
    except TktuneError as error:
        print(error)
        return 1
    found, said = driver.run(HERE / "moe_bench" / "rank.py", words, device, arguments, sweep=arguments.sweep)
    shown, judged = results(rows, found)
    driver.write(arguments, device, found, said, rows=shown)
    for sentence in said:
        print(sentence)
    for mode, of_mode in judged.items():
        print(f"\n{driver.mode_title(mode)}, microseconds\n\n{table(of_mode)}")
    wrong = any(any(one["wrong"]) for one in shown)
    left_out = any(len(of_mode) < len(rows) for of_mode in judged.values()) or not judged
    return 1 if said or wrong or left_out else 0


if __name__ == "__main__":
    sys.exit(main())
