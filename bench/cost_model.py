"""How well the GPU families' cost models order what was measured on H200: Spearman's rank correlation, and where the fastest stand.

    python bench/cost_model.py

Times are those of bench/results: the sweeps by hand and all trials of two tunes of dispatch_gemm, and the recording of a GEMM
alone. `first within 2 %` is the place, by the cost model, of the first config within 2 % of the fastest of its group.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.problem import Problem
from tktune.families.base import family
from tktune.search.recording_form import read_recording
from tktune.search.start import config_words

HERE = Path(__file__).parent
SWEEPS = HERE / "results" / "gpu_dispatch_gemm_2026-11-30.json"
TRIALS = HERE / "results" / "gpu_dispatch_trials_2026-11-30.json.xz"
RECORDING = HERE / "recordings" / "h200_grouped_gemm.json.xz"

Group = tuple[str, Problem, DeviceClass, list[Config], list[float]]  # the last: microseconds


def groups() -> Iterator[Group]:
    """What was measured, in groups whose times compare."""
    sweeps = json.loads(SWEEPS.read_text())
    device = DeviceClass(**sweeps["device_class"])
    for case in sweeps["cases"]:
        if case["hand_sweep"]:
            configs = [Config(config_words(words)) for words in case["hand_sweep"]]
            yield "by hand", Problem(**case["problem"]), device, configs, list(case["hand_sweep"].values())
    for run in json.loads(lzma.decompress(TRIALS.read_bytes()))["runs"]:
        for one in run["problems"]:
            space = family("dispatch_gemm").space(problem := Problem(**one["problem"]), device)
            configs = [space.completed(Config(config_words(words))) for words, _, _ in one["trials"]]
            yield run["command"], problem, device, configs, [us for _, us, _ in one["trials"]]
    found = read_recording(RECORDING)
    timed = [trial for trial in found.trials.values() if trial.timed]
    configs, times = [trial.config for trial in timed], [float(trial.time_us or 0.0) for trial in timed]
    yield "recording", found.problem, found.device, configs, times


def correlation(costs: list[float], us: list[float]) -> float:
    """Spearman's."""
    ranks = [np.unique(values, return_inverse=True)[1] for values in (costs, us)]
    return float(np.asarray(np.corrcoef(ranks))[0, 1])


def main() -> None:
    for what, problem, device, configs, us in groups():
        owner = family(problem.family)
        costs = [owner.cost_us(config, problem, device) for config in configs]
        order = sorted(range(len(us)), key=costs.__getitem__)
        first = next(place for place, at in enumerate(order) if us[at] <= 1.02 * min(us))
        print(
            f"{correlation(costs, us):6.3f}  first within 2 %: {first:4} of {len(us):4}  "
            f"{problem.family} {problem.hidden}×{problem.cols}, {problem.tokens} tokens  {what}"
        )


if __name__ == "__main__":
    main()
