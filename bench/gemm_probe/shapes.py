"""The GEMM shapes that are timed and the small ones that are checked. No CUDA here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Rows that one rank of an expert-parallel pair owns; `counts` are real rows of each local expert."""

    name: str
    reduction: int
    cols: int
    counts: tuple[int, ...]
    pad: int = 128

    @property
    def padded(self) -> tuple[int, ...]:
        return tuple(-(-count // self.pad) * self.pad for count in self.counts)

    @property
    def rows(self) -> int:
        return sum(self.padded)

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.reduction * self.cols

    @property
    def work(self) -> float:
        """Share of the padded rows that 128-row tiles with half-height last tiles compute."""
        halves = sum(-(-count // 64) for count in self.counts)
        return 64 * halves / max(self.rows, 1)

    @property
    def bytes(self) -> int:
        used = sum(1 for count in self.counts if count)
        return 2 * (used * self.reduction * self.cols + self.rows * (self.reduction + self.cols))


def routed(
    name: str, reduction: int, cols: int, experts: int, top_k: int, tokens: int, seed: int = 0
) -> Shape:
    """Uniform top-k routing of `tokens` a rank over two ranks; the first half of the experts is local."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    picks = torch.rand(2 * tokens, experts, generator=generator).topk(top_k, dim=1).indices
    counts = torch.bincount(picks.flatten(), minlength=experts)[: experts // 2]
    return Shape(name, reduction, cols, tuple(counts.tolist()))


def timed_shapes() -> list[Shape]:
    return [
        routed("4096x3072 e64 t512", 4096, 3072, 64, 8, 512),
        routed("4096x3072 e64 t2048", 4096, 3072, 64, 8, 2048),
        routed("7168x2048 e64 t2048", 7168, 2048, 64, 8, 2048),
        routed("2048x768 e128 t2048", 2048, 768, 128, 8, 2048),
    ]


def checked_shapes(row_block: int) -> list[Shape]:
    edge = (0, 1, row_block - 1, row_block, row_block + 1, row_block // 2, row_block // 2 + 1, 300)
    return [
        Shape("edges", 192, 768, edge),
        Shape("edges, ragged columns", 320, 328, edge),
        Shape("one hot, empty others", 2880, 640, (0, 1000, 0, 0, 3, 0)),
        Shape("one expert only", 128, 1536, (517,)),
        Shape("fewer steps than stages", 64, 512, edge),
        Shape("more experts than a window", 128, 256, tuple((7 * e) % 150 for e in range(77))),
        Shape("nothing", 128, 256, (0, 0)),
    ]
