"""The documents say what is true: their links lead somewhere, their commands are understood, their example runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
Run = Callable[..., Any]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert "://" in target or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(page: Path, tktune: Run) -> None:
    lines = re.findall(r"^(?:\$ |PYTHONPATH=\. )?(tktune [a-z].*)$", page.read_text(), re.MULTILINE)
    for line in lines:
        words = shlex.split(line, comments=True)[1:]
        group = words[:2] if words[0] in ("cache", "db") else words[:1]
        known = tktune(*group, "--help")
        assert known.code == 0, line
        for word in words:
            assert not word.startswith("--") or word in known.out, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_study_snippets_parse(page: Path, places: Path) -> None:
    import tomllib

    from tktune.search.study import StudyFile

    for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL):
        StudyFile.model_validate(tomllib.loads(block))


def test_every_command_and_event_is_in_the_command_page() -> None:
    from typing import get_args

    from tktune.cli.app import app
    from tktune.cli.listeners import event_name
    from tktune.search.events import Event

    page = (ROOT / "docs" / "cli.md").read_text()
    for command in app.registered_commands:
        assert f"tktune {command.name}" in page
    for event in get_args(Event):
        assert f"`{event_name(event)}`" in page


def test_every_status_and_rule_is_in_the_fault_page() -> None:
    from tktune.core import status
    from tktune.core.roles import RULES

    page = (ROOT / "docs" / "faults.md").read_text()
    for word in (*status._PLAIN, "refused:", "timeout:", "fault:", *RULES):
        assert word in page, word


def test_every_key_of_a_study_is_documented() -> None:
    from tktune.search.study import PolicyTable, ProblemTable, SearchTable

    page = (ROOT / "docs" / "study-files.md").read_text()
    for table in (ProblemTable, SearchTable, PolicyTable):
        for key in table.model_fields:
            assert f"`{key}`" in page, key


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_example_of_an_own_kernel_runs(
    process: Run, places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "own-kernels.md").read_text()
    for name, language in (("scale.cpp", "cpp"), ("scale.py", "python"), ("scale.toml", "toml")):
        (block,) = re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)
        (places / name).write_text(block)
    monkeypatch.setenv("EXTRA_PYTHONPATH", str(places))
    ended = process("run", str(places / "scale.toml"), timeout=180)
    assert ended.code == 0, ended
    assert "Winner" in ended.out and "9/9" in ended.out
    assert not re.search(r"\b(wrong|fault:)", ended.out), ended.out
    file = str(places / "x.json")
    assert process("export", "--out", file).code == 0
    refused = process("import", file, "--db", str(places / "o.db"))
    assert refused.code == 2 and "--own-family scale:FAMILY" in refused.err
    assert process("import", file, "--db", str(places / "o.db"), "--own-family", "scale:FAMILY").code == 0
