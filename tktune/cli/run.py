"""`tktune run`: tune a study, show how it goes, write the report."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
        str | None,
        typer.Argument(
            metavar="STUDY", show_default=False, help="A study file, or the name of one that ships."
        ),
    ] = None,
    device: options.DeviceName = None,
    trials: Annotated[
        int | None, options.number("--trials", "Stop after this many configs a problem, over all runs.")
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=1, max=10_000_000, help="Stop after this many seconds a problem, over all runs."),
    ] = None,
    effort: Annotated[
        str | None,
        typer.Option(
            "--effort",
            metavar="NAME",
            help="quick, full or exhaustive: the budget and the finalists, instead of the study's.",
        ),
    ] = None,
    stop_early: Annotated[
        bool | None,
        typer.Option(
            "--stop-early/--no-stop-early",
            show_default=False,
            help="Whether to stop when another minute is expected to gain less than the tie band.",
        ),
    ] = None,
    seed: Annotated[int | None, options.number("--seed", "Seed of the sampler.", smallest=0)] = None,
    sampler: options.SamplerName = None,
    gangs: Annotated[
        int | None,
        options.number(
            "--gangs", "Gangs that measure side by side [default: as many as there are GPUs for]."
        ),
    ] = None,
    pin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PARAM=VALUE[,VALUE]", help="Limit a parameter to these values (may be repeated)."
        ),
    ] = None,
    start_from: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONFIG",
            help='A config tried right after the default, "PARAM=VALUE ..." or JSON (may be repeated).',
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
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Measure every feasible config in full and write a recording (.json.xz)."
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Tune against a recording on a virtual clock: no device, no compiler."
        ),
    ] = None,
    replay_noise: Annotated[
        float, typer.Option(min=0, max=1, metavar="SHARE", help="Spread of a launch, for example 0.02.")
    ] = 0.0,
    replay_failures: Annotated[
        float, typer.Option(min=0, max=1, metavar="SHARE", help="Share of configs that are made to fail.")
    ] = 0.0,
    replay_drift: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE[@SECONDS]", help="By how much launches slow down, and after how many seconds."
        ),
    ] = None,
    as_json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """Tune every problem of a study. The same command again continues; Ctrl-C keeps everything measured."""
    one_thread_a_library()
    disturbed = {
        "--replay-noise": replay_noise or None,
        "--replay-failures": replay_failures or None,
        "--replay-drift": replay_drift,
    }
    asked = Asked(
        device, trials, seconds, seed, effort, stop_early, pin or [], start_from or [], sampler, gangs
    )
    if replay is not None:
        refused = {
            "--gangs": gangs,
            "--device": device,
            "--db": db,
            "--cache": cache,
            "--report-dir": report_dir,
        }
        _refuse(refused | {"--record": record, "--dry-run": dry_run or None}, "A replay takes no")
        words = again(
            study, None, trials, seconds, seed, pin, None, asked, {"--replay": str(replay), **disturbed}
        )
        _replay(replay, study, asked, replay_noise, replay_failures, replay_drift, words, as_json)
        return
    _refuse(disturbed, "Only a replay takes")
    if study is None:
        raise WordsError("STUDY is missing.", "Name a study file or one of: tktune studies.")
    from tktune.search.study import load_study

    loaded = asked.of(load_study(study, effort))
    if dry_run:
        _dry_run(loaded, as_json)
        return
    if record is not None:
        budget = {"--trials": trials, "--seconds": seconds, "--effort": effort, "--start-from": start_from}
        budget |= {"--sampler": sampler, "--gangs": gangs}
        _refuse(budget, "A recording measures every config and takes no")
        from tktune.cli.replaying import record_and_write

        record_and_write(
            loaded, options.database(db), options.cache_folder(cache), record.expanduser(), as_json
        )
        return
    from tktune.cli.tuning import tune_and_report

    command = again(study, device, trials, seconds, seed, pin, db, asked)
    tune_and_report(
        loaded,
        options.database(db),
        options.cache_folder(cache),
        reports_folder() if report_dir is None else report_dir.expanduser(),
        command,
        as_json,
    )


def one_thread_a_library() -> None:
    """The driver's matrices are small: threads of numpy's libraries would only take cores from compilers and ranks.

    Before numpy is imported; what the user set stands.
    """
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")


@dataclass(frozen=True)
class Asked:
    """What the command line says instead of the study. None: nothing."""

    device: str | None
    trials: int | None
    seconds: float | None
    seed: int | None
    effort: str | None
    stop_early: bool | None
    pin: list[str]
    start_from: list[str]
    sampler: str | None = None
    gangs: int | None = None

    def of(self, study: Study) -> Study:
        """The study with it. Raises `WordsError` for a pin that is none."""
        said = {
            "device": self.device,
            "trials": self.trials,
            "seconds": self.seconds,
            "seed": self.seed,
            "stop_early": self.stop_early,
            "sampler": None if self.sampler is None else sampler_name(self.sampler),
            "gangs": self.gangs,
        }
        changes: dict[str, Any] = {name: value for name, value in said.items() if value is not None}
        pins = {**study.pins, **pins_of(self.pin)}
        starts = (*self.start_from, *study.start_from)
        return dataclasses.replace(study, pins=pins, start_from=starts, **changes)


def sampler_name(word: str) -> str:
    """The sampler called `word`. Raises `WordsError`."""
    from tktune.search.samplers import SAMPLERS

    if word not in SAMPLERS:
        raise WordsError(f"There is no sampler {word!r}.", f"Use one of: {', '.join(SAMPLERS)}.")
    return word


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
    study: str | None,
    device: str | None,
    trials: int | None,
    seconds: float | None,
    seed: int | None,
    pin: list[str] | None,
    db: str | None,
    asked: Asked | None = None,
    more: Mapping[str, object] | None = None,
) -> str:
    """The command line that makes the same numbers again."""
    words = ["tktune", "run", *([] if study is None else [study])]
    named: dict[str, object] = {"--device": device, "--trials": trials, "--seconds": seconds, "--seed": seed}
    if asked is not None:
        named |= {"--sampler": asked.sampler, "--gangs": asked.gangs, "--effort": asked.effort}
    named |= {"--db": db, **(more or {})}
    for name, value in named.items():
        if value is not None:
            words += [name, f"{value:g}" if isinstance(value, float) else str(value)]
    if asked is not None and asked.stop_early is not None:
        words.append("--stop-early" if asked.stop_early else "--no-stop-early")
    for word in pin or []:
        words += ["--pin", word]
    for word in [] if asked is None else asked.start_from:
        words += ["--start-from", word]
    return shlex.join(words)


def _value(word: str) -> Value:
    try:
        return int(word)
    except ValueError:
        return word.strip()


def _refuse(given: Mapping[str, object], why: str) -> None:
    """Raises `WordsError` for the first option that was given."""
    for name, value in given.items():
        if value is not None:
            raise WordsError(f"{why} {name}.", f"Leave {name} out.")


def _replay(
    path: Path,
    study: str | None,
    asked: Asked,
    noise: float,
    failures: float,
    drift: str | None,
    command: str,
    as_json: bool,
) -> None:
    """Replay a recording, with the budget and pins of a study where one is named."""
    from tktune.cli.replaying import disturbance, replay_and_tell
    from tktune.search.effort import DEFAULT, effort
    from tktune.search.recording_form import read_recording
    from tktune.search.replay import on_recording, study_of
    from tktune.search.study import load_study

    recording = read_recording(path.expanduser())
    profile = effort(asked.effort or DEFAULT)
    if study is None:
        loaded = study_of(recording, profile)
    else:
        loaded = on_recording(load_study(study, asked.effort), recording)
    loaded = asked.of(loaded)
    replay_and_tell(recording, loaded, disturbance(noise, failures, drift, loaded.seed), command, as_json)


def _dry_run(study: Study, as_json: bool) -> None:
    """Show every problem's space; the first that has no feasible config then ends the command (exit code 2)."""
    from tktune.cli.dry_run import space_of
    from tktune.core.device import device_class

    device = device_class(study.device)
    spaces = [space_of(study, problem, device) for problem in study.enumerable]
    if as_json:
        print_json({"study": study.name, "device": study.device, "problems": [s.facts() for s in spaces]})
    else:
        later = [
            f"{problem}\nthe pair of kernels, around their winners"
            for problem in study.problems[len(spaces) :]
        ]
        print("\n\n".join([*(space.text() for space in spaces), *later]))
    for space in spaces:
        if space.refusal is not None:
            raise space.refusal
