"""Configs that a person wants tried first: read from text, judged against a space, refused with a sentence."""

from __future__ import annotations

import difflib
import json
import shlex
from collections.abc import Iterable, Mapping

from tktune.core.config import Config, Value
from tktune.core.errors import WordsError
from tktune.core.space import Space

_FORM = 'Write for example --start-from "STAGES=2 num_comm_sms=4", or a JSON object.'


def config_words(text: str) -> dict[str, Value]:
    """'STAGES=2 order=slot' or '{"STAGES": 2, "order": "slot"}' as values by name. Raises `WordsError`."""
    if text.lstrip().startswith("{"):
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise WordsError(f"--start-from is not JSON: {error}.", _FORM) from error
        if not isinstance(found, dict) or any(
            isinstance(value, bool) or not isinstance(value, int | str) for value in found.values()
        ):
            raise WordsError("--start-from has a value that is neither a whole number nor a word.", _FORM)
        return found
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise WordsError(f"--start-from {text!r} cannot be read: {error}.", _FORM) from error
    values: dict[str, Value] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name and equals and value) or name in values:
            raise WordsError(f"--start-from {text!r}: {word!r} is not PARAM=VALUE, each once.", _FORM)
        values[name] = _value(value)
    if not values:
        raise WordsError("--start-from is empty.", _FORM)
    return values


def start_configs(space: Space, texts: Iterable[str]) -> list[Config]:
    """The feasible configs that `texts` stand for; a parameter that one leaves out is as in the default.

    Raises `WordsError` for an unknown parameter or value, and for a config that breaks a constraint, with its sentence.
    """
    found = [_start_config(space, config_words(text)) for text in texts]
    return list(dict.fromkeys(found))


def _start_config(space: Space, values: Mapping[str, Value]) -> Config:
    known = {p.name: p.values for p in space.parameters}
    for name, value in values.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise WordsError(
                f"--start-from: there is no parameter {name!r} on {space.device}.",
                f"{hint}Use one of: {', '.join(known)}.",
            )
        if value not in known[name]:
            allowed = ", ".join(map(str, known[name]))
            raise WordsError(f"--start-from: {name} cannot be {value}.", f"Use: {allowed}.")
    config = space.canonical(space.default_config().replace(**values))
    plain = space.canonical(space.default.replace(**values))
    if not space.is_feasible(config) and space.is_feasible(plain):
        return plain
    broken = space.broken(config)
    if broken:
        constraint, sentence = broken[0]
        raise WordsError(
            f"--start-from: {config} is infeasible for {space.problem}: {constraint.name}: {sentence}.",
            "See what is feasible with --dry-run.",
        )
    return config


def _value(word: str) -> Value:
    try:
        return int(word)
    except ValueError:
        return word
