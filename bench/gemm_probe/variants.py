"""Named sets of variants: what is compiled (`defines`) and how it is launched (`launch`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Variant:
    name: str
    defines: dict[str, int]
    launch: dict[str, int] = field(default_factory=dict)  # raster_rows, turn_back, walk, promotion, sms

    def get(self, define: str, default: int) -> int:
        return self.defines.get(define, default)

    @property
    def main_loop(self) -> int:
        return self.get("MAIN_LOOP", 1)

    @property
    def row_block(self) -> int:
        return self.get("ROW_BLOCK", 128)

    @property
    def col_block(self) -> int:
        return self.get("COL_BLOCK", 128 if self.main_loop == 0 else 256)

    @property
    def enk(self) -> bool:
        return self.get("WEIGHT_LAYOUT", 1) == 1


def make(text: str) -> Variant:
    """`make("MAIN_LOOP=1 COL_BLOCK=192 raster_rows=1")`: capitals are defines, the rest launch arguments."""
    defines, launch = {}, {}
    for word in text.split():
        key, value = word.split("=")
        (defines if key[0].isupper() else launch)[key] = int(value)
    return Variant(text or "default", defines, launch)


def read_set(path: str) -> list[Variant]:
    """One variant a line; `#` starts a comment; `{a,b}` expands like in a shell."""
    variants: list[Variant] = []
    with Path(path).open() as lines:
        for line in lines:
            text = line.split("#")[0].strip()
            if line.strip().startswith("#") or not line.strip():
                continue
            variants.extend(make(one) for one in expand("" if text == "default" else text))
    return variants


def expand(text: str) -> list[str]:
    start = text.find("{")
    if start < 0:
        return [text]
    end = text.index("}", start)
    choices = text[start + 1 : end].split(",")
    return [one for choice in choices for one in expand(text[:start] + choice + text[end + 1 :])]
