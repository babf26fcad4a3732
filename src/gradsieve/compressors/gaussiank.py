"""Gaussian-k: a threshold from the mean and the spread, as if p were Gaussian."""

from dataclasses import dataclass

from gradsieve import ops
from gradsieve.compressors.base import check_density, k_by_segment
from gradsieve.types import Pending, Segments, Sparse, Turn


@dataclass(frozen=True)
class GaussianK:
    """Keep ``abs(p) > t``, ``t = abs(mean) + std * ppf(1 - density / 2)`` (Shi et al. 2019), refined to about k.

    Refined until the count is within [2/3, 4/3] of k, four times at most. Refinements bracket t and follow log(count),
    so a tail heavier than Gaussian does not overshoot; a first step on one that ends abruptly may keep several k.

    >>> GaussianK(0.001)
    GaussianK(density=0.001)
    """

    density: float

    def __post_init__(self) -> None:
        check_density(self.density)

    def slots(self, segments: Segments) -> int | None:
        return segments.size if self.density == 1 else None

    def __call__(self, pending: Pending, turn: Turn) -> Sparse:
        return ops.of(pending.grad_Ln).gaussiank(pending, k_by_segment(self.density, pending.segments))
