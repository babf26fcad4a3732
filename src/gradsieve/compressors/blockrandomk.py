"""Block-random-k: one run of consecutive coordinates from a random start."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.compressors.base import check_density, check_integer, k_by_segment, keys_LS
from gradsieve.ops.ahead import sent_ahead
from gradsieve.types import Pending, Segments, Sparse, Turn


@dataclass(frozen=True)
class BlockRandomK:
    """Keep k consecutive coordinates of each segment from a uniform random start, wrapping round its end.

    Every coordinate has the same chance, the tail included (Foroutan et al. 2020). Shared and private draws as
    in random-k.

    >>> BlockRandomK(0.01, seed=7)
    BlockRandomK(density=0.01, seed=7)
    """

    density: float
    seed: int = 0

    def __post_init__(self) -> None:
        check_density(self.density)
        check_integer("seed", self.seed, 0)

    def slots(self, segments: Segments) -> int:
        return sum(k_by_segment(self.density, segments))

    def __call__(self, pending: Pending, turn: Turn) -> Sparse:
        segments, workers = pending.segments, pending.grad_Ln.shape[0]
        keys = keys_LS(self.seed, segments, turn, workers)
        index_LK = runs(segments, k_by_segment(self.density, segments), keys)
        return ops.of(pending.grad_Ln).take(pending, sent_ahead(index_LK, pending.grad_Ln.device))


def runs(segments: Segments, k_S: tuple[int, ...], keys_LS: Tensor) -> Tensor:
    """Each worker's coordinates: in every segment k in a row from ``key mod size``, wrapping."""
    segment_K, slot_K, size_K, first_K = slots_by_segment(segments, k_S)
    return keys_LS[:, segment_K].add_(slot_K).remainder_(size_K).add_(first_K)


@lru_cache(maxsize=64)
def slots_by_segment(segments: Segments, k_S: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each of the slots: its segment, its number there, and that segment's size and first coordinate."""
    k = torch.tensor(k_S, dtype=torch.int64, device="cpu")
    segment_K = torch.repeat_interleave(k)
    slot_K = torch.arange(len(segment_K), device="cpu") - (k.cumsum(0) - k)[segment_K]
    bounds = segments.tensor(torch.device("cpu"))
    return segment_K, slot_K, bounds.diff()[segment_K], bounds[segment_K]
