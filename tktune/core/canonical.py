"""Canonical JSON and digests: one spelling for every key that is stored or compared."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def canonical_json(value: Any) -> str:
    """The one JSON spelling of `value`: sorted keys, no spaces, no NaN (raises ValueError)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=True)


def digest(value: Any) -> str:
    """SHA-256 of the canonical JSON, in hexadecimal (64 characters)."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()
