"""The fused dispatch on two GPUs against everything it should beat, all in one run and one harness.

    python bench/gpu_dispatch_gemm.py [--db URL] [--study FILE] [--shapes WORD,WORD] [--routings uniform zipf:1.2]
                                      [--modes graph,direct] [--out bench/results/NAME.json]

For each problem of the study and each routing: the winner of the database, the default, the sweep of the split at the
winner's build, compute alone, communication alone at every split, NCCL all-gather + index_select + torch._grouped_mm,
and the fastest GEMM alone of torch._grouped_mm, DeepGEMM where it can be imported, our own grouped GEMM's winner (the
database's, else the committed one), and the fused kernel's own compute. Under the first routing also the sweep that the
tuner is held against: every launch (order, raster, split) of the builds that are swept by hand
(`dispatch_bench/hand.py`). Before each launch L2 is flushed and the ranks meet on the device; a launch counts by its
slowest rank; everything is timed in interleaved rounds. Each launch is checked against an fp32 reference first, the
winner afterwards too. Then the winner and the fastest of both sweeps are measured once more side by side, which decides
whether the tuner found what they find. The sweeps are made in the first launch mode.

A rank that dies, or does not end in time, ends the bench with a sentence.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from dispatch_bench.outcome import results, summary
from dispatch_bench.wanted import Wanted, sweep_of, wanted
from two_gpus import driver

from tktune.build.cache import ArtifactCache
from tktune.core.build_spec import BuildSpec
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.device_cuda import cuda_device_classes
from tktune.core.errors import TktuneError, WordsError
from tktune.core.paths import database_url
from tktune.core.problem import Problem
from tktune.families.base import family
from tktune.search.attribution import SPLIT
from tktune.search.start import start_configs
from tktune.search.study import load_study
from tktune.store.location import place
from tktune.store.results import Store

HERE = Path(__file__).resolve().parent
STUDY = HERE.parent / "studies" / "h200" / "dispatch_gemm.toml"
ROUTINGS = ["uniform", "zipf:1.2", "hot:0.5@3"]


def shape_name(problem: Problem) -> str:
    return f"{problem.hidden}x{problem.cols}-e{problem.experts}-k{problem.top_k}-t{problem.tokens}"


@dataclasses.dataclass
class Bench:
    """What one call measures: `cases` in order, those of one shape side by side."""

    device: DeviceClass
    cases: list[Wanted]
    arguments: argparse.Namespace

    def specs(self) -> dict[str, BuildSpec]:
        """What must be built, by digest of family and build part."""
        found = {}
        for case in self.cases:
            for problem, config in _artifacts_of(case):
                bench = family(problem.family)
                part = bench.space(problem, self.device).build_part(config)
                found[_key(problem, part)] = bench.build_spec(part, problem, self.device)
        return found


def _artifacts_of(case: Wanted) -> list[tuple[Problem, Config]]:
    own = [(case.problem, config) for config in (case.winner, case.default, *case.hand)]
    if case.gemm is not None and case.gemm_problem is not None:
        own.append((case.gemm_problem, case.gemm))
    return own


def _key(problem: Problem, part: Config) -> str:
    return f"{problem.family} {problem.weight_layout} {problem.world} {part.digest}"


def chosen_cases(arguments: argparse.Namespace, device: DeviceClass) -> list[Wanted]:
    """Each problem of the study under each routing. Raises what studies and stores raise."""
    words = [word for word in arguments.shapes.split(",") if word]
    problems = [
        p for p in load_study(arguments.study).problems if not words or any(w in shape_name(p) for w in words)
    ]
    if not problems:
        raise WordsError(
            "Nothing is chosen.",
            f"Use words of: {', '.join(map(shape_name, load_study(arguments.study).problems))}.",
        )
    where = place(arguments.db or database_url())
    missing = where.path is not None and not where.path.exists()
    if missing:
        print(
            f"There is no database {where.shown} yet, so defaults are measured. Make winners with: tktune run STUDY."
        )
    with contextlib.nullcontext() if missing else Store.open(where.url, mode="ro") as store:
        cases = [
            dataclasses.replace(
                case, hand=case.hand if routing == arguments.routings[0] and arguments.hand else ()
            )
            for p in problems
            for routing in arguments.routings
            for case in [wanted(store, p.replace(routing=routing), device)]
        ]
    return [with_config(case, device, arguments.config) for case in cases] if arguments.config else cases


def with_config(case: Wanted, device: DeviceClass, text: str) -> Wanted:
    """The case with a config of the command line in the winner's place. Raises `WordsError`."""
    space = family(case.problem.family).space(case.problem, device)
    (config,) = start_configs(space, (text,))
    return dataclasses.replace(
        case, provenance="given", winner=config, sweep=sweep_of(space, config), artifact_digest="", cost=None
    )


def build(bench: Bench, cache: ArtifactCache) -> dict[str, Any]:
    """Artifacts by key. Raises `TktuneError` when one cannot be built."""
    specs = bench.specs()
    outcomes = cache.build(list(specs.values()))
    made = {}
    for (key, _), outcome in zip(specs.items(), outcomes, strict=True):
        if outcome.artifact is None:
            raise TktuneError(f"{key} cannot be built: {outcome.error_sentence}")
        made[key] = outcome.artifact
    for case in bench.cases:
        space = family(case.problem.family).space(case.problem, bench.device)
        artifact = made[_key(case.problem, space.build_part(case.winner))]
        if case.artifact_digest and artifact.digest != case.artifact_digest:
            case.notes.append("The winner was chosen from other sources than those that are measured now.")
    return made


def words_of(bench: Bench, made: dict[str, Any]) -> list[dict[str, Any]]:
    """Shapes with their cases, as ranks take them."""

    def launchable(problem: Problem, config: Config) -> dict[str, Any]:
        part = family(problem.family).space(problem, bench.device).build_part(config)
        artifact = made[_key(problem, part)]
        return {
            "config": dict(config),
            "part": dict(part),
            "artifact": str(artifact.path),
            "sha256": artifact.sha256,
        }

    def by_build(case: Wanted) -> list[dict[str, Any]]:
        space = family(case.problem.family).space(case.problem, bench.device)
        builds: dict[Config, list[Config]] = {}
        for config in case.hand:
            builds.setdefault(space.build_part(config), []).append(config)
        return [
            {**launchable(case.problem, configs[0]), "configs": [dict(config) for config in configs]}
            for configs in builds.values()
        ]

    shapes: dict[Problem, list[dict[str, Any]]] = {}
    for number, case in enumerate(bench.cases):
        gemm = None
        if case.gemm is not None and case.gemm_problem is not None:
            gemm = launchable(case.gemm_problem, case.gemm)
        shapes.setdefault(case.problem.replace(routing="uniform"), []).append(
            {
                "number": number,
                "problem": case.problem.key,
                "winner": launchable(case.problem, case.winner),
                "default": launchable(case.problem, case.default),
                "splits": [config.number(SPLIT) for config in case.sweep],
                "gemm": gemm,
                "hand": by_build(case),
            }
        )
    return [{"cases": cases} for cases in shapes.values()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    driver.add_options(parser, modes="graph,direct", seconds=420.0)
    parser.add_argument("--study", type=Path, default=STUDY, help="whose problems are measured")
    parser.add_argument(
        "--shapes", default="", help="only shapes whose name (2048x768-e128-k8-t2048) has one of these words"
    )
    parser.add_argument("--routings", nargs="+", default=ROUTINGS)
    parser.add_argument("--config", help='a config in the winner\'s place, "PARAM=VALUE ..."')
    parser.add_argument(
        "--hand",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether to make the sweep by hand",
    )
    arguments = driver.parsed(parser)
    try:
        device = driver.two_of(cuda_device_classes())
        bench = Bench(device, chosen_cases(arguments, device), arguments)
        made = build(bench, ArtifactCache(arguments.cache))
    except TktuneError as error:
        print(error)
        return 1
    found, said = driver.run(HERE / "dispatch_bench" / "rank.py", words_of(bench, made), device, arguments)
    shown, judged = results(bench.cases, found)
    driver.write(arguments, device, found, said, cases=shown)
    for sentence in [*said, *(f"{case.problem}: {note}" for case in bench.cases for note in case.notes)]:
        print(sentence)
    print(f"\n{summary(bench.cases, judged)}" if judged else "Nothing was measured to its end.")
    wrong = any(
        any(case["wrong"]) or any(mode["wrong_after_timing"] for mode in case["modes"].values())
        for case in shown
    )
    left_out = len(judged) < len(bench.cases) * len(arguments.modes.split(","))
    return 1 if said or wrong or left_out else 0


if __name__ == "__main__":
    sys.exit(main())
