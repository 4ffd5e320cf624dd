"""`tktune export`: all measurements in a published form, for other programs and other machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from tktune.cli import options
from tktune.cli.output import print_json, write_text

EXAMPLE = "Example: tktune export quickstart --format json --out quickstart.json"


def export(
    study: Annotated[
        str | None,
        typer.Argument(metavar="[STUDY]", help="A study file or name [default: all that is stored]."),
    ] = None,
    form: Annotated[
        Literal["json", "csv"],
        typer.Option("--format", help="json (tktune import reads it) or csv (a row a trial)."),
    ] = "json",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write to this file instead of printing.")
    ] = None,
    device: options.DeviceName = None,
    db: options.Db = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Write every trial, sample and verification. The form is described in docs/export.md."""
    from tktune.cli.db import open_or_refuse
    from tktune.cli.selection import selection
    from tktune.report.exporting import export_csv, export_of

    chosen = selection(study, device)
    with open_or_refuse(options.database(db)) as store:
        if form == "csv":
            text = export_csv(store, chosen.wanted)
        else:
            text = export_of(store, chosen.wanted).model_dump_json(indent=1) + "\n"
    if out is None:
        print(text, end="")
        return
    write_text(out, text)
    if as_json:
        print_json({"file": str(out), "format": form})
    else:
        print(f"The export is in {out}.")
