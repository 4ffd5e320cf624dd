"""`tktune cache`: what the artifact cache holds, whether it is whole, and how to make it smaller."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tktune.cli import options
from tktune.cli.output import print_json
from tktune.core.errors import WordsError
from tktune.report.text import aligned, bytes_text, count_text

if TYPE_CHECKING:
    from tktune.build.cache import ArtifactCache

app = typer.Typer(
    help="Look at and clean the artifact cache.", epilog="Example: tktune cache ls", rich_markup_mode=None
)


def _open(cache: Path | None) -> ArtifactCache:
    """The cache; nothing is made on disk by looking."""
    from tktune.build.cache import ArtifactCache

    return ArtifactCache(options.cache_folder(cache))


@app.command("ls", epilog="Example: tktune cache ls")
def ls(cache: options.Cache = None, as_json: options.Json = False, debug: options.Debug = False) -> None:
    """List the artifacts, newest first."""
    entries = sorted(_open(cache).entries(), key=lambda entry: entry.built_at, reverse=True)
    if as_json:
        print_json([{**entry.manifest(), "path": str(entry.path)} for entry in entries])
        return
    if not entries:
        print(f"No artifacts in {options.cache_folder(cache)}.")
        return
    rows = [["digest", "size", "seconds", "built", "artifact"]]
    for entry in entries:
        rows.append(
            [
                entry.digest[:12],
                bytes_text(entry.bytes),
                f"{entry.seconds:.1f}",
                entry.built_at,
                str(entry.describes.get("name", entry.path.name)),
            ]
        )
    print(aligned(rows, right=(1, 2)))
    total = sum(entry.bytes for entry in entries)
    print(f"\n{count_text(len(entries), 'artifact')}, {bytes_text(total)}, in {options.cache_folder(cache)}")


@app.command("verify", epilog="Example: tktune cache verify")
def verify(cache: options.Cache = None, as_json: options.Json = False, debug: options.Debug = False) -> None:
    """Check every artifact against its recorded SHA-256. Exit code 1 when one is truncated or altered."""
    opened = _open(cache)
    bad = opened.verify()
    count = len(list(opened.folder.digests()))
    if as_json:
        wrong = [{"digest": found.digest, "path": str(found.path), "reason": found.reason} for found in bad]
        print_json({"artifacts": count, "bad": wrong})
    else:
        for found in bad:
            print(f"{found.path} {found.reason}.")
        if bad:
            print(
                f"{len(bad)} of {count_text(count, 'artifact')} are bad; the next run that needs them builds them again."
            )
        else:
            print(f"{count_text(count, 'artifact')}, all whole.")
    if bad:
        raise typer.Exit(1)


@app.command("gc", epilog="Example: tktune cache gc --older-than-days 30 --max-mib 2048")
def gc(
    older_than_days: Annotated[
        float | None, typer.Option(min=0, max=36500, help="Remove artifacts last used longer ago than this.")
    ] = None,
    max_mib: Annotated[
        int | None,
        typer.Option(min=0, max=2**31 - 1, help="Remove the least recently used until the rest fits."),
    ] = None,
    keep_winners: Annotated[
        bool, typer.Option("--keep-winners/--all", help="Keep the artifacts of winners whatever their age.")
    ] = True,
    db: options.Db = None,
    cache: options.Cache = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Remove old artifacts. Measurements are never removed; a removed artifact is built again when needed."""
    if older_than_days is None and max_mib is None:
        raise WordsError(
            "Nothing says which artifacts may go.", "Give --older-than-days or --max-mib (or both)."
        )
    collected = _open(cache).gc(
        keep_digests=_winners(db) if keep_winners else (),
        older_than_s=None if older_than_days is None else older_than_days * 86400,
        max_bytes=None if max_mib is None else max_mib * 1024**2,
    )
    if as_json:
        print_json({"removed": list(collected.digests), "bytes": collected.bytes})
    else:
        print(f"Removed {count_text(len(collected.digests), 'artifact')}, {bytes_text(collected.bytes)}.")


def _winners(db: str | None) -> frozenset[str]:
    """The artifact digests of all winners in the database (none when there is no database yet)."""
    from tktune.cli.db import open_existing

    store = open_existing(options.database(db))
    if store is None:
        return frozenset()
    with store:
        return frozenset(row.artifact_digest for row in store.winners() if row.artifact_digest)
