"""Which device a rank sits at: its rank, unless its gang says otherwise."""

from __future__ import annotations

import json

import pytest
from cuda_artifacts import problem_of

from tktune.core.device import device_class
from tktune.core.errors import GangError
from tktune.core.policy import Policy
from tktune.families.base import RankSeat
from tktune.gang.gang import Gang
from tktune.gang.protocol import seat_from_json, seat_to_json


def seat(rank: int, **changes: int) -> RankSeat:
    return RankSeat(problem_of(), device_class("sm_90a"), Policy(), rank, 4, (), 3, **changes)


def test_a_rank_sits_at_the_device_of_its_own_number():
    assert [seat(rank).device_index for rank in range(4)] == [0, 1, 2, 3]
    assert seat(0, device_index=3).device_index == 3


def test_the_device_survives_the_control_socket():
    for one in (seat(2), seat(0, device_index=5)):
        assert seat_from_json(json.loads(json.dumps(seat_to_json(one)))) == one


def test_a_gang_names_one_device_a_rank():
    gang = Gang(problem_of(), device_class("sm_90a"), Policy(), device_indices=[3])
    assert gang._device_indices == (3,)
    with pytest.raises(GangError, match="1 was given 2 devices"):
        Gang(problem_of(), device_class("sm_90a"), Policy(), device_indices=[0, 1])
