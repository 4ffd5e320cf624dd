"""The file of a recording (docs/replay.md): its published form, how it is written whole and how it is read.

Unknown and missing fields are refused, so that a file of another version is never half understood. A file in Kernel
Tuner's results format is recognised and handed to `recording_t4`.
"""

from __future__ import annotations

import datetime
import gzip
import io
import json
import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, PositiveFloat, PositiveInt, ValidationError

from tktune.core import status
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.errors import TktuneError, WordsError, WorkError
from tktune.core.policy import Policy
from tktune.core.problem import Problem
from tktune.core.space import Parameter
from tktune.search.recording import RecordedBuild, RecordedTrial, Recording, SampleSummary
from tktune.search.recording_t4 import is_t4, recording_of_t4

FORMAT: Literal["tktune-recording"] = "tktune-recording"
VERSION: Literal[1] = 1
SUFFIXES = (".json.xz", ".json.gz", ".json")
_MOST_BYTES = 1 << 30  # unpacked
_SPENT = "Name a recording of `tktune run --record`, or Kernel Tuner's results (T4)."

Values = dict[str, int | str]


class Form(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ToolchainForm(Form):
    """The compiler and its resolved flags."""

    kind: Literal["g++", "nvcc"]
    version: str
    flags: list[str]


class ParameterForm(Form):
    """One parameter, its values in their order."""

    name: str
    values: list[int | str] = Field(min_length=1)
    kind: Literal["build", "launch"]
    meaning: str


class BuildForm(Form):
    """One artifact."""

    key: PositiveInt
    build: Values
    build_s: FiniteFloat = Field(ge=0)
    status: str
    sentence: str = ""
    facts: dict[str, int]


class SamplesForm(Form):
    """The slowest rank's launches of one trial."""

    count: PositiveInt
    least_us: PositiveFloat
    low_us: PositiveFloat
    high_us: PositiveFloat
    most_us: PositiveFloat


class ConfigForm(Form):
    """One config."""

    build: PositiveInt
    launch: Values
    status: str
    time_us: PositiveFloat | None
    build_s: FiniteFloat = Field(ge=0)
    run_s: FiniteFloat = Field(ge=0)
    load_s: FiniteFloat = Field(ge=0)
    gate_s: FiniteFloat = Field(ge=0)
    time_s: FiniteFloat = Field(ge=0)
    samples: SamplesForm | None = None
    model_us: PositiveFloat | None = None
    sentence: str = ""


class RecordingForm(Form):
    """The whole file."""

    format: Literal["tktune-recording"]
    version: Literal[1]
    made_by: str
    made_at: str
    name: str
    problem: dict[str, int | str]
    device: dict[str, int | str | bool]
    policy: dict[str, Any]
    toolchain: ToolchainForm
    build_jobs: PositiveInt
    iterations: PositiveInt
    gates: PositiveInt
    parameters: list[ParameterForm] = Field(min_length=1)
    default: Values
    builds: list[BuildForm] = Field(min_length=1)
    configs: list[ConfigForm] = Field(min_length=1)


def read_recording(path: Path) -> Recording:
    """Read our own recording or Kernel Tuner's results, packed with gzip or xz or not at all.

    Raises `WordsError` with the way out when the file is missing, of another form, or of another version.
    """
    content = _decoded(path)
    if is_t4(content):
        return recording_of_t4(content, path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise WordsError(f"{path} is not a recording.", _SPENT)
    if content.get("version") != VERSION:
        raise WordsError(
            f"{path} is a recording of version {content.get('version')}, and this tktune reads {VERSION}.",
            "Record it anew, or use the tktune that made it.",
        )
    try:
        form = RecordingForm.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise WordsError(f"{path} is not a sound recording: {where}: {first['msg']}.", _SPENT) from error
    try:
        return _recording(form)
    except (TktuneError, TypeError, ValueError, KeyError) as error:
        sentence = error.sentence if isinstance(error, TktuneError) else f"{error}."
        raise WordsError(f"{path} is not a sound recording: {sentence}", _SPENT) from error


def write_recording(recording: Recording, path: Path) -> None:
    """Write `path` whole or not at all, packed as its name says. Raises `WordsError` and `WorkError`."""
    check_name(path)
    text = json.dumps(form_of(recording).model_dump(exclude_defaults=True), separators=(",", ":"))
    packed = text.encode()
    if path.name.endswith(".xz"):
        packed = lzma.compress(packed, preset=9)
    elif path.name.endswith(".gz"):
        buffer = io.BytesIO()
        with gzip.GzipFile(fileobj=buffer, mode="wb", mtime=0) as file:
            file.write(packed)
        packed = buffer.getvalue()
    scratch = path.with_name(f".{path.name}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(packed)
        scratch.replace(path)
    except OSError as error:
        raise WorkError(
            f"{path} cannot be written: {error.strerror or error}.", "Choose another place."
        ) from error


def check_name(path: Path) -> None:
    """Raises `WordsError` unless the name says how the file is packed."""
    if not path.name.endswith(SUFFIXES):
        raise WordsError(
            f"A recording cannot be called {path.name}.", "End its name in .json.xz, .json.gz or .json."
        )


def form_of(recording: Recording) -> RecordingForm:
    """A recording as its published form; numbers are kept to five digits."""
    from tktune import __version__

    keys = {build: number for number, build in enumerate(recording.builds, 1)}
    kind, version, flags = recording.toolchain
    return RecordingForm(
        format=FORMAT,
        version=VERSION,
        made_by=f"tktune {__version__}",
        made_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        name=recording.name,
        problem=recording.problem.key,
        device={**recording.device.key, "display_name": recording.device.display_name},
        policy={
            key: list(value) if isinstance(value, tuple) else value
            for key, value in recording.policy.key.items()
        },
        toolchain=ToolchainForm(kind=kind, version=version, flags=list(flags)),  # type: ignore[arg-type]
        build_jobs=recording.build_jobs,
        iterations=recording.iterations,
        gates=recording.gates,
        parameters=[
            ParameterForm(name=p.name, values=list(p.values), kind=p.kind, meaning=p.meaning)
            for p in recording.parameters
        ],
        default=dict(recording.default),
        builds=[
            BuildForm(
                key=keys[one.build],
                build=dict(one.build),
                build_s=_short(one.build_s),
                status=one.status,
                sentence=one.sentence,
                facts=dict(one.facts),
            )
            for one in recording.builds.values()
        ],
        configs=[_config_form(recording, one, keys) for one in recording.trials.values()],
    )


def _config_form(recording: Recording, trial: RecordedTrial, keys: Mapping[Config, int]) -> ConfigForm:
    build = recording.build_part(trial.config)
    samples = trial.samples
    return ConfigForm(
        build=keys[build],
        launch={name: value for name, value in trial.config.items() if name not in build},
        status=trial.status,
        time_us=None if trial.time_us is None else _short(trial.time_us),
        build_s=_short(recording.builds[build].build_s),
        run_s=_short(trial.run_s),
        load_s=_short(trial.load_s),
        gate_s=_short(trial.gate_s),
        time_s=_short(trial.time_s),
        samples=None
        if samples is None
        else SamplesForm(
            count=samples.count,
            least_us=_short(samples.least_us),
            low_us=_short(samples.low_us),
            high_us=_short(samples.high_us),
            most_us=_short(samples.most_us),
        ),
        model_us=None if trial.model_us is None else _short(trial.model_us),
        sentence=trial.sentence,
    )


def _recording(form: RecordingForm) -> Recording:
    builds = {one.key: one for one in form.builds}
    policy: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in form.policy.items()
    }
    trials = [_trial(one, Config(builds[one.build].build)) for one in form.configs]
    for ended in (*(one.status for one in builds.values()), *(one.status for one in trials)):
        status.checked(ended)
    device: dict[str, Any] = dict(form.device)
    problem: dict[str, Any] = dict(form.problem)
    return Recording(
        name=form.name,
        problem=Problem(**problem),
        device=DeviceClass(**device),
        policy=Policy(**policy),
        toolchain=(form.toolchain.kind, form.toolchain.version, tuple(form.toolchain.flags)),
        parameters=tuple(Parameter(p.name, tuple(p.values), p.kind, p.meaning) for p in form.parameters),
        default=Config(form.default),
        builds={
            Config(one.build): RecordedBuild(
                Config(one.build), one.build_s, one.status, one.sentence, one.facts
            )
            for one in form.builds
        },
        trials={trial.config: trial for trial in trials},
        iterations=form.iterations,
        gates=form.gates,
        build_jobs=form.build_jobs,
    )


def _trial(form: ConfigForm, build: Config) -> RecordedTrial:
    return RecordedTrial(
        Config({**build, **form.launch}),
        form.status,
        form.time_us,
        form.run_s,
        form.load_s,
        form.gate_s,
        form.time_s,
        None if form.samples is None else SampleSummary(**form.samples.model_dump()),
        form.model_us,
        form.sentence,
    )


def _decoded(path: Path) -> Any:
    try:
        packed = path.read_bytes()
        if packed.startswith(b"\xfd7zXZ"):
            with lzma.open(io.BytesIO(packed)) as file:
                text = file.read(_MOST_BYTES)
        elif packed.startswith(b"\x1f\x8b"):
            with gzip.open(io.BytesIO(packed)) as file:
                text = file.read(_MOST_BYTES)
        else:
            text = packed
        return json.loads(text)
    except OSError as error:
        raise WordsError(
            f"The recording {path} cannot be read: {error.strerror or error}.", _SPENT
        ) from error
    except (lzma.LZMAError, EOFError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise WordsError(f"The recording {path} cannot be read: {error}.", _SPENT) from error


def _short(value: float) -> float:
    """Five digits: finer than any measurement, and half the file."""
    return float(f"{value:.5g}")
