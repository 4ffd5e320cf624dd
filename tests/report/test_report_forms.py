"""What a report says, from a database to Markdown, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from stored_run import fill, quickstart_problem

from tktune.core.config import Config
from tktune.report.collect import collect
from tktune.report.forms import SUMMARY_COLUMNS, report_csv, report_object
from tktune.report.markdown import markdown, table
from tktune.report.model import Attribution, Report, TimedConfig, importances, split_times
from tktune.store.results import Store


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    url = f"sqlite:///{tmp_path_factory.mktemp('report') / 'r.db'}"
    fill(url)
    fill(url, quickstart_problem().replace(tokens=64))
    with Store.open(url, mode="ro") as store:
        return collect(store, title="a report", command="tktune run quickstart", order=[quickstart_problem()])


def test_the_winner_and_the_default_come_from_the_same_session(report: Report) -> None:
    first = report.problems[0]
    assert first.problem == quickstart_problem()
    assert first.winner is not None and first.default is not None
    assert (first.winner.time_us, first.default.time_us, first.speedup) == (100.0, 200.0, 2.0)
    assert first.tie_band == 0.02


def test_each_config_counts_once_by_the_trial_that_speaks_for_it(report: Report) -> None:
    assert dict(report.problems[0].statuses) == {"ok": 6, "censored": 1, "timeout:time": 1, "refused:D1": 1}
    assert report.problems[0].configs_tried == 9


def test_attribution_takes_the_winners_split_and_the_best_split_apart(report: Report) -> None:
    attribution = report.problems[0].attribution
    assert attribution is not None
    assert (attribution.comm_us, attribution.comm_best_us) == (60.0, 50.0)
    assert attribution.overlap_at_split == pytest.approx((80 + 60 - 100) / 60)
    assert attribution.overlap_at_best == pytest.approx((80 + 50 - 100) / 50)
    assert attribution.exposed_us == pytest.approx(20)


def test_the_fastest_configs_come_first_with_their_quartiles(report: Report) -> None:
    top = report.problems[0].top
    assert [timed.time_us for timed in top] == sorted(timed.time_us for timed in top)
    assert len(top) == 6 and top[0].quartiles_us is not None


def test_markdown_has_every_part(report: Report) -> None:
    text = markdown(report)
    for part in (
        "# a report",
        "2.00 × as fast as the default",
        "### Finalists",
        "tie band of 2.0%",
        "### Where the time goes",
        "Overlap efficiency: 67% at the winner's split, 60% against comm*",
        "Exposed communication: 20.0 µs",
        "### Split",
        "### Fastest 6 in the search",
        "### What matters",
        "### Space",
        "every combination",
        "### Statuses",
        "refused:D1",
        "### What failed",
        "No seat is left.",
        "g++ 12.2.0",
        "Policy: serving",
        "tktune lookup --family dispatch_gemm",
        "tktune run quickstart",
    ):
        assert part in text, part
    assert text.endswith("```\n")


def test_markdown_tables_are_aligned_in_their_source(report: Report) -> None:
    lines = markdown(report).splitlines()
    blocks: list[list[str]] = [[]]
    for line in lines:
        if line.startswith("|"):
            blocks[-1].append(line)
        elif blocks[-1]:
            blocks.append([])
    for block in filter(None, blocks):
        assert len({len(line) for line in block}) == 1, block[0]


def test_a_pipe_in_a_cell_does_not_break_a_table() -> None:
    assert table(["a"], [["x|y"]]).splitlines()[-1] == "| x\\|y |"


def test_json_is_json_and_tells_the_same(report: Report) -> None:
    again = json.loads(json.dumps(report_object(report), allow_nan=False))
    assert again["problems"][0]["speedup"] == 2.0
    assert again["problems"][0]["winner"]["chosen"] is True
    assert again["problems"][0]["space"]["feasible"] > 0


def test_csv_has_a_row_a_problem(report: Report) -> None:
    rows = list(csv.DictReader(io.StringIO(report_csv(report))))
    assert len(rows) == 2 and tuple(rows[0]) == SUMMARY_COLUMNS
    assert float(rows[0]["winner_us"]) == 100.0 and float(rows[0]["exposed_us"]) == pytest.approx(20)


def test_an_empty_database_makes_an_empty_report(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'empty.db'}"
    Store.open(url).close()
    with Store.open(url, mode="ro") as store:
        report = collect(store, title="empty")
    assert report.problems == () and "# empty" in markdown(report)


def test_a_problem_without_a_verification_says_so(tmp_path: Path, report: Report) -> None:
    import dataclasses

    bare = dataclasses.replace(
        report.problems[0],
        finalists=(),
        attribution=None,
        top=(),
        importances=(),
        splits=(),
        space=None,
        statuses=(),
    )
    text = markdown(dataclasses.replace(report, problems=(bare,)))
    assert "No winner yet" in text and "Nothing was tried yet" in text


def test_importance_is_the_range_of_the_medians() -> None:
    timed = [TimedConfig(Config(A=a, B=1), t, 1) for a, t in ((1, 10.0), (1, 30.0), (2, 40.0))]
    (only,) = importances(timed)
    assert only.parameter == "A" and only.spread == pytest.approx(1.0)
    assert only.medians_us == ((1, 20.0, 2), (2, 40.0, 1))


def test_splits_are_shown_only_where_there_is_one() -> None:
    assert split_times([TimedConfig(Config(A=1), 1.0, 1)]) == ()
    timed = [TimedConfig(Config(num_comm_sms=s), t, 1) for s, t in ((2, 5.0), (1, 9.0), (2, 7.0))]
    assert [(s.num_comm_sms, s.best_us, s.configs) for s in split_times(timed)] == [(1, 9.0, 1), (2, 5.0, 2)]


def test_what_was_not_measured_is_not_made_up() -> None:
    bare = Attribution(fused_us=10.0)
    assert (bare.overlap_at_split, bare.overlap_at_best, bare.exposed_us) == (None, None, None)
