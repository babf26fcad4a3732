"""Exact top-k: the sparsifier of least error for one step's budget."""

from dataclasses import dataclass

from gradsieve import ops
from gradsieve.compressors.base import check_density, k_by_segment
from gradsieve.types import Pending, Segments, Sparse, Turn


@dataclass(frozen=True)
class TopK:
    """Keep the ``k = max(1, floor(density * n))`` largest ``abs(p)`` of each segment; of equals, the lowest index.

    >>> TopK(0.001)
    TopK(density=0.001)
    """

    density: float

    def __post_init__(self) -> None:
        check_density(self.density)

    def slots(self, segments: Segments) -> int:
        return sum(k_by_segment(self.density, segments))

    def __call__(self, pending: Pending, turn: Turn) -> Sparse:
        return ops.of(pending.grad_Ln).topk(pending, k_by_segment(self.density, pending.segments))
