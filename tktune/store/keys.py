"""Keys as JSON and back: problems, device classes, policies as the store spells them. No SQL."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from tktune.core.canonical import canonical_json, digest
from tktune.core.config import Config
from tktune.core.device import DeviceClass
from tktune.core.policy import Policy
from tktune.core.problem import Problem


def shape_digest(problem: Problem) -> str:
    """What problems that differ only in tokens and pad share."""
    return digest({name: value for name, value in problem.key.items() if name not in ("tokens", "pad")})


def problem_from(key: str) -> Problem:
    return Problem(**json.loads(key))


def device_from(key: str, display_name: str = "") -> DeviceClass:
    return DeviceClass(**{"display_name": display_name, **json.loads(key)})


def policy_from(key: str) -> Policy:
    fields = json.loads(key)
    return Policy(**{**fields, "routing_seeds": tuple(fields["routing_seeds"])})


def config_from(text: str) -> Config:
    return Config(json.loads(text))


def mapping_from(text: str | None) -> dict[str, Any] | None:
    return None if text is None else dict(json.loads(text))


def text_from(value: Mapping[str, Any] | None) -> str | None:
    """Canonical JSON of a report's free fields; NaN and infinities, which JSON lacks, become words."""
    return None if value is None else canonical_json(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value
