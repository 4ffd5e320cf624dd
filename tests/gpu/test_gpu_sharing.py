"""Two ranks at one GPU: they are seated there, take turns, and are right; what they took is never a time."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from dispatch_pair import build_all, configured, dispatch_problem
from gpu_places import SHARED, kept_cache

from tktune.core.device_cuda import cuda_device_classes
from tktune.core.errors import GangError
from tktune.core.policy import Policy
from tktune.gang.gang import Gang
from tktune.gang.trial import TrialPlan, measure_trial

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not SHARED, reason="ranks have a GPU each here; sharing one was not run"),
]


def test_ranks_take_turns_are_right_and_have_no_times(tmp_path):
    problem, device, policy = dispatch_problem(), cuda_device_classes()[0], Policy()
    config = configured(problem, device)
    ((artifact, part),) = build_all(kept_cache(tmp_path), [(problem, device, config)])
    with Gang(problem, device, policy) as gang:
        assert gang.takes_turns
        assert gang.load(artifact.path, artifact.sha256, part).ok  # the self-test of the pair
        for seed, routing in enumerate(("uniform", "hot:0.9@3", "empty:0")):
            outcome = gang.gate(config, routing, seed)
            assert outcome.ok, outcome.sentence
        timed = gang.time(config, "fused", 0, 60)
        assert timed.ok and timed.took_turns, timed.sentence
        print(f"\na launch and its meeting: {statistics.median(timed.worst_us) / 1000:.2f} ms", end="")
        with pytest.raises(GangError, match="took turns"):
            measure_trial(gang, config, part, artifact, TrialPlan.of(problem, policy))


def test_the_example_runs_both_ranks_at_the_one_gpu(tmp_path):
    places = {
        "TKTUNE_DB": f"{tmp_path}/none.db",
        "TKTUNE_CACHE_DIR": str(kept_cache(tmp_path / "cache").root),
    }
    ended = subprocess.run(
        [sys.executable, "examples/two_ranks.py", "--rounds", "2"],
        cwd=ROOT,
        env={**os.environ, **places},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    errors = re.findall(r"rank (\d): largest relative error (\S+) over 2 rounds on cuda:0", ended.stdout)
    assert sorted(rank for rank, _ in errors) == ["0", "1"], ended.stdout
    assert all(float(error) < 1e-2 for _, error in errors), errors
