"""Numbers and columns as people read them."""

from __future__ import annotations

import pytest

from tktune.report import text


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 1024**3, "3.0 GiB"), (2**50, "1024.0 TiB")],
)
def test_bytes_are_told_in_the_largest_unit_that_fits(count: int, words: str) -> None:
    assert text.bytes_text(count) == words


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (83, "1 min 23 s"), (7260, "2 h 1 min")]
)
def test_durations_are_told_in_two_units(seconds: float, words: str) -> None:
    assert text.seconds_text(seconds) == words


def test_times_are_always_microseconds() -> None:
    assert [text.time_text(t) for t in (None, 12.34, 123456.7)] == ["–", "12.3 µs", "123457 µs"]


def test_columns_line_up() -> None:
    lines = text.aligned([["a", 1], ["long", 22]], right=(1,)).splitlines()
    assert lines == ["a      1", "long  22"]


def test_a_bar_is_in_proportion_and_never_vanishes() -> None:
    assert [len(text.bar(v, 100, 20)) for v in (100, 50, 0.1, 0)] == [20, 10, 1, 0]


def test_counts_agree_with_their_noun() -> None:
    assert [text.count_text(n, "build") for n in (0, 1, 2)] == ["0 builds", "1 build", "2 builds"]
