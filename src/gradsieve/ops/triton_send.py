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
    after_the_last,
    empty,
    key_of,
    list_of,
    nearest,
    on_the_wire,
    reload,
    segment_of,
)

GROUP: tl.constexpr = tl.constexpr(128)  # units whose counts are summed up


@triton.jit
def groups_of(units):
    return (units + GROUP - 1) // GROUP


@triton.jit
def chosen(p, index, there, limit, bounds, table, row, segments, STEPS: tl.constexpr, SEGMENTED: tl.constexpr):
    key = key_of(p)
    if SEGMENTED:
        if STEPS == 0:
            at = table + row * FIELDS
            age = NEWEST - index
        else:
            s = segment_of(bounds, tl.where(there, index, 0), segments, STEPS)
            at = table + (row * segments + s) * FIELDS
            age = NEWEST - (index - tl.load(bounds + s).to(tl.int32))
        edge = tl.load(at + LIMIT)
        return there & ((key > edge) | ((key == edge) & (age >= tl.load(at + AGE))))
    return there & (key > limit)


@triton.jit
def unit_words(words, row, unit, tiles, UNIT: tl.constexpr):
    """The tiles of a unit and their words."""
    tile = unit * UNIT + tl.arange(0, UNIT)
    return tile, tl.load(words + row * tiles + tile, mask=tile < tiles, other=0)


@triton.jit
def places(tile, word, row, n, lists, cap):
    """Where each tile's candidates lie (negative: it is unlisted), and how many."""
    place = list_of(tile, (word >> 10) & 3, row, lists).to(tl.int64) * cap + (word >> 12)
    size = tl.where(word < 0, tl.minimum(n - tile * TILE, TILE), word & 1023)
    return tl.where(word < 0, -1, place), size


@triton.jit
def listed(list_p, list_at, place, size, i, WIDTH: tl.constexpr):
    """Candidates i to i + WIDTH of each tile: p, coordinate, and which there are."""
    j = i + tl.arange(0, WIDTH)[None, :]
    there = (j < size[:, None]) & (place >= 0)[:, None]
    at = place[:, None] + j
    return tl.load(list_p + at, mask=there, other=0.0), tl.load(list_at + at, mask=there, other=0), there


@triton.jit
def unlisted(grad, memory, decay, gain, bad, tile, place, size, i, WIDTH: tl.constexpr):
    """Coordinates i to i + WIDTH of each tile that is unlisted, likewise."""
    j = i + tl.arange(0, WIDTH)[None, :]
    there = (j < size[:, None]) & (place < 0)[:, None]
    index = tile[:, None] * TILE + j
    return reload(memory, grad, index, there, decay, gain, bad), index, there


@triton.jit
def weed(
    bounds, table, list_p, list_at, row, place, size, segments, i, found, STEPS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Move the chosen of these candidates to the front of their tile's; says how many each tile has so far."""
    p, index, there = listed(list_p, list_at, place, size, i, WIDTH)
    one = chosen(p, index, there, 0, bounds, table, row, segments, STEPS, True).to(tl.int32)
    at = (place + found)[:, None] + tl.cumsum(one, 1) - one
    tl.debug_barrier()  # all are read before any is moved
    tl.store(list_p + at, p, mask=one > 0)
    tl.store(list_at + at, index, mask=one > 0)
    return found + tl.sum(one, 1)


@triton.jit
def count_unlisted(
    grad, memory, decay, gain, limit, bounds, table, bad, row, tile, place, size, segments,
    STEPS: tl.constexpr, SEGMENTED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """How many are chosen in each tile that is unlisted."""
    found = size * 0
    for i in range(0, TILE, WIDTH):
        p, index, there = unlisted(grad, memory, decay, gain, bad, tile, place, size, i, WIDTH)
        found += tl.sum(chosen(p, index, there, limit, bounds, table, row, segments, STEPS, SEGMENTED).to(tl.int32), 1)
    return found


@triton.jit(do_not_specialize=PLAIN)
def count(
    grad, memory, grad_stride, memory_stride, n, decay, gain,
    bounds, table, words, list_p, list_at, nonfinite, per_unit, per_group,
    segments, lists, cap, tiles, blocks,
    STEPS: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr, DENSE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """How many are chosen in each unit; of the candidates only those stay in the lists."""
    after_the_last(EARLY)
    unit = tl.program_id(0)
    row = tl.program_id(1)
    tile, word = unit_words(words, row, unit, tiles, UNIT)
    place, size = places(tile, word, row, n, lists, cap)
    most = tl.max(tl.where(place < 0, 0, size))
    found = size * 0
    if most <= WIDE:
        found = weed(bounds, table, list_p, list_at, row, place, size, segments, 0, found, STEPS, WIDE)
    else:
        for i in range(0, most, DENSE):
            found = weed(bounds, table, list_p, list_at, row, place, size, segments, i, found, STEPS, DENSE)
    tl.store(words + row * tiles + tile, word - size + found, mask=(place >= 0) & (tile < tiles))
    if tl.min(place) < 0:
        grad += row.to(tl.int64) * grad_stride
        memory += row.to(tl.int64) * memory_stride
        found += count_unlisted(
            grad, memory, decay, gain, 0, bounds, table, tl.load(nonfinite + row), row, tile, place, size, segments,
            STEPS, True, DENSE,
        )  # fmt: skip
    tl.store(per_unit + row * tl.num_programs(0) + unit, tl.sum(found))
    tl.atomic_add(per_group + row * groups_of(tl.num_programs(0)) + unit // GROUP, tl.sum(found), sem="relaxed")


@triton.jit(do_not_specialize=["units"])
def groups(per_unit, per_group, units, EARLY: tl.constexpr):
    """How many are sent of each group. Not the sieve's: its programs would all wait for the same counter."""
    after_the_last(EARLY)
    group = tl.program_id(0)
    row = tl.program_id(1)
    unit = group * GROUP + tl.arange(0, GROUP)
    count = tl.load(per_unit + row * units + unit, mask=unit < units, other=0)
    tl.store(per_group + row * tl.num_programs(0) + group, tl.sum(count))


@triton.jit
def put(p, index, hit, slot, memory, offsets, values, slots, taken, LARGEST: tl.constexpr):
    """Send p from this slot, as far as there are slots, and leave the rounding in the memory.

    Where ``taken`` the memory already has it, and gets p back if there is no slot.
    """
    room = slot < slots
    sent = on_the_wire(p, values.dtype.element_ty, LARGEST)
    tl.store(values + slot, sent, mask=hit & room)
    tl.store(offsets + slot, (index & 0xFFFF).to(tl.int16), mask=hit & room)
    left = tl.where(taken, p, nearest(p - sent.to(tl.float32), memory.dtype.element_ty))
    tl.store(memory + index, left, mask=hit & (room ^ taken) & (key_of(p) < INFINITE))


@triton.jit(noinline=True)  # so that it takes no registers from the units with few
def pack_many(
    grad, memory, n, decay, gain, limit, bounds, table, words, list_p, list_at, bad, offsets, values, slots,
    row, unit, before, segments, lists, cap, tiles,
    LARGEST: tl.constexpr, STEPS: tl.constexpr, SEGMENTED: tl.constexpr, UNIT: tl.constexpr, DENSE: tl.constexpr,
):  # fmt: skip
    """A unit with a tile that has many candidates, or is unlisted."""
    tile, word = unit_words(words, row, unit, tiles, UNIT)
    place, size = places(tile, word, row, n, lists, cap)
    found = size
    if tl.min(place) < 0:
        found = tl.where(place < 0, 0, size) + count_unlisted(
            grad, memory, decay, gain, limit, bounds, table, bad, row, tile, place, size, segments, STEPS, SEGMENTED,
            DENSE,
        )  # fmt: skip
        slot = before + tl.cumsum(found) - found
        for i in range(0, TILE, DENSE):
            p, index, there = unlisted(grad, memory, decay, gain, bad, tile, place, size, i, DENSE)
            one = chosen(p, index, there, limit, bounds, table, row, segments, STEPS, SEGMENTED).to(tl.int32)
            at = slot[:, None] + tl.cumsum(one, 1) - one
            put(p, index, one > 0, at, memory, offsets, values, slots, one < 0, LARGEST)
            slot += tl.sum(one, 1)
    begin = before + tl.cumsum(found) - found
    for i in range(0, tl.max(tl.where(place < 0, 0, size)), DENSE):
        p, index, there = listed(list_p, list_at, place, size, i, DENSE)
        at = begin[:, None] + i + tl.arange(0, DENSE)[None, :]
        put(p, index, there, at, memory, offsets, values, slots, there & (SEGMENTED == 0), LARGEST)


@triton.jit(do_not_specialize=PLAIN)
def pack(
    grad, memory, grad_stride, memory_stride, n, decay, gain, limit,
    bounds, table, words, list_p, list_at, nonfinite, per_unit, per_group,
    counts, offsets, values, wanted, nonfinite_out,
    counts_stride, offsets_stride, values_stride, wanted_stride, bad_stride, slots,
    segments, lists, cap, tiles, blocks, zeros, zeros_size,
    LARGEST: tl.constexpr, STEPS: tl.constexpr, SEGMENTED: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr,
    DENSE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """What lies in the lists of one unit into its slots; the memory keeps what is not sent.

    On the way ``zeros``, the counters of the next call, are emptied.
    """
    after_the_last(EARLY)
    unit = tl.program_id(0)
    row = tl.program_id(1)
    # all that does not wait for something else is on its way before anything is looked at
    tile, word = unit_words(words, row, unit, tiles, UNIT)
    empty(zeros, zeros_size, UNIT)
    bad = tl.load(nonfinite + row)
    group = unit // GROUP
    near = group * GROUP + tl.arange(0, GROUP)
    units = tl.load(per_unit + row * tl.num_programs(0) + near, mask=near < tl.num_programs(0), other=0)
    per_group += row * groups_of(tl.num_programs(0))
    far = tl.arange(0, GROUP)
    groups = tl.load(per_group + far, mask=far < group, other=0)
    place, size = places(tile, word, row, n, lists, cap)
    few = tl.max(tl.where(place < 0, TILE, size)) <= WIDE
    p, index, there = listed(list_p, list_at, place, tl.where(few, size, 0), 0, WIDE)
    before = tl.sum(groups) + tl.sum(tl.where(near < unit, units, 0))
    for i in range(GROUP, group, GROUP):
        before += tl.sum(tl.load(per_group + i + far, mask=i + far < group, other=0))
    block = unit // (TILES // UNIT)
    if unit % (TILES // UNIT) == 0:
        upto = before + tl.sum(tl.where(near // (TILES // UNIT) == block, units, 0))
        tl.store(counts + row.to(tl.int64) * counts_stride + block, tl.minimum(upto, slots) - tl.minimum(before, slots))
        if block == blocks - 1:
            tl.store(wanted + row.to(tl.int64) * wanted_stride, upto)
            tl.store(nonfinite_out + row.to(tl.int64) * bad_stride, bad)
    memory += row.to(tl.int64) * memory_stride
    offsets += row.to(tl.int64) * offsets_stride
    values += row.to(tl.int64) * values_stride
    if few:
        slot = (before + tl.cumsum(size) - size)[:, None] + tl.arange(0, WIDE)[None, :]
        put(p, index, there, slot, memory, offsets, values, slots, there & (SEGMENTED == 0), LARGEST)
    else:
        grad += row.to(tl.int64) * grad_stride
        pack_many(
            grad, memory, n, decay, gain, limit, bounds, table, words, list_p, list_at, bad, offsets, values, slots,
            row, unit, before, segments, lists, cap, tiles, LARGEST, STEPS, SEGMENTED, UNIT, DENSE,
        )  # fmt: skip


@triton.jit(do_not_specialize=PLAIN)
def running(counts, ends, counts_stride, blocks, WIDTH: tl.constexpr, EARLY: tl.constexpr):
    """Where the elements of each block end among their worker's slots."""
    after_the_last(EARLY)
    row = tl.program_id(0)
    total = 0
    for i in range(0, blocks, WIDTH):
        block = i + tl.arange(0, WIDTH)
        count = tl.load(counts + row.to(tl.int64) * counts_stride + block, mask=block < blocks, other=0)
        tl.store(ends + row * blocks + block, total + tl.cumsum(count), mask=block < blocks)
        total += tl.sum(count)
