"""Plain text for people: aligned columns, bars, and numbers with their units. Knows nothing of what it shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def aligned(rows: Sequence[Sequence[Any]], right: Sequence[int] = (), indent: str = "") -> str:
    """Rows of cells as columns of plain text; the columns listed in `right` are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    count = max(map(len, cells), default=0)
    widths = [max((len(row[i]) for row in cells if i < len(row)), default=0) for i in range(count)]
    lines = []
    for row in cells:
        parts = [c.rjust(widths[i]) if i in right else c.ljust(widths[i]) for i, c in enumerate(row)]
        lines.append((indent + "  ".join(parts)).rstrip())
    return "\n".join(lines)


def bar(value: float, longest: float, width: int = 30) -> str:
    """A bar of `width` characters for `longest`, and in proportion for `value` (at least one for any value)."""
    if longest <= 0 or value <= 0:
        return ""
    return "█" * max(1, round(width * value / longest))


def bytes_text(count: float) -> str:
    """A number of bytes as people read it: 1536 -> "1.5 KiB"."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def seconds_text(seconds: float) -> str:
    """A duration as people read it: 83 -> "1 min 23 s"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def time_text(time_us: float | None) -> str:
    """A time as people compare it, always in microseconds: 1234.5 -> "1234 µs"; None -> "–"."""
    if time_us is None:
        return "–"
    return f"{time_us:.1f} µs" if time_us < 1000 else f"{time_us:.0f} µs"


def ratio_text(ratio: float | None) -> str:
    """A ratio of two times: 1.234 -> "1.23 ×"; None -> "–"."""
    return "–" if ratio is None else f"{ratio:.2f} ×"


def count_text(count: int, one: str, many: str = "") -> str:
    """A count with its noun: (1, "build") -> "1 build", (2, "build") -> "2 builds"."""
    return f"{count} {one if count == 1 else many or one + 's'}"
