"""The weights of a layer as people have them: shapes, dtypes, which experts are whose, and the form that kernels take."""

from __future__ import annotations

import torch

from tktune.core.errors import ProblemError
from tktune.core.problem import Problem
from tktune.moe.parts import GATE_AND_UP


def plain_shapes(layer: Problem, experts: int) -> dict[str, tuple[int, ...]]:
    """Shapes of `experts` experts' weights: `w13` is gate, then up; `w2` goes back.

    "enk": w13 (experts, 2 × intermediate, hidden), w2 (experts, hidden, intermediate), as torch.nn.Linear has them.
    "ekn": w13 (experts, hidden, 2 × intermediate), w2 (experts, intermediate, hidden).
    """
    first, second = (GATE_AND_UP * layer.cols, layer.hidden), (layer.hidden, layer.cols)
    if layer.weight_layout == "ekn":
        first, second = first[::-1], second[::-1]
    return {"w13": (experts, *first), "w2": (experts, *second)}


def expect_tensor(name: str, given: object) -> None:
    """Raises `ProblemError` for what is no tensor, or one without values."""
    if not isinstance(given, torch.Tensor):
        raise ProblemError(
            f"{name} is a {type(given).__name__}, and a layer takes tensors.",
            f"Pass torch.as_tensor({name}).",
        )
    if given.is_meta:
        raise ProblemError(f"{name} is a meta tensor, which has no values.", "Load its values first.")


def sizes_of(w13: torch.Tensor, w2: torch.Tensor, weight_layout: str) -> tuple[int, int]:
    """(hidden, intermediate) of plain weights. Raises `ProblemError` when the two contradict each other."""
    for name, tensor in (("w13", w13), ("w2", w2)):
        expect_tensor(name, tensor)
    if w13.dim() != 3 or w2.dim() != 3:
        raise ProblemError(
            f"w13 has {w13.dim()} dimensions and w2 {w2.dim()}, and both need three.",
            "Stack the experts' matrices: w13 (experts, 2 × intermediate, hidden), w2 (experts, hidden, intermediate).",
        )
    ekn = weight_layout == "ekn"
    both, hidden = (w13.shape[2], w13.shape[1]) if ekn else (w13.shape[1], w13.shape[2])
    back = (w2.shape[1], w2.shape[2]) if ekn else (w2.shape[2], w2.shape[1])
    if w13.shape[0] != w2.shape[0] or back != (both // GATE_AND_UP, hidden) or both % GATE_AND_UP:
        other = "enk" if ekn else "ekn"
        raise ProblemError(
            f"w13 is {tuple(w13.shape)} and w2 {tuple(w2.shape)}, which are not the two matrices of one layer in the layout "
            f"{weight_layout!r}.",
            f"w13 holds gate and up side by side, w2 goes back; or say weight_layout={other!r}.",
        )
    return int(hidden), int(both // GATE_AND_UP)


def check_counts(held: int, experts: int | None, world: int) -> int:
    """The experts of all ranks where a rank's weights hold `held`. Raises `ProblemError` when that contradicts `experts`."""
    if experts is None:
        return held * world
    if held not in (experts, experts / world):
        raise ProblemError(
            f"The weights hold {held} experts, and experts = {experts} of {world} ranks was said.",
            f"Pass those of one rank ({experts} ÷ {world}) or of all, or leave experts out.",
        )
    return experts


def local_part(name: str, tensor: torch.Tensor, layer: Problem, rank: int) -> torch.Tensor:
    """This rank's experts out of all of them, or the tensor itself when it holds no others.

    Raises `ProblemError` for another shape or dtype.
    """
    expect_tensor(name, tensor)
    local = layer.local_experts
    wanted, everything = (plain_shapes(layer, count)[name] for count in (local, layer.experts))
    shape = tuple(tensor.shape)
    if shape not in (wanted, everything):
        raise ProblemError(
            f"{name} is {shape}, and this layer takes {wanted} for the experts of one rank, or {everything} for all.",
            f"The layout is {layer.weight_layout!r}; w13 holds gate, then up.",
        )
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
        raise ProblemError(
            f"{name} is {str(tensor.dtype).removeprefix('torch.')}, and a layer takes bfloat16 weights.",
            "Convert it to a floating type of two bytes or more; those are rounded here.",
        )
    return tensor if shape == wanted else tensor[rank * local : (rank + 1) * local]
