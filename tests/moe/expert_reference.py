"""What an expert layer computes, token by token in float64, from its definition alone: numpy, and no line of tktune."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def expert_layer(
    x: Array, ids: Array, weights: Array, gate: Array, up: Array, down: Array
) -> tuple[Array, Array]:
    """(tokens, hidden) results, and of each token the norm of its terms' magnitudes, to measure errors against.

    x (tokens, hidden); ids, weights (tokens, top_k), -1 is no expert; gate, up (experts, intermediate, hidden); down
    (experts, hidden, intermediate).
    """
    result = np.zeros(x.shape)
    size = np.zeros(x.shape)
    for token in range(len(x)):
        row = x[token].astype(np.float64)
        for place in range(ids.shape[1]):
            expert = int(ids[token, place])
            if expert < 0:
                continue
            opened = gate[expert].astype(np.float64) @ row
            inner = opened * (1 / (1 + np.exp(-opened))) * (up[expert].astype(np.float64) @ row)
            term = float(weights[token, place]) * (down[expert].astype(np.float64) @ inner)
            result[token] += term
            size[token] += np.abs(term)
    return result, np.linalg.norm(size, axis=1)


def worst_error(found: Array, ids: Array, weights: Array, reference: tuple[Array, Array]) -> float:
    """The largest error of a token, relative to its terms; a token without terms must be zero exactly."""
    result, size = reference
    assert found.shape == result.shape and np.isfinite(found).all()
    empty = size == 0
    assert not found[empty].any(), "a token without terms is zero"
    error = np.linalg.norm(found - result, axis=1)[~empty] / size[~empty]
    return float(error.max(initial=0.0))
