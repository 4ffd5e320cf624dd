"""The published export form: complete, documented, strict, and the same after a round trip."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stored_run import fill

from tktune.core.device import device_class
from tktune.core.errors import WordsError
from tktune.core.problem import Problem
from tktune.report import export_form
from tktune.report.exporting import export_csv, export_of
from tktune.report.importing import import_into, read_export
from tktune.store.results import Store

DOCS = Path(__file__).parents[2] / "docs" / "export.md"


@pytest.fixture
def filled(tmp_path: Path) -> tuple[str, Problem, str]:
    """A filled database's URL, its problem, and its export."""
    url = f"sqlite:///{tmp_path / 'filled.db'}"
    problem = fill(url)
    with Store.open(url, mode="ro") as store:
        return url, problem, export_of(store).model_dump_json()


def test_export_then_import_gives_the_same_winners(filled: tuple[str, Problem, str], tmp_path: Path) -> None:
    url, problem, text = filled
    with Store.open(f"sqlite:///{tmp_path / 'other.db'}") as other:
        done = import_into(other, read_export(text, "x.json"))
        assert (done.trials, done.sessions, done.kept) == (9, 1, 0)
        there = other.winner(problem, device_class("cpu"))
        assert other.check() == []
        again = export_of(other)
    with Store.open(url, mode="ro") as store:
        here = store.winner(problem, device_class("cpu"))
    assert here is not None and there is not None
    assert (here.config, here.time_us, here.toolchain) == (there.config, there.time_us, there.toolchain)
    first = json.loads(text)["keys"][0]
    second = json.loads(again.model_dump_json())["keys"][0]
    assert first["trials"] == second["trials"] and first["artifacts"] == second["artifacts"]


def test_importing_twice_changes_nothing(filled: tuple[str, Problem, str], tmp_path: Path) -> None:
    with Store.open(f"sqlite:///{tmp_path / 'other.db'}") as other:
        import_into(other, read_export(filled[2], "x.json"))
        before = other.stats()
        done = import_into(other, read_export(filled[2], "x.json"))
        assert (done.trials, done.sessions, done.known) == (0, 0, 9)
        assert {**other.stats(), "bytes": 0} == {**before, "bytes": 0}


def test_verdicts_that_stand_here_are_kept(filled: tuple[str, Problem, str], tmp_path: Path) -> None:
    document = json.loads(filled[2])
    winner = next(v for v in document["keys"][0]["verifications"] if v["chosen"])
    with Store.open(f"sqlite:///{tmp_path / 'other.db'}") as other:
        mine = json.loads(filled[2])
        for trial in mine["keys"][0]["trials"]:
            if trial["config"] == winner["config"]:
                trial["status"], trial["time_us"], trial["samples"] = "wrong", None, []
        mine["keys"][0]["verifications"] = []
        mine["keys"][0]["attributions"] = []
        import_into(other, read_export(json.dumps(mine), "mine.json"))
        done = import_into(other, read_export(filled[2], "x.json"))
        assert done.kept == 1 and done.sessions == 0 and done.sessions_left_out == 1
        assert other.winners() == []


Change = Callable[[dict[str, Any]], Any]
MISFITS: dict[str, Change] = {
    "format": lambda d: d.update(format="other"),
    "version": lambda d: d.update(version=2),
    "a field too many": lambda d: d.update(more=1),
    "a field missing": lambda d: d["keys"][0].pop("policy"),
    "a wrong type": lambda d: d["keys"][0]["trials"][0].update(attempt="one"),
    "a negative time": lambda d: d["keys"][0]["trials"][0].update(time_us=-1.0),
    "a strange status": lambda d: d["keys"][0]["trials"][0].update(status="fine"),
    "an ok trial without a time": lambda d: d["keys"][0]["trials"][0].update(status="ok", time_us=None),
    "another parameter": lambda d: d["keys"][0]["trials"][0]["config"].update(COLOUR=3),
    "a problem that cannot be": lambda d: d["keys"][0]["problem"].update(top_k=99),
    "a problem field too many": lambda d: d["keys"][0]["problem"].update(colour="red"),
    "a device without its arch": lambda d: d["keys"][0]["device"].pop("arch"),
    "a device of wrong type": lambda d: d["keys"][0]["device"].update(sm_count="four"),
    "a winner that no trial proves": lambda d: d["keys"][0]["trials"].clear(),
    "a family that does not ship": lambda d: d["keys"][0]["problem"].update(family="os:path"),
    "a short digest": lambda d: d["keys"][0]["toolchain"].update(digest="ab"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_what_does_not_fit_is_refused_in_one_sentence(misfit: str, filled: tuple[str, Problem, str]) -> None:
    document = json.loads(filled[2])
    MISFITS[misfit](document)
    with pytest.raises(WordsError) as refusal:
        read_export(json.dumps(document), "x.json")
    assert "\n" not in str(refusal.value) and "x.json" in str(refusal.value) and refusal.value.way_out


@pytest.mark.parametrize("text", ["", "[]", "{}", "not json", '"x"', "\0"])
def test_what_is_no_export_is_refused(text: str) -> None:
    with pytest.raises(WordsError):
        read_export(text, "x.json")


def test_csv_has_the_published_columns_and_marks_the_winner(filled: tuple[str, Problem, str]) -> None:
    with Store.open(filled[0], mode="ro") as store:
        rows = list(csv.DictReader(io.StringIO(export_csv(store))))
    assert tuple(rows[0]) == export_form.CSV_COLUMNS
    assert len(rows) == 9
    winners = [row for row in rows if row["winner"] == "1"]
    assert len(winners) == 1 and winners[0]["verified_us"] == "100.0"


def test_every_field_of_the_form_is_documented() -> None:
    text = DOCS.read_text()
    schema = export_form.Export.model_json_schema()
    forms = {"Export": schema, **schema["$defs"]}
    for name, form in forms.items():
        for field in form["properties"]:
            assert f"`{field}`" in text, f"{name}.{field}"
    for column in export_form.CSV_COLUMNS:
        assert f"`{column}`" in text, column
