"""No sparsification: everything is sent."""

from dataclasses import dataclass
from typing import ClassVar

from gradsieve import ops
from gradsieve.types import Pending, Segments, Sparse, Turn


@dataclass(frozen=True)
class Dense:
    """Send all of ``p``: plain data-parallel training, the yardstick of every comparison.

    >>> Dense()
    Dense()
    """

    elementwise: ClassVar[bool] = True

    def slots(self, segments: Segments) -> int:
        return segments.size

    def __call__(self, pending: Pending, turn: Turn) -> Sparse:
        return ops.of(pending.grad_Ln).threshold(pending, 0.0)
