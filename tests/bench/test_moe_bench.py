"""The arithmetic of the layer bench: the slowest rank counts, the faster serial form, and what the bound is made of."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))

from moe_bench.figures import FORMS, IN_PLACE, LAYER, PARTS, SERIAL, Row, slowest_us, table


def row(layer_us: float, serial_us: tuple[float, float] = (300.0, 260.0), tokens: int = 2048) -> Row:
    us = {LAYER: layer_us, IN_PLACE: layer_us - 1}
    us |= {f"{SERIAL}{form}": one for form, one in zip(FORMS, serial_us, strict=True)}
    us |= dict(zip(PARTS, (90.0, 50.0, 40.0, 5.0, 15.0), strict=True))
    return Row(us, tokens)


def test_a_launch_counts_by_its_slowest_rank_then_medians() -> None:
    one = [[1.0, 5.0, 2.0], [3.0, 3.0, 3.0], [9.0, 9.0, 9.0]]
    other = [[4.0, 1.0, 2.0], [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]
    assert slowest_us([one, other]) == 4.0


def test_the_bound_is_the_faster_serial_form_over_the_sum_of_the_parts() -> None:
    found = row(208.0)
    assert found.serial_us == 260.0 and found.parts_us == 200.0
    assert found.bound == pytest.approx(1.3) and found.speedup == pytest.approx(1.25)
    assert found.of_bound == pytest.approx(200 / 208)


@pytest.mark.parametrize(
    ("layer_us", "serial_us", "tokens", "reached"),
    [
        (208.0, (300.0, 260.0), 2048, True),
        (218.0, (300.0, 280.0), 2048, False),  # 0.917 of the bound
        (209.0, (300.0, 260.0), 2048, False),  # 1.244 × serial
        (209.0, (300.0, 260.0), 512, True),  # no ratio to serial is asked there
    ],
)
def test_what_is_asked(layer_us: float, serial_us: tuple[float, float], tokens: int, reached: bool) -> None:
    assert row(layer_us, serial_us, tokens).reached is reached


def test_the_table_has_both_serial_forms_and_every_part() -> None:
    shown = table([("one", row(208.0)), ("another", row(260.0))])
    lines = shown.splitlines()
    assert len(lines) == 3 and len({len(line.rstrip()) for line in lines[1:]}) <= 2
    for value in ("300.0", "260.0", "90.0", "50.0", "40.0", "5.0", "15.0", "1.25", "1.30", "0.962", "ok"):
        assert value in lines[1]
    assert lines[2].endswith("short")
