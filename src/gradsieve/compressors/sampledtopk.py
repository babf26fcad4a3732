"""Sampled top-k: a threshold from a small sample, as in Deep Gradient Compression."""

from dataclasses import dataclass

from gradsieve import ops
from gradsieve.compressors.base import check_density, k_by_segment
from gradsieve.types import Pending, Segments, Sparse, Turn


@dataclass(frozen=True)
class SampledTopK:
    """Keep ``abs(p) > t`` with t the matching quantile of a strided sample (Lin et al. 2018).

    t is adapted until at least 0.8 k survive; of more than 1.3 k the exact top k are taken. The sample's start
    moves from step to step, so that no coordinate is always or never in it.

    >>> SampledTopK(0.001)
    SampledTopK(density=0.001, sample=0.01)
    """

    density: float
    sample: float = 0.01

    def __post_init__(self) -> None:
        check_density(self.density)
        check_density(self.sample, "sample")

    def slots(self, segments: Segments) -> int | None:
        return segments.size if self.density == 1 else None

    def __call__(self, pending: Pending, turn: Turn) -> Sparse:
        stride = max(1, round(1 / self.sample))
        k_S = k_by_segment(self.density, pending.segments)
        return ops.of(pending.grad_Ln).sampledk(pending, k_S, stride, turn.step % stride)
