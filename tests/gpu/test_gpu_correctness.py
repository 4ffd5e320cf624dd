"""Every main loop and layout gives the reference on the corpus of shapes and row counts."""

from __future__ import annotations

import pytest
from gpu_variants import MMA_SYNC, REHEARSAL, WGMMA, Variant, counted_problem, ids_of_counts

VARIANTS = [("wgmma", name) for name in WGMMA] + [("mma_sync", name) for name in MMA_SYNC]


@pytest.fixture(params=VARIANTS, ids="-".join)
def variant(request, cache, device):
    path, name = request.param
    if path == "mma_sync":
        return Variant(cache, REHEARSAL, MMA_SYNC[name])
    if device.arch != "sm_90a":
        pytest.skip("this GPU has no wgmma")
    return Variant(cache, device, WGMMA[name])


def corpus(row_block):
    edges = (0, 1, row_block - 1, row_block, row_block + 1, row_block // 2, row_block // 2 + 1, 300)
    return {
        "edges": (edges, 192, 768),
        "ragged columns": (edges, 320, 328),
        "one hot, others empty": ((0, 1000, 0, 0, 3, 0), 2880, 640),
        "one expert only": ((517,), 128, 1536),
        "more experts than a window": (tuple((7 * e) % 150 for e in range(77)), 128, 256),
    }


@pytest.mark.parametrize("layout", ["enk", "ekn"])
def test_the_output_is_the_reference_and_repeats_bit_by_bit(variant, layout):
    import torch

    from tktune.families.cuda.gemm_inputs import check_output

    row_block = variant.changes.get("ROW_BLOCK", 128)
    for name, (counts, hidden, cols) in corpus(row_block).items():
        case, outputs = variant.run(
            counted_problem(counts, hidden, cols, layout), ids_of_counts(counts), len(name), 2
        )
        for out in outputs:
            verdict = check_output(case, out)
            assert verdict.passed, f"{name}: {verdict}"
        first, second = (out[case.slots] for out in outputs)
        assert torch.equal(first, second), name
