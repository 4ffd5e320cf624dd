"""`tktune report`: what the database says of a study, or of everything in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tktune.cli import options
from tktune.cli.output import print_json, write_text
from tktune.core.errors import WorkError

if TYPE_CHECKING:
    from tktune.report.model import Report

EXAMPLE = "Example: tktune report quickstart --format md --out quickstart.md"

Format = Literal["md", "json", "csv"]


def report(
    study: Annotated[
        str | None,
        typer.Argument(metavar="[STUDY]", help="A study file or name [default: all that is stored]."),
    ] = None,
    form: Annotated[
        Format | None, typer.Option("--format", help="md for people, json, or csv (a row a problem).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write to this file instead of printing.")
    ] = None,
    device: options.DeviceName = None,
    db: options.Db = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Show winners and where their time goes. Also what was tried, and what the space is."""
    from tktune.cli.db import open_or_refuse
    from tktune.cli.selection import selection
    from tktune.report.collect import collect

    chosen = selection(study, device)
    with open_or_refuse(options.database(db)) as store:
        command = (
            again("tktune run", study, device, db) if study else again("tktune report", None, device, db)
        )
        found = collect(
            store,
            title=chosen.title,
            command=command,
            wanted=chosen.wanted,
            pins=chosen.pins,
            order=chosen.problems,
        )
    if not found.problems:
        way_out = f"Run: {again('tktune run', study, device, db)}." if study else "Run a study first."
        raise WorkError(
            f"Nothing is measured{f' for {study}' if study else ''} in {found.database}.", way_out
        )
    text = rendered(found, form or ("json" if as_json else "md"))
    if out is None:
        print(text, end="")
    else:
        write_text(out, text)
        if as_json:
            print_json({"file": str(out), "format": form or "json"})
        else:
            print(f"The report is in {out}.")


def again(command: str, study: str | None, device: str | None, db: str | None) -> str:
    """The command line that does the same again."""
    import shlex

    words = [command]
    words += [shlex.quote(study)] if study else []
    words += ["--device", shlex.quote(device)] if device else []
    words += ["--db", shlex.quote(db)] if db else []
    return " ".join(words)


def rendered(found: Report, form: Format) -> str:
    """A report in one of its forms."""
    if form == "md":
        from tktune.report.markdown import markdown

        return markdown(found)
    from tktune.report.forms import report_csv, report_object

    if form == "csv":
        return report_csv(found)
    return json.dumps(report_object(found), indent=2, ensure_ascii=False) + "\n"
