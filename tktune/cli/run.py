"""`tktune run`: tune a study, show how it goes, write the report."""

from __future__ import annotations

import dataclasses
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tktune.cli import options
from tktune.cli.output import print_json
from tktune.core.config import Value
from tktune.core.errors import WordsError

if TYPE_CHECKING:
    from tktune.search.study import Study

EXAMPLE = "Example: tktune run quickstart --trials 60 --pin STAGES=2"


def run(
    study: Annotated[
        str, typer.Argument(metavar="STUDY", help="A study file, or the name of one that ships.")
    ],
    device: options.DeviceName = None,
    trials: Annotated[
        int | None, options.number("--trials", "Stop after this many configs a problem, over all runs.")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, max=10_000_000, help="Stop after this many seconds a problem, over all runs."),
    ] = None,
    seed: Annotated[int | None, options.number("--seed", "Seed of the sampler.", smallest=0)] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PARAM=VALUE[,VALUE]", help="Limit a parameter to these values (may be repeated)."
        ),
    ] = None,
    db: options.Db = None,
    cache: options.Cache = None,
    report_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Where the report goes [default: reports/ beside the default database]."
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show the feasible set and what removed the rest; compile nothing."),
    ] = False,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Tune every problem of a study. The same command again continues; Ctrl-C keeps everything measured."""
    from tktune.search.study import load_study

    loaded = _with(load_study(study), device, trials, seconds, seed, pins_of(pin or []))
    if dry_run:
        _dry_run(loaded, as_json)
        return
    from tktune.cli.tuning import tune_and_report

    command = again(study, device, trials, seconds, seed, pin, db)
    tune_and_report(
        loaded,
        options.database(db),
        options.cache_folder(cache),
        reports_folder() if report_dir is None else report_dir.expanduser(),
        command,
        as_json,
    )


def pins_of(words: list[str]) -> dict[str, tuple[Value, ...]]:
    """["STAGES=2,3", "order=slot"] as {"STAGES": (2, 3), "order": ("slot",)}. Raises `WordsError`."""
    pins: dict[str, tuple[Value, ...]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        if not (name.strip() and equals and all(value.strip() for value in values.split(","))):
            raise WordsError(f"--pin {word!r} is not PARAM=VALUE.", "Write for example --pin STAGES=2.")
        pins[name.strip()] = (*pins.get(name.strip(), ()), *map(_value, values.split(",")))
    return pins


def reports_folder() -> Path:
    """`$XDG_DATA_HOME/tktune/reports`."""
    base = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return base / "tktune" / "reports"


def again(
    study: str,
    device: str | None,
    trials: int | None,
    seconds: float | None,
    seed: int | None,
    pin: list[str] | None,
    db: str | None,
) -> str:
    """The command line that makes the same numbers again."""
    words = ["tktune", "run", study]
    named = {"--device": device, "--trials": trials, "--seconds": seconds, "--seed": seed, "--db": db}
    for name, value in named.items():
        if value is not None:
            words += [name, f"{value:g}" if isinstance(value, float) else str(value)]
    for word in pin or []:
        words += ["--pin", word]
    return shlex.join(words)


def _value(word: str) -> Value:
    try:
        return int(word)
    except ValueError:
        return word.strip()


def _with(
    study: Study,
    device: str | None,
    trials: int | None,
    seconds: float | None,
    seed: int | None,
    pins: dict[str, tuple[Value, ...]],
) -> Study:
    """The study with what the command line says instead."""
    return dataclasses.replace(
        study,
        device=study.device if device is None else device,
        trials=study.trials if trials is None else trials,
        seconds=study.seconds if seconds is None else seconds,
        seed=study.seed if seed is None else seed,
        pins={**study.pins, **pins},
    )


def _dry_run(study: Study, as_json: bool) -> None:
    """Show every problem's space; the first that has no feasible config then ends the command (exit code 2)."""
    from tktune.cli.dry_run import space_of
    from tktune.core.device import device_class

    device = device_class(study.device)
    spaces = [space_of(study, problem, device) for problem in study.problems]
    if as_json:
        print_json({"study": study.name, "device": study.device, "problems": [s.facts() for s in spaces]})
    else:
        print("\n\n".join(space.text() for space in spaces))
    for space in spaces:
        if space.refusal is not None:
            raise space.refusal
