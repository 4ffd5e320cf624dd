"""`tktune studies`: the study files that ship with tktune, or those given, with how large their problems are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tktune.cli import options
from tktune.cli.output import print_json
from tktune.core.errors import StudyError
from tktune.core.problem import Problem
from tktune.report.text import aligned

EXAMPLE = "Example: tktune studies --device sm_90a"


def studies(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[STUDY]...", help="Study files or names [default: all shipped]."),
    ] = None,
    device: options.DeviceName = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """List studies with their feasible configs.

    Without STUDY, those that ship, each counted by its first problem; with STUDY, all of its problems.
    """
    from tktune.search.study import list_studies

    if files:
        found = [_facts(name, device, most=None) for name in files]
    else:
        found = [_shipped(path, device) for path in list_studies()]
    if not found:
        raise StudyError("No study ships with this tktune.", "Name a file: tktune studies my.toml.")
    if as_json:
        print_json(found)
    elif files:
        print("\n\n".join(map(_one, found)))
    else:
        print(_listing(found))


def _listing(found: list[dict[str, Any]]) -> str:
    rows: list[list[Any]] = [["study", "device", "problems", "first: feasible", "builds", "family", "file"]]
    for facts in found:
        if "error" in facts:
            rows.append([facts["name"], "", "", "", "", facts["error"], facts["file"]])
            continue
        first = facts["spaces"][0]
        name, device, problems, file = (facts[key] for key in ("name", "device", "problems", "file"))
        rows.append([name, device, problems, first["feasible"], first["builds"], facts["family"], file])
    return aligned(rows, right=(2, 3, 4))


def _one(facts: dict[str, Any]) -> str:
    """One study with all its problems."""
    rows: list[list[Any]] = [["feasible", "of", "builds", "problem"]]
    rows += [[s["feasible"], s["total"], s["builds"], Problem(**s["problem"])] for s in facts["spaces"]]
    return (
        f"{facts['name']} ({facts['file']}), {facts['device']}\n{aligned(rows, right=(0, 1, 2), indent='  ')}"
    )


def _facts(study: str | Path, device: str | None, most: int | None) -> dict[str, Any]:
    """One study as facts, with the spaces of its first `most` problems. Raises `WordsError`."""
    from tktune.cli.dry_run import space_of
    from tktune.core.device import device_class
    from tktune.search.study import load_study

    loaded = load_study(study)
    loaded = loaded.on(device) if device else loaded
    on = device_class(loaded.device)
    return {
        "name": loaded.name,
        "file": str(loaded.path),
        "device": loaded.device,
        "family": loaded.family,
        "problems": len(loaded.problems),
        "spaces": [space_of(loaded, problem, on).counts() for problem in loaded.enumerable[:most]],
    }


def _shipped(path: Path, device: str | None) -> dict[str, Any]:
    """As `_facts`; a shipped study that does not load is shown with its error, so that the others are seen too."""
    try:
        return _facts(path, device, most=1)
    except StudyError as error:
        return {"name": path.stem, "file": str(path), "error": str(error)}
