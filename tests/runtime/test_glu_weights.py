"""Packed weights against the plain [gate | up]: every column is where the layout says, and a GEMM of packed weights gives
packed columns.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tktune
from tktune.core.errors import ProblemError
from tktune.families.glu import gate_and_up

DTYPES = (torch.bfloat16, torch.float32, torch.float8_e4m3fn)


@given(
    experts=st.integers(0, 3), hidden=st.integers(1, 5), groups=st.integers(1, 5), dtype=st.sampled_from(DTYPES),
    enk=st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_each_column_of_gate_and_up_is_where_the_layout_says(experts, hidden, groups, dtype, enk):
    half = 8 * groups
    stream = torch.Generator().manual_seed(experts * 100 + groups)
    gate, up = (torch.randn(experts, hidden, half, generator=stream).to(dtype) for _ in range(2))
    plain = torch.cat([gate, up], dim=2)
    layout = "enk" if enk else "ekn"
    given_weights = plain.transpose(1, 2).contiguous() if enk else plain
    packed = tktune.pack_glu(given_weights, layout)
    assert packed.shape == given_weights.shape and packed.dtype == dtype and packed.is_contiguous()
    columns = packed.transpose(1, 2) if enk else packed
    for column in range(half):
        group, place = divmod(column, 8)
        assert same(columns[..., 16 * group + place], gate[..., column])
        assert same(columns[..., 16 * group + 8 + place], up[..., column])
    assert same(tktune.unpack_glu(packed, layout), given_weights)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.float(), other.float())


def test_a_product_with_packed_weights_has_gate_and_up_where_kernels_look_for_them():
    stream = torch.Generator().manual_seed(1)
    x = torch.randn(7, 24, generator=stream)
    gate, up = torch.randn(24, 40, generator=stream), torch.randn(24, 40, generator=stream)
    packed = tktune.pack_glu(torch.cat([gate, up], dim=1)[None])[0]
    found_gate, found_up = gate_and_up(x @ packed)
    torch.testing.assert_close(found_gate, x @ gate)
    torch.testing.assert_close(found_up, x @ up)
    as_array_gate, as_array_up = gate_and_up((x @ packed).numpy())
    assert (as_array_gate == found_gate.numpy()).all() and (as_array_up == found_up.numpy()).all()


def test_weights_of_a_transposed_view_are_packed_all_the_same():
    weights = torch.arange(2 * 6 * 32.0).view(2, 6, 32)
    seen = weights.transpose(1, 2).contiguous().transpose(1, 2)
    assert not seen.is_contiguous()
    assert torch.equal(tktune.pack_glu(seen), tktune.pack_glu(weights))


@pytest.mark.parametrize(
    ("shape", "layout", "said"),
    [
        ((2, 16, 24), "ekn", "have 24 columns of gate and up"),
        ((2, 24, 16), "enk", "have 24 columns of gate and up"),
        ((16,), "ekn", "are no matrices"),
        ((2, 16, 16), "kn", "is not known"),
    ],
)
def test_weights_that_cannot_be_packed_are_refused_in_words(shape, layout, said):
    for turn in (tktune.pack_glu, tktune.unpack_glu):
        with pytest.raises(ProblemError, match=said):
            turn(torch.zeros(shape), layout)


def test_the_names_are_there_without_torch_being_imported():
    code = "import tktune, sys; tktune.pack_glu, tktune.unpack_glu; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"
