"""Random-k: k coordinates drawn uniformly, whatever they hold."""

from dataclasses import dataclass

from gradsieve import ops
from gradsieve.compressors.base import check_density, check_integer, k_by_segment, keys_LS
from gradsieve.types import Pending, Segments, Sparse, Turn


@dataclass(frozen=True)
class RandomK:
    """Keep k distinct coordinates of each segment, uniform, drawn anew each step by (seed, parameter, step).

    Under ``exchange="allreduce"`` all workers draw the same coordinates; otherwise the rank enters the draw too.

    >>> RandomK(0.01)
    RandomK(density=0.01, seed=0)
    """

    density: float
    seed: int = 0

    def __post_init__(self) -> None:
        check_density(self.density)
        check_integer("seed", self.seed, 0)

    def slots(self, segments: Segments) -> int:
        return sum(k_by_segment(self.density, segments))

    def __call__(self, pending: Pending, turn: Turn) -> Sparse:
        segments = pending.segments
        keys = keys_LS(self.seed, segments, turn, pending.grad_Ln.shape[0])
        return ops.of(pending.grad_Ln).randomk(pending, k_by_segment(self.density, segments), keys)
