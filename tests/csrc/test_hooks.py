"""The contracts of the GEMM's hooks on a GPU: what passes the gate is read, what is announced is written, a wait
that never ends traps and says who waited, and a raised abort word ends the launch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench" / "gemm_probe"))
FORMS = [
    "MMA_DEPTH=1",
    "MAIN_LOOP=2 COL_BLOCK=192 STAGES=5 OUT_SLOTS=3 MMA_DEPTH=1 DRAW=1",
    "ROW_BLOCK=256 COL_BLOCK=192 STAGES=3 WEIGHT_LAYOUT=0",
    "CLUSTER=2 WEIGHT_LAYOUT=0 PRODUCER_REGISTERS=56 CONSUMER_REGISTERS=224",
    "MAIN_LOOP=0 WARP_M=64 WARP_N=32 DRAW=1",
    "MAIN_LOOP=0 COL_BLOCK=256 RED_BLOCK=32 STAGES=4 WARP_M=64 WARP_N=64 PRODUCER_WARPS=0 WEIGHT_LAYOUT=0 DRAW=1",
]

torch = pytest.importorskip("torch")
pytest.importorskip("cuda.bindings.driver")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def announcements(counts: tuple[int, ...], pad: int, row_block: int, col_blocks: int) -> list[int]:
    """How often each pad block is announced: once for each tile that overlaps it and each column block."""
    expected: list[int] = []
    for count in counts:
        pieces, most = -(-count // 64), row_block // 64
        tiles = -(-pieces // most)
        calls = [0] * -(-count // pad)
        start = 0
        for tile in range(tiles):
            height = pieces // tiles + (tile < pieces % tiles)
            for block in range(start * 64 // pad, ((start + height) * 64 - 1) // pad + 1):
                calls[block] += col_blocks
            start += height
        expected += calls
    return expected


def run_probe(
    form: str, folder: Path, withheld: int = -1, abort: bool = False, spin_limit_s: float = 2.0
) -> str:
    """Launches the probe once; returns "right", a sentence about what is wrong, or the spin report."""
    import struct

    from build import build
    from kernel import Kernel
    from probe import TOLERANCE, Inputs
    from shapes import Shape
    from variants import make

    torch.zeros(1, device="cuda")  # makes the primary context current, which the driver calls need
    variant = make(form)
    built = build(variant.defines, folder, source=ROOT / "tests" / "csrc" / "hook_probe.cu")
    assert built.cubin is not None, built.log
    assert built.spill_bytes == 0, built.log
    kernel = Kernel(variant, built.cubin, "tktune_hook_probe", spin_limit_s)
    shape = Shape("hooks", 256, 768, (130, 0, 1, 300, 64, 517, 128, 200))
    inputs = Inputs(shape, seed=3)
    reference = inputs.reference()
    blocks = shape.rows // shape.pad
    source = torch.nan_to_num(inputs.activations)
    inputs.activations.fill_(float("nan"))
    inputs.outputs.fill_(float("nan"))
    seen = torch.full_like(inputs.outputs, float("nan"))
    words = torch.zeros(3, blocks, dtype=torch.int32, device="cuda")
    col_blocks = -(-shape.cols // variant.col_block)
    wanted = announcements(shape.counts, shape.pad, variant.row_block, col_blocks)
    expected = torch.tensor(wanted, dtype=torch.int32, device="cuda")
    comm = 4
    pointers = [t.data_ptr() for t in (source, inputs.activations, inputs.outputs, seen)]
    pointers += [words[i].data_ptr() for i in range(3)] + [expected.data_ptr()]
    hooks = struct.pack("<8Q4i", *pointers, blocks, kernel.resident - comm, withheld, 20_000)
    weights = inputs.enk if variant.enk else inputs.ekn
    kernel.bind(
        inputs.activations, weights, inputs.outputs, inputs.walk(1, variant.row_block), shape.pad, hooks
    )
    if abort:
        kernel.raise_abort()
    torch.cuda.synchronize()
    kernel.launch()
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return kernel.who_waited()
    if abort:
        return "returned"
    arrivals, gates, announced = words.cpu().tolist()
    if announced != wanted:
        return f"announced {announced}, expected {wanted}"
    if any(calls == 0 for calls in gates):
        return f"gate calls {gates}, arrivals {arrivals}"
    for name, out in (("outputs", inputs.outputs), ("outputs seen on announcement", seen)):
        out_real, ref = out[: shape.rows][inputs.real[: shape.rows]].float(), reference[inputs.real]
        if not float((out_real - ref).norm() / ref.norm()) < TOLERANCE:
            return f"{name} differ"
    return "right"


def in_a_process(*arguments: str) -> str:
    """A trap ends the context, so each launch has a process of its own."""
    command = [sys.executable, __file__, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    return (done.stdout.strip().splitlines() or [done.stderr[-2000:]])[-1]


@pytest.mark.parametrize("form", FORMS)
def test_gated_rows_are_read_and_announced_tiles_are_written(form: str) -> None:
    assert in_a_process(form) == "right"


@pytest.mark.parametrize("form", FORMS[:1] + FORMS[-1:])
def test_a_gate_that_never_opens_traps_and_names_its_word(form: str) -> None:
    told = in_a_process(form, "withhold")
    assert "gate waits for arrivals at 3" in told or "communicate waits for signal at" in told


def test_a_raised_abort_word_ends_a_launch_that_waits() -> None:
    assert in_a_process(FORMS[0], "abort") == "returned"


if __name__ == "__main__":
    import tempfile

    mode = sys.argv[2] if len(sys.argv) > 2 else ""
    with tempfile.TemporaryDirectory() as scratch:
        held = 3 if mode else -1
        print(
            run_probe(sys.argv[1], Path(scratch), held, mode == "abort", 0.5 if mode == "withhold" else 20.0)
        )
