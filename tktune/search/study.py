"""Study files: what to tune, on which device, under which policy and budget, read from TOML into one `Study`.

Nothing here searches or measures. pydantic validates the file; every mistake becomes one `StudyError`.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tktune.core.config import Value
from tktune.core.device import DeviceClass
from tktune.core.errors import ProblemError, RoutingError, StudyError, WordsError
from tktune.core.paths import studies_root
from tktune.core.policy import Policy, serving_policy
from tktune.core.problem import Problem
from tktune.core.routing import parse_routing
from tktune.core.space import Space
from tktune.families.base import Family, family
from tktune.moe.parts import FAMILY_NAME, is_layer, part_pins, part_problems
from tktune.search.effort import DEFAULT, PROFILES, Effort, effort
from tktune.search.layer_study import flat_pins, kernel_of, with_kernels

Count = Annotated[int, Field(ge=1)]
Counts = Count | Annotated[list[Count], Field(min_length=1)]
Text = Annotated[str, Field(min_length=1)]
PinValue = int | str
SamplerName = Literal["model", "tpe", "random"]  # those of `search.samplers`
DEFAULT_SAMPLER: SamplerName = "model"


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ProblemTable(_Table):
    """`[problem]`, or one of `[[problems]]`: lists stand for every value in them."""

    hidden: Counts | None = None
    cols: Counts | None = None
    experts: Count | None = None
    top_k: Count | None = None
    tokens: Counts | None = None
    world: Count | None = None
    dtype: Text | None = None
    weight_layout: Text | None = None
    routing: Text | Annotated[list[Text], Field(min_length=1)] | None = None
    pad: Counts | None = None
    ep_world: Count | None = None
    ep_rank: Annotated[int, Field(ge=0)] | None = None
    finish: Text | Annotated[list[Text], Field(min_length=1)] | None = None


class PolicyTable(_Table):
    """`[policy]`: what differs from the serving policy of the device."""

    name: Text | None = None
    launch_mode: Literal["direct", "graph"] | None = None
    cache_state: Literal["cold", "warm"] | None = None
    flush_bytes: Annotated[int, Field(ge=0)] | None = None
    warmup: Annotated[int, Field(ge=0)] | None = None
    first_iterations: Count | None = None
    iterations: Count | None = None
    clocks: Literal["free", "locked"] | None = None
    routing_seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None = None
    include_plan: bool | None = None


class SearchTable(_Table):
    """`[search]`: the budget of one problem and how the search is seeded. What is not given is the effort's."""

    effort: Literal["quick", "full", "exhaustive"] = "full"
    trials: Count | None = None
    seconds: Annotated[float, Field(gt=0, le=1e7)] | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    finalists: Count | None = None
    rounds: Annotated[int, Field(ge=3)] | None = None
    stop_early: bool | None = None
    start_from: Text | Annotated[list[Text], Field(min_length=1)] | None = None
    sampler: SamplerName = DEFAULT_SAMPLER
    gangs: Count | None = None


class StudyFile(_Table):
    """The whole file."""

    name: Text
    family: Text
    device: Text = "cpu"
    problem: ProblemTable = ProblemTable()
    problems: list[ProblemTable] = Field(default_factory=list)
    policy: PolicyTable = PolicyTable()
    search: SearchTable = SearchTable()
    pins: dict[str, PinValue | Annotated[list[PinValue], Field(min_length=1)]] = Field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    """Problems to tune, and how. Those of a layer's kernels stand before the layer's own (`search.layer_study`).

    `trials` and `seconds` bound the search of one problem; with `stop_early` it may end before. `pins` limits
    parameters to these values. `start_from` are configs (as text: `search.start`) tried right after the default.
    `rounds` is how often finalists are measured. At most `gangs` gangs measure side by side (None: as many as the host
    has devices for). `policy_changes` are the fields in which the policy differs from
    the device's serving policy.

    >>> study = load_study("quickstart")  # doctest: +SKIP
    >>> study.on("sm_120a").problems[0].hidden  # doctest: +SKIP
    256
    """

    name: str
    family: str
    device: str
    problems: tuple[Problem, ...]
    trials: int
    seconds: float
    seed: int
    finalists: int
    pins: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    policy_changes: Mapping[str, Any] = field(default_factory=dict)
    path: Path | None = None
    rounds: int = PROFILES[DEFAULT].rounds
    stop_early: bool = False
    start_from: tuple[str, ...] = ()
    sampler: SamplerName = DEFAULT_SAMPLER
    gangs: int | None = None

    def on(self, device: str) -> Study:
        """The same study on another device, for example a class to dry-run ("sm_120a")."""
        return dataclasses.replace(self, device=device)

    def policy(self, device: DeviceClass) -> Policy:
        """The policy of this study on `device`: serving, with the file's changes."""
        serving = serving_policy(device.backend, device.l2_bytes)
        return dataclasses.replace(serving, **self.policy_changes)

    def space(self, problem: Problem, device: DeviceClass) -> Space:
        """The family's space with this study's pins. Raises `WordsError` for a pin the space does not have."""
        space = family(self.family_of(problem)).space(problem, device)
        pins = self.pins_of(problem)
        return space.restrict(pins) if pins else space

    @property
    def enumerable(self) -> tuple[Problem, ...]:
        """The problems whose spaces can be enumerated beforehand: all but layers, whose spaces hang on their kernels'
        winners."""
        return tuple(problem for problem in self.problems if not is_layer(problem))

    def family_of(self, problem: Problem) -> str:
        """The family that tunes `problem`: the study's, but a layer's kernels have their own."""
        return problem.family if self.family == FAMILY_NAME else self.family

    def pins_of(self, problem: Problem) -> Mapping[str, tuple[Value, ...]]:
        """The pins under the names of the problem's own parameters. Raises `WordsError` as `part_pins` does."""
        if self.family != FAMILY_NAME or is_layer(problem):
            return self.pins
        return part_pins(self.pins, kernel_of(problem))


def load_study(path_or_name: str | Path, effort_name: str | None = None) -> Study:
    """Read a study file, or a shipped study by its name ("quickstart").

    `effort_name` is the command line's effort: its budget then stands instead of the file's. Raises `StudyError`
    with the file, the key and the way out, and `WordsError` for an effort that is none.
    """
    path = _find(path_or_name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise StudyError(f"The study {path} cannot be read: {reason}.", "Name a TOML file.") from error
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise StudyError(f"The study {path} is not TOML: {error}.", "Mend that line.") from error
    return parse_study(content, path, None if effort_name is None else effort(effort_name))


def parse_study(content: Mapping[str, Any], path: Path, asked: Effort | None = None) -> Study:
    """Make a `Study` of a decoded file; `path` names it in errors. Raises `StudyError`.

    The budget is that of `asked`; without it, the file's own keys, and where it has none, those of the file's effort.
    """
    if content.get("family") == FAMILY_NAME and isinstance(content.get("pins"), Mapping):
        content = {**content, "pins": flat_pins(content["pins"])}
    try:
        file = StudyFile.model_validate(content)
    except ValidationError as error:
        _refuse(error, path)
    try:
        found: Family = family(file.family)
    except WordsError as error:
        raise StudyError(f"{path}: {error.sentence}", error.way_out) from error
    policy = {key: value for key, value in file.policy.model_dump().items() if value is not None}
    if "routing_seeds" in policy:
        policy["routing_seeds"] = tuple(policy["routing_seeds"])
    merged = dataclasses.replace(Policy(), **policy)
    if merged.first_iterations > merged.iterations:
        raise StudyError(
            f"{path}: [policy] first_iterations = {merged.first_iterations} is more than iterations = "
            f"{merged.iterations}.",
            "Lower first_iterations or raise iterations.",
        )
    search, profile = file.search, asked or PROFILES[file.search.effort]
    own = asked is None
    return Study(
        name=file.name,
        family=file.family,
        device=file.device,
        problems=_problems(file, found.name if file.family == found.name else file.family, path),
        trials=search.trials if own and search.trials is not None else profile.trials,
        seconds=search.seconds if own and search.seconds is not None else profile.seconds,
        seed=search.seed,
        finalists=search.finalists if own and search.finalists is not None else profile.finalists,
        rounds=search.rounds if own and search.rounds is not None else profile.rounds,
        stop_early=search.stop_early if own and search.stop_early is not None else profile.stop_early,
        start_from=() if search.start_from is None else _listed(search.start_from),
        sampler=search.sampler,
        gangs=search.gangs,
        pins={name: _listed(value) for name, value in file.pins.items()},
        policy_changes=policy,
        path=path,
    )


def list_studies() -> list[Path]:
    """The study files that ship with tktune, by name."""
    return sorted(studies_root().glob("*.toml"))


def _find(path_or_name: str | Path) -> Path:
    path = Path(path_or_name).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        raise StudyError(f"{path} is a folder.", "Name one TOML file in it.")
    shipped = {study.stem: study for study in list_studies()}
    name = path.stem if path.suffix == ".toml" and path.parent == Path() else str(path)
    if name in shipped:
        return shipped[name]
    near = difflib.get_close_matches(name, shipped, n=1)
    hint = f"Did you mean {near[0]}? " if near else ""
    raise StudyError(
        f"There is no study {str(path_or_name)!r}.",
        f"{hint}Name a TOML file, or one of: {', '.join(shipped) or 'none is shipped'}.",
    )


def _listed(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list) else (value,)


def _problems(file: StudyFile, family_name: str, path: Path) -> tuple[Problem, ...]:
    defaults = {k: v for k, v in file.problem.model_dump().items() if v is not None}
    tables: Sequence[dict[str, Any]] = [
        {k: v for k, v in table.model_dump().items() if v is not None} for table in file.problems
    ]
    problems: list[Problem] = []
    for number, table in enumerate(tables or [{}]):
        fields = {**defaults, **table}
        where = f"[[problems]] number {number + 1}" if tables else "[problem]"
        for needed in ("hidden", "cols", "experts", "top_k", "tokens"):
            if needed not in fields:
                raise StudyError(
                    f"{path}: {where} lacks {needed}.", f"Add a line such as {_EXAMPLES[needed]}."
                )
        names = list(fields)
        for values in itertools.product(*(_listed(fields[name]) for name in names)):
            one = dict(zip(names, values, strict=True))
            if "routing" in one:
                one["routing"] = _beside(one["routing"], path)
            try:
                problem = Problem(family=family_name, **one)
                parse_routing(problem.routing).check_trace(problem)
                if family_name == FAMILY_NAME:
                    part_problems(problem)  # both kernels have problems
            except (ProblemError, RoutingError) as error:
                raise StudyError(f"{path}: {where}: {error.sentence}", error.way_out) from error
            if problem not in problems:
                problems.append(problem)
    return with_kernels(problems) if family_name == FAMILY_NAME else tuple(problems)


_EXAMPLES = {
    "hidden": "hidden = 4096",
    "cols": "cols = 3072",
    "experts": "experts = 64",
    "top_k": "top_k = 8",
    "tokens": "tokens = [512, 2048]",
    "name": 'name = "my study"',
    "family": 'family = "dispatch_gemm"',
}


def _beside(routing: str, path: Path) -> str:
    """A trace that is not found from here is looked for beside the study file."""
    kind, _, rest = routing.partition(":")
    name = rest.partition("#")[0]
    if kind == "trace" and not Path(name).expanduser().exists() and (path.parent / name).exists():
        return f"trace:{path.parent / rest}"
    return routing


_TABLES: dict[str, type[BaseModel]] = {
    "": StudyFile,
    "problem": ProblemTable,
    "problems": ProblemTable,
    "policy": PolicyTable,
    "search": SearchTable,
}


def _refuse(error: ValidationError, path: Path) -> NoReturn:
    """Turn pydantic's findings into the sentence about the first key that is wrong."""
    findings = error.errors(include_url=False)
    unknown = [f for f in findings if f["type"] == "extra_forbidden"]
    finding = (unknown or findings)[0]
    place = [part for part in finding["loc"] if isinstance(part, str)]
    table = place[0] if place[0] in _TABLES or place[0] == "pins" else ""
    key = place[1] if table and len(place) > 1 else place[0]
    where = {"": "", "problems": "[[problems]] "}.get(table, f"[{table}] ") if table != key else ""
    if finding["type"] == "extra_forbidden":
        known = list(_TABLES[table].model_fields)
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
        if near:
            raise StudyError(
                f"{path}: {where}has no key {key!r}; the nearest known key is {near[0]!r}."
                if where
                else f"{path}: there is no key {key!r}; the nearest known key is {near[0]!r}.",
                f"Write {near[0]}, or remove the line.",
            ) from error
        raise StudyError(
            f"{path}: {where or 'the file '}has no key {key!r}.", f"Use one of: {', '.join(known)}."
        ) from error
    if finding["type"] == "missing":
        example = _EXAMPLES.get(key, f"{key} = …")
        raise StudyError(
            f"{path}: {where}lacks {key}." if where else f"{path}: {key} is missing.",
            f"Add a line such as {example}.",
        ) from error
    shown = finding["input"]
    raise StudyError(
        f"{path}: {where}{key} = {shown!r} is wrong: {_expected(findings, finding['loc'])}.",
        f"Write {_EXAMPLES[key]}, for example." if key in _EXAMPLES else "Mend the value or remove the line.",
    ) from error


def _expected(findings: Sequence[Any], place: tuple[Any, ...]) -> str:
    """What the value should have been; a union of types reports once for each member."""
    words = {
        "int_type": "a whole number",
        "int_parsing": "a whole number",
        "float_type": "a number",
        "string_type": "a text",
        "bool_type": "true or false",
        "list_type": "a list",
        "model_type": "a table",
        "dict_type": "a table",
        "model_attributes_type": "a table",
    }
    said = []
    depth = 2 if place[0] in _TABLES or place[0] == "pins" else 1
    for finding in findings:
        if finding["loc"][:depth] != place[:depth]:
            continue
        expected = words.get(finding["type"])
        if finding["type"] == "greater_than_equal":
            expected = f"at least {finding['ctx']['ge']}"
        if finding["type"] == "too_short":
            expected = "a list of at least one value"
        message = str(finding["msg"]).replace("Input should", "it should").rstrip(".")
        said.append(f"it should be {expected}" if expected else message)
    kinds = [s.removeprefix("it should be ") for s in dict.fromkeys(said) if s.startswith("it should be ")]
    others = [s for s in dict.fromkeys(said) if not s.startswith("it should be ")]
    if others:
        return others[0]
    return f"it should be {' or '.join(kinds)}"
