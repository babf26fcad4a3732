"""Kernels that put what was chosen into its slots, in index order.

Chosen is what a sieve took (``key > limit``), or what lies above its segment's limit, or at it and old enough.
"""

import triton
import triton.language as tl

from gradsieve.ops.triton_sieve import (
    AGE,
    FIELDS,
    INFINITE,
    LIMIT,
    NEWEST,
    PLAIN,
    TILE,
    TILES,
    UNIT,
    key_of,
    on_the_wire,
    reload,
    segment_of,
)

WIDE: tl.constexpr = tl.constexpr(4)  # candidates of each tile of a unit that are read at a time
MANY: tl.constexpr = tl.constexpr(16)  # a tile with more is read alone, as is one that is unlisted
PIECE: tl.constexpr = tl.constexpr(128)  # of a tile that is read alone


@triton.jit
def chosen(p, index, there, limit, bounds, table, row, segments, STEPS: tl.constexpr, SEGMENTED: tl.constexpr):
    key = key_of(p)
    if SEGMENTED:
        s = segment_of(bounds, tl.where(there, index, 0), segments, STEPS)
        at = table + (row * segments + s) * FIELDS
        edge = tl.load(at + LIMIT)
        age = NEWEST - (index - tl.load(bounds + s).to(tl.int32))
        return there & ((key > edge) | ((key == edge) & (age >= tl.load(at + AGE))))
    return there & (key > limit)


@triton.jit
def entries(list_p, list_at, row, tile, start, size, i, lists, cap):
    """Candidates i to i + WIDE of each tile: p, coordinate, and which there are."""
    j = i + tl.arange(0, WIDE)[None, :]
    there = j < size[:, None]
    at = ((row * lists + tile % lists).to(tl.int64) * cap + start)[:, None] + j
    return tl.load(list_p + at, mask=there, other=0.0), tl.load(list_at + at, mask=there, other=0), there


@triton.jit
def unit_words(words, row, unit, tiles):
    """Where each tile of a unit keeps its candidates: its number, its place in its list, how many; is it read alone."""
    tile = unit * UNIT + tl.arange(0, UNIT)
    word = tl.load(words + row * tiles + tile, mask=tile < tiles, other=0)
    size = tl.where(word < 0, 0, word & 1023)
    return tile, word >> 10, size, (word < 0) | (size > MANY)


@triton.jit
def piece(
    grad, memory, n, decay, gain, bad, list_p, list_at, row, tile, start, size, i, lists, cap
):  # fmt: skip
    """Candidates i to i + PIECE of one tile, or its coordinates where it is unlisted."""
    j = i + tl.arange(0, PIECE)
    if size > 0:
        at = (row * lists + tile % lists).to(tl.int64) * cap + start + j
        there = j < size
        p = tl.load(list_p + at, mask=there, other=0.0)
        index = tl.load(list_at + at, mask=there, other=0)
    else:
        index = tile * TILE + j
        there = index < n
        p = reload(memory, grad, index, there, decay, gain, bad)
    return p, index, there


@triton.jit
def taken(
    grad, memory, n, decay, gain, limit, bounds, table, list_p, list_at, bad, tile, start, size, alone,
    row, segments, lists, cap, STEPS: tl.constexpr, SEGMENTED: tl.constexpr,
):  # fmt: skip
    """How many are chosen in each tile of a unit."""
    count = size
    if SEGMENTED:
        count = size * 0
        few = tl.where(alone, 0, size)
        for i in range(0, tl.max(few), WIDE):
            p, index, there = entries(list_p, list_at, row, tile, start, few, i, lists, cap)
            hit = chosen(p, index, there, limit, bounds, table, row, segments, STEPS, SEGMENTED)
            count += tl.sum(hit.to(tl.int32), 1)
    end = tl.max(tile) + 1
    left = tl.where(alone, tile, end)
    one = tl.min(left)
    while one < end:
        start1 = tl.sum(tl.where(tile == one, start, 0))
        size1 = tl.sum(tl.where(tile == one, size, 0))
        found = 0
        for i in range(0, tl.where(size1 > 0, size1, TILE), PIECE):
            p, index, there = piece(
                grad, memory, n, decay, gain, bad, list_p, list_at, row, one, start1, size1, i, lists, cap
            )  # fmt: skip
            hit = chosen(p, index, there, limit, bounds, table, row, segments, STEPS, SEGMENTED)
            found += tl.sum(hit.to(tl.int32))
        count = tl.where(tile == one, found, count)
        left = tl.where(left == one, end, left)
        one = tl.min(left)
    return count


@triton.jit(do_not_specialize=PLAIN)
def count(
    grad, memory, grad_stride, memory_stride, n, decay, gain,
    bounds, table, words, list_p, list_at, nonfinite, chosen_LU,
    segments, lists, cap, tiles, blocks,
    STEPS: tl.constexpr,
):  # fmt: skip
    """How many are chosen in each unit."""
    unit = tl.program_id(0)
    row = tl.program_id(1)
    tile, start, size, alone = unit_words(words, row, unit, tiles)
    found = taken(
        grad + row.to(tl.int64) * grad_stride, memory + row.to(tl.int64) * memory_stride, n, decay, gain, 0, bounds,
        table, list_p, list_at, tl.load(nonfinite + row), tile, start, size, alone, row, segments, lists,
        cap, STEPS, True,
    )  # fmt: skip
    tl.store(chosen_LU + row * tl.num_programs(0) + unit, tl.sum(found))


@triton.jit
def put(p, index, hit, slot, memory, offsets, values, slots, LARGEST: tl.constexpr, TAKEN: tl.constexpr):
    """Send p from this slot, as far as there are slots, and leave the rounding in the memory.

    TAKEN: the memory already has it, and gets p back where there is no slot.
    """
    room = hit & (slot < slots)
    sent = on_the_wire(p, values.dtype.element_ty, LARGEST)
    tl.store(values + slot, sent, mask=room)
    tl.store(offsets + slot, (index & 0xFFFF).to(tl.int16), mask=room)
    finite = key_of(p) < INFINITE
    if TAKEN:
        tl.store(memory + index, p, mask=hit & (slot >= slots) & finite)
    else:
        tl.store(memory + index, p - sent.to(tl.float32), mask=room & finite)


@triton.jit(do_not_specialize=PLAIN)
def pack(
    grad, memory, grad_stride, memory_stride, n, decay, gain, limit,
    bounds, table, words, list_p, list_at, nonfinite, chosen_LU, ends_LB,
    counts, offsets, values, wanted, nonfinite_out,
    counts_stride, offsets_stride, values_stride, wanted_stride, bad_stride, slots,
    segments, lists, cap, tiles, blocks,
    LARGEST: tl.constexpr, STEPS: tl.constexpr, SEGMENTED: tl.constexpr,
):  # fmt: skip
    """The chosen of one unit into their slots; the memory keeps what is not sent."""
    unit = tl.program_id(0)
    row = tl.program_id(1)
    block = unit // (TILES // UNIT)
    tile, start, size, alone = unit_words(words, row, unit, tiles)
    near = block * (TILES // UNIT) + tl.arange(0, TILES // UNIT)
    units = tl.load(chosen_LU + row * tl.num_programs(0) + near)
    upto = tl.load(ends_LB + row * blocks + block)
    bad = tl.load(nonfinite + row)
    before = upto - tl.sum(tl.where(near >= unit, units, 0))
    mine = tl.sum(tl.where(near == unit, units, 0))
    if unit % (TILES // UNIT) == 0:
        tl.store(counts + row * counts_stride + block, tl.minimum(upto, slots) - tl.minimum(before, slots))
        if block == blocks - 1:
            tl.store(wanted + row * wanted_stride, upto)
            tl.store(nonfinite_out + row * bad_stride, bad)
    if (mine > 0) & ((before < slots) | (SEGMENTED == 0)):
        grad += row.to(tl.int64) * grad_stride
        memory += row.to(tl.int64) * memory_stride
        offsets += row.to(tl.int64) * offsets_stride
        values += row.to(tl.int64) * values_stride
        count = taken(
            grad, memory, n, decay, gain, limit, bounds, table, list_p, list_at, bad, tile, start, size, alone, row,
            segments, lists, cap, STEPS, SEGMENTED,
        )  # fmt: skip
        first = before + tl.cumsum(count) - count
        slot = first
        few = tl.where(alone, 0, size)
        for i in range(0, tl.max(few), WIDE):
            p, index, there = entries(list_p, list_at, row, tile, start, few, i, lists, cap)
            one = chosen(p, index, there, limit, bounds, table, row, segments, STEPS, SEGMENTED).to(tl.int32)
            rank = slot[:, None] + tl.cumsum(one, 1) - one
            put(p, index, one > 0, rank, memory, offsets, values, slots, LARGEST, SEGMENTED == 0)
            slot += tl.sum(one, 1)
        end = tl.max(tile) + 1
        left = tl.where(alone, tile, end)
        at = tl.min(left)
        while at < end:
            start1 = tl.sum(tl.where(tile == at, start, 0))
            size1 = tl.sum(tl.where(tile == at, size, 0))
            begin = tl.sum(tl.where(tile == at, first, 0))
            for i in range(0, tl.where(size1 > 0, size1, TILE), PIECE):
                p, index, there = piece(
                    grad, memory, n, decay, gain, bad, list_p, list_at, row, at, start1, size1, i, lists, cap
                )  # fmt: skip
                one = chosen(p, index, there, limit, bounds, table, row, segments, STEPS, SEGMENTED).to(tl.int32)
                rank = begin + tl.cumsum(one) - one
                if (SEGMENTED == 0) & (size1 > 0):
                    put(p, index, one > 0, rank, memory, offsets, values, slots, LARGEST, True)
                else:
                    put(p, index, one > 0, rank, memory, offsets, values, slots, LARGEST, False)
                begin += tl.sum(one)
            left = tl.where(left == at, end, left)
            at = tl.min(left)


@triton.jit(do_not_specialize=PLAIN)
def running(counts, ends, counts_stride, blocks, WIDTH: tl.constexpr, UNITS: tl.constexpr):
    """Where the elements of each block, which has UNITS counts, end among their worker's slots."""
    row = tl.program_id(0)
    total = 0
    for i in range(0, blocks, WIDTH):
        block = i + tl.arange(0, WIDTH)
        at = block[:, None] * UNITS + tl.arange(0, UNITS)[None, :]
        count = tl.sum(tl.load(counts + row * counts_stride + at, mask=(block < blocks)[:, None], other=0), 1)
        tl.store(ends + row * blocks + block, total + tl.cumsum(count), mask=block < blocks)
        total += tl.sum(count)
