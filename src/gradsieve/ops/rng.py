"""Counter-based randomness: the same draw on every device, no generator state, no global seed touched."""

import hashlib

import torch
from torch import Tensor

_MASK32 = 0xFFFFFFFF
ROUNDS = 6


def key_of(*parts: int | str) -> int:
    """A 31-bit key that depends on every part and on nothing else."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") & 0x7FFFFFFF


def mix32(x: Tensor) -> Tensor:
    """Murmur3's finaliser on 32-bit values held in int64."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B & _MASK32
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & _MASK32
    return x ^ (x >> 16)


def permute(slot: Tensor, size: Tensor, key: Tensor) -> Tensor:
    """Position of ``slot`` under a keyed pseudo-random permutation of ``range(size)``; all int64, elementwise.

    A Feistel network permutes the power of four above ``size``; a result outside is permuted again until it
    falls inside (cycle walking), which keeps the map a bijection.
    """
    half = (((size - 1).clamp(min=1).double().log2().floor().long() + 1) + 1) // 2
    mask = (torch.ones_like(half) << half) - 1
    out = slot.clone()
    outside = torch.ones_like(slot, dtype=torch.bool)
    while bool(outside.any()):
        left, right = out >> half, out & mask
        for r in range(ROUNDS):
            left, right = right, left ^ (mix32(right + key + r * 0x9E3779B9 & _MASK32) & mask)
        out = torch.where(outside, (left << half) | right, out)
        outside = out >= size
    return out
