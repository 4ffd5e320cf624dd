"""Five independent tunes of the CPU problem of recordings/cpu_dispatch.toml, and how far apart their winners really are.

    python bench/cpu_tunes.py [--tunes 5] [--rounds 300] [--out bench/results/cpu_tunes.json]

Each tune has a seed, a cache and a database of its own, so it compiles everything anew. Then all winners, the first of them
twice (what a config differs from itself), and the best config of the recording run in interleaved rounds on one gang. Takes
about three minutes on two quiet cores; other programs show in the twin. Exits 1 when winners lie further apart than
--most and the noise.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tktune.build.cache import ArtifactCache
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.device_cpu import cpu_device_class
from tktune.core.policy import serving_policy
from tktune.core.problem import Problem
from tktune.families.base import family
from tktune.gang.gang import Gang
from tktune.search.driver import tune
from tktune.search.judging import measured_noise, paired_ratio
from tktune.search.recording_form import read_recording
from tktune.search.study import Study, load_study

HERE = Path(__file__).parent
ITERATIONS = 5  # launches of a round


def tuned(study: Study, seed: int) -> dict[str, Any]:
    """One tune from nothing: its winner and what it took."""
    with tempfile.TemporaryDirectory() as folder:
        one = dataclasses.replace(study, seed=seed)
        (result,) = tune(one, f"sqlite:///{folder}/tunes.db", ArtifactCache(Path(folder) / "cache"))
    if result.winner is None:
        raise SystemExit(result.sentence)
    return {
        "seed": seed,
        "config": dict(result.winner),
        "verified_us": round(result.time_us or 0.0, 1),
        "default_us": round(result.default_us or 0.0, 1),
        "measured": result.measured,
        "seconds": round(result.seconds, 1),
    }


def interleaved(
    configs: Sequence[Config], problem: Problem, device: DeviceClass, rounds: int
) -> list[list[float]]:
    """The median launch of each config in each round, microseconds; the order turns from round to round."""
    owner = family(problem.family)
    space = owner.space(problem, device)
    parts = [space.build_part(config) for config in configs]
    times: list[list[float]] = [[] for _ in configs]
    with tempfile.TemporaryDirectory() as folder:
        outcomes = ArtifactCache(Path(folder)).build(
            [owner.build_spec(part, problem, device) for part in parts]
        )
        with Gang(problem, device, serving_policy(device.backend, device.l2_bytes)) as gang:
            for number in range(rounds):
                shift = number % len(configs)
                order = [*range(shift, len(configs)), *range(shift)]
                for at in reversed(order) if number % 2 else order:
                    artifact = outcomes[at].artifact
                    assert artifact is not None, outcomes[at].error_sentence
                    gang.load(artifact.path, artifact.sha256, parts[at])
                    outcome = gang.time(configs[at], "fused", number % 3, ITERATIONS)
                    if not outcome.ok:
                        raise SystemExit(f"{configs[at]} ended as {outcome.status}: {outcome.sentence}")
                    times[at].append(statistics.median(outcome.worst_us))
    return times


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tunes", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument(
        "--most", type=float, default=0.01, help="how far apart winners may lie, beside the noise"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results" / "cpu_tunes.json")
    words = parser.parse_args()
    if min(words.tunes, words.rounds) < 1:
        parser.error("--tunes and --rounds are at least 1")
    try:  # before three minutes are spent
        words.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {words.out} cannot be written: {error.strerror}; name another file")
    study, device = load_study(HERE / "recordings" / "cpu_dispatch.toml"), cpu_device_class()
    tunes = [tuned(study, seed) for seed in range(words.tunes)]
    recorded = read_recording(HERE / "recordings" / "cpu_dispatch.json.xz").optimum.config
    winners = [Config(one["config"]) for one in tunes]
    times = interleaved([*winners, winners[0], recorded], study.problems[0], device, words.rounds)
    ratios = [paired_ratio(one, times[0]) for one in times]
    noise = measured_noise(times[0], times[words.tunes])
    apart = max(ratios[: words.tunes]) / min(ratios[: words.tunes]) - 1
    for one, ratio, us in zip(tunes, ratios, times, strict=False):
        one["ratio"], one["us"] = round(ratio, 4), round(statistics.median(us), 1)
        print(
            f"{one['us']:7.1f} us  {ratio:.4f} of the first  {one['measured']} configs in {one['seconds']} s  {one['config']}"
        )
    facts = {
        "device": str(device),
        "date": datetime.date.today().isoformat(),
        "rounds": words.rounds,
        "tunes": tunes,
        "twin_of_the_first": round(ratios[words.tunes], 4),
        "best_of_the_recording": round(ratios[-1], 4),
        "apart": round(apart, 4),
        "noise": round(noise, 4),
    }
    words.out.write_text(json.dumps(facts, indent=1) + "\n")
    print(
        f"winners lie {apart:.2%} apart; the first differs from itself by {ratios[words.tunes] - 1:+.2%} (95 % within "
        f"{noise:.2%}); the recording's best takes {ratios[-1]:.4f} of the first"
    )
    return 0 if apart <= words.most + noise else 1


if __name__ == "__main__":
    sys.exit(main())
