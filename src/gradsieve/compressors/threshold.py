"""Hard threshold: the sparsifier of least total error for a whole run's budget."""

import math
from dataclasses import dataclass
from typing import ClassVar

from gradsieve import ops
from gradsieve.compressors.base import check_number
from gradsieve.types import Pending, Segments, Sparse, Turn


@dataclass(frozen=True)
class HardThreshold:
    """Keep ``abs(p) >= threshold`` (Sahu et al. 2021, Definition 3: an absolute compressor, kappa^2 = d threshold^2).

    The number kept follows the gradient: many while it is large, few when it is small. The rule looks at one
    coordinate at a time, so scope changes nothing.

    >>> HardThreshold(0.005)
    HardThreshold(threshold=0.005)
    """

    threshold: float
    elementwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_number("threshold", self.threshold, 0.0, math.inf, "a number of at least 0")

    def slots(self, segments: Segments) -> int | None:
        return segments.size if self.threshold == 0 else None

    def __call__(self, pending: Pending, turn: Turn) -> Sparse:
        return ops.of(pending.grad_Ln).threshold(pending, float(self.threshold))
