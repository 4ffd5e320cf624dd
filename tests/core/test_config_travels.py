"""Configs as keys, over many of them and from process to process."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys

import pytest

from tktune.core.config import Config, columns

_ANOTHER = """
import pickle, sys
config = pickle.loads(sys.stdin.buffer.read())
from tktune.core.config import Config
assert {Config(ORDER="slot", TILE=64): 1}[config] == 1
sys.stdout.buffer.write(pickle.dumps(config))
"""


@pytest.mark.parametrize("seed", ["1", "2"])
def test_a_config_is_the_same_key_in_another_process_whose_words_hash_otherwise(seed):
    config = Config(TILE=64, ORDER="slot")
    known = {config: "here"}
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    back = subprocess.run(
        [sys.executable, "-c", _ANOTHER],
        input=pickle.dumps(config),
        capture_output=True,
        check=True,
        env=environment,
    )
    assert known[pickle.loads(back.stdout)] == "here"


def test_copies_and_changes_have_hashes_of_their_own():
    config = Config(TILE=64, ORDER="slot")
    assert hash(config) == hash(Config(ORDER="slot", TILE=64)) == hash(copy.deepcopy(config))
    changed = config.replace(TILE=32)
    assert changed != config and {config: 1}.get(changed) is None
    assert config.only(["TILE"]) == Config(TILE=64) and hash(config.only(["TILE"])) == hash(Config(TILE=64))


def test_columns_are_the_values_of_each_parameter():
    rows = [Config(TILE=tile, ORDER=order) for tile in (16, 32) for order in ("slot", "token")]
    assert columns(rows) == {"ORDER": ("slot", "token", "slot", "token"), "TILE": (16, 16, 32, 32)}
    assert columns([]) == {}
