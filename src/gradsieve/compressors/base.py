"""What the rules share: checked arguments, counts from densities, keys for random draws."""

import math
from functools import lru_cache
from numbers import Real

import torch
from torch import Tensor

from gradsieve.ops.rng import mix32
from gradsieve.types import Segments, Turn


def check_number(name: str, value: object, low: float, high: float, takes: str) -> None:
    """A number in [low, high], or an error that names the argument and what it takes."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} takes {takes}, not {value!r}")
    if not low <= value <= high:  # type: ignore[operator]
        raise ValueError(f"{name} takes {takes}, not {value!r}")


def check_density(value: object, name: str = "density") -> None:
    takes = "a number above 0 and up to 1"
    check_number(name, value, 0.0, 1.0, takes)
    if value == 0:
        raise ValueError(f"{name} takes {takes}, not {value!r}")


def check_integer(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} takes a whole number of at least {low}, not {value!r}")
    if value < low:
        raise ValueError(f"{name} takes a whole number of at least {low}, not {value!r}")


def k_of(density: float, size: int) -> int:
    """``max(1, floor(density * n))``; 0 for an empty segment. The nudge keeps 0.29 * 100 at 29."""
    return min(size, max(1, math.floor(density * size * (1 + 1e-12)))) if size else 0


@lru_cache(maxsize=256)  # asked at every step, over as many segments as there are layers
def k_by_segment(density: float, segments: Segments) -> tuple[int, ...]:
    return tuple(k_of(density, size) for size in segments.sizes)


def keys_LS(seed: int, segments: Segments, turn: Turn, workers: int) -> Tensor:
    """A 31-bit key for each worker and segment at this step; the same for all workers where they share."""
    key_S = mix32(_seeded(seed, segments) + turn.step & 0xFFFFFFFF)
    if turn.ranks is None:
        return (key_S & 0x7FFFFFFF).expand(workers, -1)
    rank_L = torch.arange(turn.ranks.start, turn.ranks.stop, device="cpu").unsqueeze(1)
    return mix32(key_S + mix32(rank_L + 1) & 0xFFFFFFFF) & 0x7FFFFFFF


@lru_cache(maxsize=256)
def _seeded(seed: int, segments: Segments) -> Tensor:
    return mix32((torch.tensor(segments.keys, dtype=torch.int64, device="cpu") ^ (seed & 0xFFFFFFFF)) & 0xFFFFFFFF)
