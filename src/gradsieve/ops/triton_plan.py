"""What a rule knows ahead of the data, as tensors on the device, made once a layout.

L workers, n coordinates, S segments, B blocks, K slots (see ``types``).
"""

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import accumulate
from statistics import NormalDist

import torch
from torch import Tensor

from gradsieve.types import BLOCK, Pending, Segments

MOST_SAMPLES = 32_768  # of a segment: what one program holds in registers
LEAST_SAMPLES = 2_048
SPARSE = 256  # coordinates of a large segment for each sample


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def constant(values: Iterable[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Waits until it is there: whatever stream uses it later need not know which one made it."""
    return torch.tensor(list(values), dtype=dtype, device=device)


@dataclass(frozen=True)
class Sampling:
    """One of every ``strides[s]`` coordinates of segment s, whose ``ranks[s]``-th largest value hardly ever exceeds the
    segment's ``wants[s]``-th. With ``exact``, for who wants no more than that: where the sample is all of a segment, it
    is that value, and not one that may lie orders of magnitude below."""

    segments: Segments
    strides: tuple[int, ...]
    wants: tuple[int, ...]
    device: torch.device
    exact: bool = False

    @cached_property
    def sizes(self) -> list[int]:
        return [cdiv(size, step) for size, step in zip(self.segments.sizes, self.strides, strict=True)]

    @cached_property
    def total(self) -> int:
        return sum(self.sizes)

    @cached_property
    def bounds_S(self) -> Tensor:
        return constant(accumulate(self.sizes, initial=0), torch.int64, self.device)

    @cached_property
    def strides_S(self) -> Tensor:
        return constant(self.strides, torch.int64, self.device)

    @cached_property
    def ranks(self) -> list[int]:
        """Four standard deviations on the safe side of k over the stride."""
        means = [k / step for k, step in zip(self.wants, self.strides, strict=True)]
        safe = [math.ceil(mean + 4 * math.sqrt(mean) + 4) if mean else 0 for mean in means]
        if not self.exact:
            return safe
        return [k if step == 1 else rank for k, step, rank in zip(self.wants, self.strides, safe, strict=True)]

    @cached_property
    def ranks_S(self) -> Tensor:
        return constant(self.ranks, torch.int32, self.device)

    @cached_property
    def candidates(self) -> int:
        """What hardly ever exceeds those floors. Neighbours of a sample are alike, so it tells less than its size."""
        triples = zip(self.ranks, self.strides, self.segments.sizes, strict=True)
        return sum(
            min(size, math.ceil((rank + max(3 * math.sqrt(rank), rank / 4)) * step)) for rank, step, size in triples
        )

    @property
    def width(self) -> int:
        return max(1 << (max(self.sizes) - 1).bit_length(), 256)

    @property
    def groups(self) -> int:
        """Of samples, so many that those above a floor are nearly all in different ones."""
        return min(max(1 << (16 * max(self.ranks) - 1).bit_length(), 1024), self.width)


@dataclass(frozen=True)
class Plan:
    """What ``k_S`` coordinates of each segment mean."""

    segments: Segments
    k: tuple[int, ...]
    device: torch.device

    @staticmethod
    def of(pending: Pending, k_S: tuple[int, ...]) -> "Plan":
        plan = _plan(pending.segments, tuple(k_S), pending.grad_Ln.device)
        if plan.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return _captured.setdefault(plan, plan)
        return plan

    @cached_property
    def clipped(self) -> tuple[int, ...]:
        return tuple(min(k, size) for k, size in zip(self.k, self.segments.sizes, strict=True))

    @cached_property
    def total(self) -> int:
        return sum(self.clipped)

    @cached_property
    def k_S(self) -> Tensor:
        return constant(self.clipped, torch.int32, self.device)

    @cached_property
    def firsts_S(self) -> Tensor:
        return constant(accumulate(self.clipped, initial=0), torch.int64, self.device)

    @cached_property
    def half_S(self) -> Tensor:
        """Half the bits of the power of four that ``rng.permute`` permutes."""
        half = [(max(size - 1, 1).bit_length() + 1) // 2 for size in self.segments.sizes]
        return constant(half, torch.int32, self.device)

    @cached_property
    def sampling(self) -> Sampling:
        samples = (min(max(size // SPARSE, LEAST_SAMPLES), MOST_SAMPLES) for size in self.segments.sizes)
        strides = tuple(max(cdiv(n, most), 1) for n, most in zip(self.segments.sizes, samples, strict=True))
        return Sampling(self.segments, strides, self.clipped, self.device)

    @cached_property
    def exact_sampling(self) -> Sampling:
        return replace(self.sampling, exact=True)

    @cached_property
    def known_bands(self) -> dict[tuple[float, float], Tensor]:
        return {}

    def bands(self, low: float, high: float) -> Tensor:
        """A segment: low * k, high * k, log k, log size, and the quantile that a Gaussian exceeds k times."""
        if (low, high) not in self.known_bands:
            rows = []
            for k, size in zip(self.k, self.segments.sizes, strict=True):
                z = NormalDist().inv_cdf(1 - k / size / 2) if 0 < k < size else 0.0
                rows.append([low * k, high * k, math.log(max(k, 1)), math.log(max(size, 1)), z])
            self.known_bands[low, high] = constant(rows, torch.float64, self.device)
        return self.known_bands[low, high]


@lru_cache(maxsize=4096)  # an owner's k is another one in every step
def _plan(segments: Segments, k: tuple[int, ...], device: torch.device) -> Plan:
    return Plan(segments, k, device)


_captured: dict[Plan, Plan] = {}
"""A captured graph reads its plan's tensors at every replay."""


@cache  # a captured graph reads them again
def bounds_of(segments: Segments, device: torch.device) -> Tensor:
    return constant(segments.bounds, torch.int64, device)


@cache
def first_segments(segments: Segments, device: torch.device) -> Tensor:
    """The segment in which each block starts, and the last."""
    starts = [bisect_right(segments.bounds, start) - 1 for start in range(0, segments.size, BLOCK)]
    return constant([*starts, len(segments.sizes) - 1], torch.int32, device)
