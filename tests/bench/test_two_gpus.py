"""What two-GPU benches share: options that cannot be right end with a sentence, and works that a rank lacks are left out."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "bench"))

from two_gpus import driver

from tktune.core.device import device_class
from tktune.core.errors import WordsError


def asked(monkeypatch: pytest.MonkeyPatch, *words: str) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["bench/gpu_some.py", *words])
    parser = argparse.ArgumentParser()
    driver.add_options(parser, modes="graph", seconds=9.0)
    return driver.parsed(parser)


@pytest.mark.parametrize(
    "words",
    [("--modes", "fast"), ("--modes", ""), ("--rounds", "0"), ("--iterations", "-1"), ("--seconds", "0"), ("--out", "/")],
)  # fmt: skip
def test_an_option_that_cannot_be_right_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as ended:
        asked(monkeypatch, *words)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_fewer_than_two_gpus_is_a_sentence_with_the_way_out() -> None:
    with pytest.raises(
        WordsError, match=r"Two GPUs are needed, and 1 answer here\. Run this on a host with two"
    ):
        driver.two_of([device_class("sm_90a")])


def test_only_what_every_rank_found_counts() -> None:
    one = {"found": [{"number": 0, "modes": {"graph": 1, "direct": 1}}, {"number": 1, "modes": {}}]}
    other = {"found": [{"number": 0, "modes": {"direct": 1}}]}
    assert [driver.by_rank([one, other], 1), driver.by_rank([one, other], 2)] == [[], []]
    assert driver.shared_modes(driver.by_rank([one, other], 0)) == ["direct"]


def test_the_command_of_a_result_can_be_run_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    words = asked(monkeypatch, "--out", str(tmp_path / "new" / "a result.json"))
    driver.write(words, device_class("sm_90a"), [{"versions": {"torch": "1"}}], [], rows=[3])
    content = json.loads(words.out.read_text())
    assert shlex.split(content["command"]) == ["python", *sys.argv]
    assert (content["torch"], content["ended"], content["rows"]) == ("1", "as it should", [3])
