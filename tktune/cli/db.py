"""`tktune db`: the state of the results database: bring it up to date, check it, count what it holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from tktune.cli import options
from tktune.cli.output import print_json
from tktune.core.errors import DatabaseError
from tktune.report.text import aligned, bytes_text

if TYPE_CHECKING:
    from tktune.store.results import Store

app = typer.Typer(
    help="Look after the results database.", epilog="Example: tktune db stats", rich_markup_mode=None
)


def open_existing(url: str) -> Store | None:
    """The database for reading; None when its file does not exist (reading must not make one)."""
    from tktune.store.location import place
    from tktune.store.results import Store

    where = place(url)
    if where.path is not None and not where.path.exists():
        return None
    return Store.open(url, mode="ro")


def open_or_refuse(url: str) -> Store:
    """The database for reading. Raises `DatabaseError` when there is none."""
    store = open_existing(url)
    if store is None:
        from tktune.store.location import place

        raise DatabaseError(
            f"There is no database at {place(url).shown}.", "Make one with: tktune run STUDY, or give --db."
        )
    return store


@app.command("upgrade", epilog="Example: tktune db upgrade")
def upgrade(db: options.Db = None, as_json: options.Json = False, debug: options.Debug = False) -> None:
    """Make the database, or bring an older one to this version's schema."""
    from tktune.store.location import place
    from tktune.store.results import Store

    url = options.database(db)
    shown = place(url).shown
    before, after = Store.upgrade(url)
    if as_json:
        print_json({"database": shown, "before": before, "after": after})
    elif before is None:
        print(f"{shown} was made, with schema {after}.")
    elif before == after:
        print(f"{shown} already has schema {after}.")
    else:
        print(f"{shown} was brought from schema {before} to {after}.")


@app.command("check", epilog="Example: tktune db check")
def check(db: options.Db = None, as_json: options.Json = False, debug: options.Debug = False) -> None:
    """Check the database's integrity. Exit code 1 when something is wrong."""
    with open_or_refuse(options.database(db)) as store:
        wrong, shown = store.check(), store.shown
    if as_json:
        print_json({"database": shown, "ok": not wrong, "wrong": wrong})
    else:
        print("\n".join(wrong) if wrong else f"{shown} is whole.")
    if wrong:
        raise typer.Exit(1)


@app.command("stats", epilog="Example: tktune db stats --json")
def stats(db: options.Db = None, as_json: options.Json = False, debug: options.Debug = False) -> None:
    """Count what the database holds."""
    with open_or_refuse(options.database(db)) as store:
        counts, shown = store.stats(), store.shown
    if as_json:
        print_json({"database": shown, **counts})
        return
    statuses = counts.pop("statuses")
    counts["bytes"] = bytes_text(counts["bytes"])
    if statuses:
        counts["trials"] = (
            f"{counts['trials']} ({', '.join(f'{n} {status}' for status, n in statuses.items())})"
        )
    print(
        aligned([["database", shown], *([name.replace("_", " "), value] for name, value in counts.items())])
    )
