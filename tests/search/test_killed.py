"""A driver killed with SIGKILL at ten random moments loses no row, doubles none, and the next one names the crash."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from toy_driver import TRIALS

from tktune.core import status
from tktune.core.config import Config
from tktune.store.results import Store
from tktune.store.rows import STARTED

HERE = Path(__file__).parent
KILLS = 10


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("backend", "open_rows"), [("cpu", 1), ("cuda", 3)])
def test_ten_kills_at_random_moments_lose_and_double_nothing(tmp_path, backend, open_rows):
    url, witness = f"sqlite:///{tmp_path / 'tktune.db'}", tmp_path / "witness"
    words = [sys.executable, str(HERE / "toy_driver.py"), url, str(tmp_path / "cache"), str(witness)]
    words.append(backend)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent.parent)])}
    draw = random.Random(20)
    killed = 0
    for number in range(KILLS):
        process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        if number % 4 == 3:  # before it has said anything, too
            time.sleep(draw.uniform(0, 0.5))
        else:
            for line in process.stdout:
                if line.strip() == "TrialStarted":
                    break
            time.sleep(draw.uniform(0, 0.25))
        killed += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    assert killed >= KILLS // 2
    last = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=200)
    assert last.returncode == 0, last.stderr
    assert json.loads(last.stdout.splitlines()[-1])["winner"]

    with Store.open(url) as store:
        (key,) = store.keys()
        rows, lost_events = store.trials(key), store.events("lost")
        faults = store.check()
    assert faults == []
    ends = Counter((row.config, row.status) for row in rows)
    for line in map(json.loads, witness.read_text().splitlines()):
        if line["event"] == "TrialDone":
            assert ends[Config(json.loads(line["config"])), line["status"]] == 1, (
                "a measured row is lost or doubled"
            )
    final = Counter(row.config for row in rows if status.is_final(row.status))
    assert max(final.values()) == 1, "a config has two verdicts"
    assert not [row for row in rows if row.status == STARTED]
    assert all(row.samples > 0 for row in rows if row.status == status.OK)
    lost = [row for row in rows if row.status == status.LOST]
    assert 1 <= len(lost) <= killed * open_rows
    assert sorted(event.trial_id for event in lost_events) == sorted(row.id for row in lost)
    assert all(
        str(row.config) in next(e.sentence for e in lost_events if e.trial_id == row.id) for row in lost
    )
    losses = Counter(row.config for row in lost)
    quarantined = {config for config, count in losses.items() if count == 2 and config not in final}
    assert len(final) + len(quarantined) == TRIALS

    again = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=100)
    assert json.loads(again.stdout.splitlines()[-1])["measured"] == 0
    assert "BuildStarted" not in again.stdout and "Resumed" in again.stdout
