"""`tktune import`: take in an export of tktune, refusing whatever does not fit."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated

import typer

from tktune.cli import options
from tktune.cli.output import print_json
from tktune.core.errors import WordsError
from tktune.report.text import count_text

EXAMPLE = "Example: tktune import quickstart.json --db other.db"


def import_(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A file made by: tktune export (- reads stdin).")
    ],
    own_family: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE:ATTRIBUTE", help="A family of your own that the file may name (may be repeated)."
        ),
    ] = None,
    db: options.Db = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Add an export's measurements to the database. Importing twice changes nothing; verdicts here stand."""
    from tktune.report.importing import import_into, read_export
    from tktune.store.results import Store

    keys = read_export(_text(file), file, own_family or ())
    with Store.open(options.database(db)) as store:
        done = import_into(store, keys)
    if as_json:
        print_json(dataclasses.asdict(done))
        return
    print(
        f"{count_text(done.trials, 'trial')} and {count_text(done.sessions, 'verification')} imported for "
        f"{count_text(done.keys, 'key')}; {done.known} known already."
    )
    if done.kept:
        print(f"{count_text(done.kept, 'trial')} ended otherwise here, and ours stand.")
    if done.sessions_left_out:
        print(
            f"{count_text(done.sessions_left_out, 'verification')} left out: older than ours, or not proved here."
        )


def _text(file: str) -> str:
    if file == "-":
        return sys.stdin.read()
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise WordsError(f"{file} cannot be read: {error.strerror or error}.", "Name a file.") from error
    except UnicodeDecodeError as error:
        raise WordsError(f"{file} is not text.", "Give a file made by: tktune export.") from error
