"""Kernels for coordinates that are known ahead: draw them, and send what the memory holds there."""

import triton
import triton.language as tl

from gradsieve.ops.triton_select import mixed
from gradsieve.ops.triton_send import put
from gradsieve.ops.triton_sieve import PLAIN, reload, segment_of


@triton.jit(do_not_specialize=PLAIN)
def place(
    grad, memory, grad_stride, memory_stride, decay, gain, index_LK, kept, nonfinite,
    offsets, values, wanted, nonfinite_out, offsets_stride, values_stride, wanted_stride, bad_stride, slots,
    LARGEST: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Send the given coordinates, sorted, from a memory that holds p."""
    row = tl.program_id(1)
    slot = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    hit = slot < kept
    index = tl.load(index_LK + row.to(tl.int64) * kept + slot, mask=hit, other=0)
    grad += row.to(tl.int64) * grad_stride
    memory += row.to(tl.int64) * memory_stride
    bad = tl.load(nonfinite + row)
    p = reload(memory, grad, index, hit, decay, gain, bad)
    offsets += row.to(tl.int64) * offsets_stride
    values += row.to(tl.int64) * values_stride
    put(p, index, hit, slot, memory, offsets, values, slots, slot < 0, LARGEST)
    if tl.program_id(0) == 0:
        tl.store(wanted + row.to(tl.int64) * wanted_stride, kept)
        tl.store(nonfinite_out + row.to(tl.int64) * bad_stride, bad)


@triton.jit(do_not_specialize=PLAIN)
def place_counts(index_LK, kept, counts, counts_stride, slots, blocks, STEPS: tl.constexpr):
    """How many of the sorted coordinates each block holds, as far as there are slots."""
    row = tl.program_id(1)
    block = tl.program_id(0) * 128 + tl.arange(0, 128)
    index_LK += row.to(tl.int64) * kept
    below = tl.zeros([128], tl.int32)
    upto = tl.zeros([128], tl.int32)
    for edge in tl.static_range(2):
        low = tl.zeros([128], tl.int32)
        high = low + kept
        for _ in tl.static_range(STEPS):
            middle = (low + high) // 2
            more = low < high
            less = more & (tl.load(index_LK + middle, mask=more, other=0) // 65536 < block + edge)
            low = tl.where(less, middle + 1, low)
            high = tl.where(more & (less ^ True), middle, high)
        if edge == 0:
            below = tl.minimum(low, slots)
        else:
            upto = tl.minimum(low, slots)
    tl.store(counts + row.to(tl.int64) * counts_stride + block, upto - below, mask=block < blocks)


@triton.jit(do_not_specialize=PLAIN)
def draw(
    index_LK, keys_LS, firsts, bounds, half, kept, segments, STEPS: tl.constexpr, ROUNDS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """``rng.permute`` of the first k slots of each segment."""
    row = tl.program_id(1)
    slot = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    there = slot < kept
    s = segment_of(firsts, tl.where(there, slot, 0), segments, STEPS)
    start = tl.load(bounds + s)
    size = (tl.load(bounds + s + 1) - start).to(tl.uint32)
    key = tl.load(keys_LS + row * segments + s).to(tl.uint32)
    bits = tl.load(half + s).to(tl.uint32)
    mask = (1 << bits) - 1
    out = tl.where(there, slot - tl.load(firsts + s), 0).to(tl.uint32)
    outside = there
    while tl.max(outside.to(tl.int32)) != 0:
        left = out >> bits
        right = out & mask
        for r in tl.static_range(ROUNDS):
            x = right + key + ((r * 0x9E3779B9) & 0xFFFFFFFF)
            x = left ^ (mixed(x) & mask)
            left = right
            right = x
        out = tl.where(outside, (left << bits) | right, out)
        outside = there & (out >= size)
    tl.store(index_LK + row.to(tl.int64) * kept + slot, (start + out.to(tl.int64)).to(tl.int32), mask=there)
