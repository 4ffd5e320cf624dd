"""What the tests on GPUs make of a host: who is skipped, who shares, and how much is repeated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tktune.core.sharing import VARIABLE

PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
from tktune.core import device_cuda
from tktune.core.device import device_class
device_cuda.cuda_device_classes = lambda: [device_class("sm_90a")] * int(sys.argv[2])
import gpu_places as places
skipped = lambda mark: bool(mark.args[0])
print(json.dumps({
    "shared": places.SHARED,
    "two": skipped(places.needs_two),
    "four": skipped(places.needs_gpus(4)),
    "each": skipped(places.needs_a_gpu_each("how fast it is")),
    "why": places.needs_a_gpu_each("how fast it is").kwargs["reason"],
    "few": places.few(100, 7),
    "gpus": [places.gpu_of(rank) for rank in range(3)] if places.GPUS else [],
    "some": [[list(places.some(True, n, range(count))) for n in range(count)] for count in (2, 4, 5)],
    "all": list(places.some(False, 3, range(4))),
}))
"""


def host(gpus, word):
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if word is not None:
        environment[VARIABLE] = word
    folder = Path(__file__).parents[1] / "gpu"
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), str(gpus)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
        check=True,
    )
    return json.loads(said.stdout)


@pytest.mark.parametrize(
    ("gpus", "word", "shared", "skipped"),
    [
        # skipped: tests of two ranks, of four, and of what cannot be seen in turns
        (0, None, False, (True, True, True)),
        (0, "1", False, (True, True, True)),
        (1, None, True, (False, False, True)),
        (1, "1", True, (False, False, True)),
        (1, "0", False, (True, True, True)),
        (2, None, False, (False, True, False)),
        (2, "1", False, (False, False, False)),
        (4, None, False, (False, False, False)),
    ],
)
def test_one_gpu_is_shared_unless_it_must_not_be(gpus, word, shared, skipped):
    found = host(gpus, word)
    assert found["shared"] is shared and (found["two"], found["four"], found["each"]) == skipped
    assert found["few"] == (7 if shared else 100)
    assert found["gpus"] == [rank % gpus for rank in range(3) if gpus]
    assert "this was not run: how fast it is" in found["why"]


def test_some_values_are_two_a_time_and_all_in_the_end():
    found = host(1, None)
    for count, chosen in zip((2, 4, 5), found["some"], strict=True):
        assert all(len(set(two)) == 2 for two in chosen)
        assert {value for two in chosen for value in two} == set(range(count))
    assert found["all"] == [0, 1, 2, 3]
