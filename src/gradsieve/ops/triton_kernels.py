"""The kernels that touch every coordinate, sieve and resieve, and those that pack what was chosen.

A tile is 512 coordinates and one program's work; a block is 128 tiles. The sieve leaves ``p`` in the memory
and appends the tile's candidates (offset in the tile, p) to one of ``lists`` lists, tile modulo lists, so that
a gradient whose large values sit together fills all lists alike; ``words[tile]`` says where and how many.
Where a list was full the row is *dense*: later kernels read its memory instead. A magnitude is compared by its
bits (``key``): the order of non-negative floats, with infinity and NaN on top.
"""

import triton
import triton.language as tl

TILE: tl.constexpr = tl.constexpr(512)
TILES: tl.constexpr = tl.constexpr(128)  # in a block
CHUNK: tl.constexpr = tl.constexpr(2048)  # coordinates of a dense row read at a time
SUPERS: tl.constexpr = tl.constexpr(256)  # groups of 128 blocks: enough for 2**31 coordinates
SPREAD: tl.constexpr = tl.constexpr(8)  # a list's head has a memory sector to itself
REPLICAS: tl.constexpr = tl.constexpr(64)  # of the sums for the moments, against contention
INFINITE: tl.constexpr = tl.constexpr(0x7F800000)
PLAIN = [  # arguments that no version is compiled for
    "n", "floor", "limit", "segments", "lists", "cap", "tiles", "blocks", "slots", "kept", "samples", "workers",
    "counts_stride", "offsets_stride", "values_stride", "wanted_stride", "bad_stride", "before_stride",
    "quotients_stride", "first_phase", "last_phase",
]  # fmt: skip
NEWEST: tl.constexpr = tl.constexpr(0x7FFFFFFE)  # "age" of a segment's first coordinate; equals go by age


@triton.jit
def key_of(p):
    return p.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def segment_of(bounds, index, segments, STEPS: tl.constexpr):
    low = index * 0
    high = low + segments - 1
    for _ in tl.static_range(STEPS):
        middle = (low + high + 1) // 2
        right = tl.load(bounds + middle) <= index
        low = tl.where(right, middle, low)
        high = tl.where(right, high, middle - 1)
    return low


@triton.jit
def reload(memory, grad, index, inside, decay, gain, nonfinite):
    """p from a memory that already holds it, except where p is not finite: there the gradient says so."""
    p = tl.load(memory + index, mask=inside, other=0.0)
    if nonfinite > 0:
        g = tl.load(grad + index, mask=inside, other=0.0).to(tl.float32) * gain
        p = tl.where(key_of(g) < INFINITE, p, p * decay + g)
    return p


@triton.jit
def tile_index(tile, GROUPS: tl.constexpr):
    """A thread holds GROUPS runs of 4 neighbours."""
    LANES: tl.constexpr = TILE // GROUPS // 4
    place = tl.arange(0, GROUPS)[:, None, None] * (LANES * 4) + tl.arange(0, LANES)[None, :, None] * 4
    return tile * TILE + place + tl.arange(0, 4)[None, None, :]


@triton.jit
def hits(keep, GROUPS: tl.constexpr):
    """A bit for each kept coordinate of a lane: up to four groups of four neighbours."""
    weight = 1 << (tl.arange(0, GROUPS)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :])
    return tl.sum(tl.sum(tl.where(keep, weight, 0), 2), 0)


@triton.jit
def collect(
    p, mine, tile, row, heads, words, list_p, list_offset, overflow, lists, cap, tiles, GROUPS: tl.constexpr
):  # fmt: skip
    """Append the hits of one tile to its list, in index order; false where the list is full."""
    LANES: tl.constexpr = TILE // GROUPS // 4
    lane = tl.arange(0, LANES)
    pairs = mine - ((mine >> 1) & 0x5555)
    kept = (pairs & 0x3333) + ((pairs >> 2) & 0x3333)  # how many a group, in 4 bits each
    if GROUPS == 4:  # in 8 bits each, which hold the sum of 32 lanes
        kept = (kept & 0xF) | ((kept & 0xF0) << 4) | ((kept & 0xF00) << 8) | ((kept & 0xF000) << 12)
        total = tl.sum(kept)
        second = total & 0xFF
        third = second + ((total >> 8) & 0xFF)
        fourth = third + ((total >> 16) & 0xFF)
        count = fourth + ((total >> 24) & 0xFF)
        mask = 0xFF
    else:
        count = tl.sum(kept)
        second = 0
        third = 0
        fourth = 0
        mask = 0xFFFF
    line = row * lists + tile % lists
    start = tl.atomic_add(heads + line * SPREAD, count, sem="relaxed")
    place = tl.cumsum(kept) - kept
    most = tl.max((kept + (kept >> 8) + (kept >> 16) + (kept >> 24)) & 0xFF)
    weight = 1 << (tl.arange(0, GROUPS)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :])
    raw = p.to(tl.int32, bitcast=True)
    fits = start + count <= cap
    if fits:
        list_p += line.to(tl.int64) * cap + start
        list_offset += line.to(tl.int64) * cap + start
        left = mine
        for _ in range(most):
            low = left & -left
            at = tl.maximum((low.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127, 0)
            of = at >> 2
            before = (mine & (low - 1)) >> (of * 4)
            ahead = tl.where(of < 2, tl.where(of == 0, 0, second), tl.where(of == 2, third, fourth))
            rank = ahead + ((place >> (of * 8)) & mask) + before - (before >> 1) - (before >> 2)
            value = tl.sum(tl.sum(tl.where(weight == low[None, :, None], raw, 0), 2), 0)
            hit = low != 0
            tl.store(list_p + rank, value.to(tl.float32, bitcast=True), mask=hit)
            tl.store(list_offset + rank, (of * (LANES * 4) + lane * 4 + (at & 3)).to(tl.int16), mask=hit)
            left = left & (left - 1)
    else:
        tl.store(overflow + row, 1)
    tl.store(words + row * tiles + tile, tl.where(fits, start * 1024 + count, 0))
    return fits


@triton.jit
def tile_floors(floors, bounds, index, first, last, row, segments):
    """The key that a candidate exceeds, coordinate by coordinate, of a tile that segments first to last share."""
    floor = tl.zeros_like(index) + tl.load(floors + row * segments + first)
    for s in range(first + 1, last + 1):
        floor = tl.where(index >= tl.load(bounds + s), tl.load(floors + row * segments + s), floor)
    return floor


@triton.jit(do_not_specialize=PLAIN)
def sieve(
    grad, memory, grad_stride, memory_stride, n, decay, gain, floor,
    bounds, floors, heads, words, list_p, list_offset, overflow, nonfinite, moments,
    segments, lists, cap, tiles,
    STEPS: tl.constexpr, SEGMENTED: tl.constexpr, MOMENTS: tl.constexpr, TAKE: tl.constexpr, WIRE: tl.constexpr,
    LIMIT: tl.constexpr, ALIGN: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """memory = p, and the candidates (key > floor) to the lists: the one pass over everything.

    TAKE: every candidate is sent, so the memory keeps its rounding only.
    """
    tile = tl.program_id(0)
    row = tl.program_id(1)
    grad += tl.multiple_of(row.to(tl.int64) * grad_stride, ALIGN)
    memory += tl.multiple_of(row.to(tl.int64) * memory_stride, ALIGN)
    index = tile_index(tile, GROUPS)
    inside = index < n
    whole = tile * TILE + TILE <= n  # without a mask loads are 16 bytes wide whatever n is
    if whole:
        m = tl.load(memory + index)
        g = tl.load(grad + index).to(tl.float32)
    else:
        m = tl.load(memory + index, mask=inside, other=0.0)
        g = tl.load(grad + index, mask=inside, other=0.0).to(tl.float32)
    p = m * decay + g * gain
    key = key_of(p)
    if SEGMENTED:
        end = tl.minimum(tile * TILE + TILE, n)
        first = segment_of(bounds, tile * TILE, segments, STEPS)
        last = segment_of(bounds, end - 1, segments, STEPS)
        keep = (key > tile_floors(floors, bounds, index, first, last, row, segments)) & inside
        if MOMENTS:
            wide = p.to(tl.float64)
            if first == last:
                sums = moments + ((row * segments + first) * REPLICAS + tile % REPLICAS) * 4
                tl.atomic_add(sums, tl.sum(wide), sem="relaxed")
                tl.atomic_add(sums + 1, tl.sum(wide * wide), sem="relaxed")
                first += 1
            for s in range(first, last + 1):
                part = tl.where((index >= tl.load(bounds + s)) & (index < tl.load(bounds + s + 1)), wide, 0.0)
                sums = moments + ((row * segments + s) * REPLICAS + tile % REPLICAS) * 4
                tl.atomic_add(sums, tl.sum(part), sem="relaxed")
                tl.atomic_add(sums + 1, tl.sum(part * part), sem="relaxed")
    else:
        keep = (key > floor) & inside
    mine = hits(keep, GROUPS)
    some = tl.max(mine) != 0
    finite = key < INFINITE
    bad = tl.sum((finite ^ True).to(tl.int32))
    if bad > 0:
        tl.atomic_add(nonfinite + row, bad, sem="relaxed")
    stay = tl.where(finite, p, m)
    left = stay
    if TAKE:  # noqa: SIM102 - a constant, then a value
        if some:
            left = tl.where(keep & finite, p - on_the_wire(p, WIRE, LIMIT).to(tl.float32), stay)
    if whole:
        tl.store(memory + index, left)
    else:
        tl.store(memory + index, left, mask=inside)
    if some:
        fits = collect(p, mine, tile, row, heads, words, list_p, list_offset, overflow, lists, cap, tiles, GROUPS)
        if TAKE:  # noqa: SIM102
            if fits ^ True:
                tl.store(memory + index, stay, mask=inside)
    else:
        tl.store(words + row * tiles + tile, 0)


@triton.jit(do_not_specialize=PLAIN)
def resieve(
    grad, memory, grad_stride, memory_stride, n, decay, gain,
    bounds, floors, short, heads, heads_again, words, list_p, list_offset, overflow, overflow_again, nonfinite, gate,
    segments, lists, cap, tiles,
    STEPS: tl.constexpr,
):  # fmt: skip
    """The candidates of the segments that had too few, from a memory that holds p; only for gated rows.

    They go behind those that are in the lists; where a list was full they all start over.
    """
    row = tl.program_id(1)
    if tl.load(gate + row) != 0:
        grad += row.to(tl.int64) * grad_stride
        memory += row.to(tl.int64) * memory_stride
        bad = tl.load(nonfinite + row)
        if tl.load(overflow + row) != 0:
            heads = heads_again
        for s in range(segments):
            if tl.load(short + row * segments + s) != 0:
                begin = (tl.load(bounds + s) // TILE).to(tl.int32)
                stop = ((tl.load(bounds + s + 1) + TILE - 1) // TILE).to(tl.int32)
                for tile in range(begin + tl.program_id(0), stop, tl.num_programs(0)):
                    index = tile_index(tile, 4)
                    inside = index < n
                    p = reload(memory, grad, index, inside, decay, gain, bad)
                    end = tl.minimum(tile * TILE + TILE, n)
                    first = segment_of(bounds, tile * TILE, segments, STEPS)
                    last = segment_of(bounds, end - 1, segments, STEPS)
                    keep = (key_of(p) > tile_floors(floors, bounds, index, first, last, row, segments)) & inside
                    mine = hits(keep, 4)
                    if tl.max(mine) != 0:
                        collect(
                            p, mine, tile, row, heads, words, list_p, list_offset, overflow_again, lists, cap, tiles, 4
                        )
                    else:
                        tl.store(words + row * tiles + tile, 0)


@triton.jit
def chosen(
    key, index, limit, bounds, limits, ages, row, segments, STEPS: tl.constexpr, SEGMENTED: tl.constexpr
):  # fmt: skip
    """Above the limit, or equal to it and old enough."""
    if SEGMENTED:
        s = segment_of(bounds, index, segments, STEPS)
        at = row * segments + s
        edge = tl.load(limits + at)
        age = NEWEST - (index - tl.load(bounds + s).to(tl.int32))
        return (key > edge) | ((key == edge) & (age >= tl.load(ages + at)))
    return key > limit


@triton.jit
def block_words(words, row, block, tiles):
    """Where each tile of a block keeps its candidates: its number, its place in its list, how many."""
    tile = block * TILES + tl.arange(0, TILES)
    word = tl.load(words + row * tiles + tile, mask=tile < tiles, other=0)
    return tile, word >> 10, word & 1023


@triton.jit
def entries(list_p, list_offset, row, tile, start, count, i, lists, cap, WIDE: tl.constexpr):
    """Candidates i to i + WIDE of each tile: p, coordinate, and which there are."""
    j = i + tl.arange(0, WIDE)[None, :]
    there = j < count[:, None]
    at = ((row * lists + tile % lists).to(tl.int64) * cap + start)[:, None] + j
    p = tl.load(list_p + at, mask=there, other=0.0)
    return p, tile[:, None] * TILE + tl.load(list_offset + at, mask=there, other=0).to(tl.int32), there


@triton.jit(do_not_specialize=PLAIN)
def count(
    grad, memory, grad_stride, memory_stride, n, decay, gain, limit,
    bounds, limits, ages, words, list_p, list_offset, dense, nonfinite, chosen_LB, supers,
    segments, lists, cap, tiles, blocks,
    STEPS: tl.constexpr, SEGMENTED: tl.constexpr, WIDE: tl.constexpr, TAKEN: tl.constexpr,
):  # fmt: skip
    """How many are chosen in each block, and in each group of 128 blocks. TAKEN: dense rows hold p only after this."""
    block = tl.program_id(0)
    row = tl.program_id(1)
    found = 0
    tile, start, size = block_words(words, row, block, tiles)
    if tl.load(dense + row) != 0:
        grad += row.to(tl.int64) * grad_stride
        memory += row.to(tl.int64) * memory_stride
        bad = tl.load(nonfinite + row)
        if TAKEN:
            for i in range(0, tl.max(size), WIDE):
                p, index, there = entries(list_p, list_offset, row, tile, start, size, i, lists, cap, WIDE)
                tl.store(memory + index, p, mask=there & (key_of(p) < INFINITE))
            tl.debug_barrier()
        for i in range(0, TILES * TILE, CHUNK):
            index = block * (TILES * TILE) + i + tl.arange(0, CHUNK)
            inside = index < n
            p = reload(memory, grad, index, inside, decay, gain, bad)
            index = tl.where(inside, index, 0)
            hit = chosen(key_of(p), index, limit, bounds, limits, ages, row, segments, STEPS, SEGMENTED) & inside
            found += tl.sum(hit.to(tl.int32))
    else:
        if SEGMENTED:
            for i in range(0, tl.max(size), WIDE):
                p, index, there = entries(list_p, list_offset, row, tile, start, size, i, lists, cap, WIDE)
                index = tl.where(there, index, 0)
                hit = chosen(key_of(p), index, limit, bounds, limits, ages, row, segments, STEPS, SEGMENTED) & there
                found += tl.sum(hit.to(tl.int32))
        else:
            found = tl.sum(size)
    tl.store(chosen_LB + row * blocks + block, found)
    if found > 0:
        tl.atomic_add(supers + row * SUPERS + block // TILES, found, sem="relaxed")


@triton.jit
def on_the_wire(p, kind: tl.constexpr, LIMIT: tl.constexpr):
    """Saturate at the wire type's largest number; a NaN stays. Rounds to nearest, which the interpreter does not."""
    p = tl.where(p > LIMIT, LIMIT, tl.where(p < -LIMIT, -LIMIT, p))
    if kind == tl.bfloat16:
        bits = p.to(tl.int32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        p = tl.where(p == p, near.to(tl.float32, bitcast=True), p)
    return p.to(kind)


@triton.jit
def put(p, index, hit, slot, memory, offsets, values, slots, LIMIT: tl.constexpr, TAKEN: tl.constexpr):
    """Send p from this slot, as far as there are slots, and leave the rounding in the memory."""
    room = hit & (slot < slots)
    sent = on_the_wire(p, values.dtype.element_ty, LIMIT)
    tl.store(values + slot, sent, mask=room)
    tl.store(offsets + slot, (index & 0xFFFF).to(tl.int16), mask=room)
    finite = key_of(p) < INFINITE
    if TAKEN:
        tl.store(memory + index, p, mask=hit & (slot >= slots) & finite)
    else:
        tl.store(memory + index, p - sent.to(tl.float32), mask=room & finite)


@triton.jit
def chosen_before(chosen_LB, supers, row, block, blocks):
    """How many are chosen in the blocks before, in this one, and in all."""
    group = tl.arange(0, SUPERS)
    sums = tl.load(supers + row * SUPERS + group)
    near = block // TILES * TILES + tl.arange(0, TILES)
    before = tl.sum(tl.where(group < block // TILES, sums, 0))
    before += tl.sum(tl.load(chosen_LB + row * blocks + near, mask=near < block, other=0))
    return before, tl.load(chosen_LB + row * blocks + block), tl.sum(sums)


@triton.jit(do_not_specialize=PLAIN)
def pack(
    memory, memory_stride, limit, bounds, limits, ages, words, list_p, list_offset, dense, nonfinite, chosen_LB, supers,
    counts, offsets, values, wanted, nonfinite_out,
    counts_stride, offsets_stride, values_stride, wanted_stride, bad_stride, slots,
    segments, lists, cap, tiles, blocks,
    LIMIT: tl.constexpr, STEPS: tl.constexpr, SEGMENTED: tl.constexpr, WIDE: tl.constexpr, TAKEN: tl.constexpr,
):  # fmt: skip
    """The chosen of one block into their slots, in index order; the memory keeps what is not sent.

    TAKEN: it already does, unless there is no slot.
    """
    block = tl.program_id(0)
    row = tl.program_id(1)
    before, mine, total = chosen_before(chosen_LB, supers, row, block, blocks)
    tl.store(counts + row * counts_stride + block, tl.minimum(before + mine, slots) - tl.minimum(before, slots))
    if block == 0:
        tl.store(wanted + row * wanted_stride, total)
        tl.store(nonfinite_out + row * bad_stride, tl.load(nonfinite + row))
    if (mine > 0) & ((before < slots) | TAKEN) & (tl.load(dense + row) == 0):
        memory += row.to(tl.int64) * memory_stride
        offsets += row.to(tl.int64) * offsets_stride
        values += row.to(tl.int64) * values_stride
        tile, start, size = block_words(words, row, block, tiles)
        most = tl.max(size)
        taken = size
        if SEGMENTED:
            taken = size * 0
            for i in range(0, most, WIDE):
                p, index, there = entries(list_p, list_offset, row, tile, start, size, i, lists, cap, WIDE)
                index = tl.where(there, index, 0)
                hit = chosen(key_of(p), index, limit, bounds, limits, ages, row, segments, STEPS, SEGMENTED) & there
                taken += tl.sum(hit.to(tl.int32), 1)
        slot = before + tl.cumsum(taken) - taken
        for i in range(0, most, WIDE):
            p, index, hit = entries(list_p, list_offset, row, tile, start, size, i, lists, cap, WIDE)
            if SEGMENTED:
                index = tl.where(hit, index, 0)
                hit &= chosen(key_of(p), index, limit, bounds, limits, ages, row, segments, STEPS, SEGMENTED)
            one = hit.to(tl.int32)
            put(p, index, hit, slot[:, None] + tl.cumsum(one, 1) - one, memory, offsets, values, slots, LIMIT, TAKEN)
            slot += tl.sum(one, 1)


@triton.jit(do_not_specialize=PLAIN)
def pack_dense(
    grad, memory, grad_stride, memory_stride, n, decay, gain, limit,
    bounds, limits, ages, dense, nonfinite, chosen_LB, supers, offsets, values, offsets_stride, values_stride, slots,
    segments, blocks, LIMIT: tl.constexpr, STEPS: tl.constexpr, SEGMENTED: tl.constexpr,
):  # fmt: skip
    """``pack`` for dense rows, from the memory."""
    row = tl.program_id(1)
    if tl.load(dense + row) != 0:
        grad += row.to(tl.int64) * grad_stride
        memory += row.to(tl.int64) * memory_stride
        offsets += row.to(tl.int64) * offsets_stride
        values += row.to(tl.int64) * values_stride
        bad = tl.load(nonfinite + row)
        for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
            before, mine, _ = chosen_before(chosen_LB, supers, row, block, blocks)
            if (mine > 0) & (before < slots):
                for i in range(0, TILES * TILE, CHUNK):
                    index = block * (TILES * TILE) + i + tl.arange(0, CHUNK)
                    inside = index < n
                    p = reload(memory, grad, index, inside, decay, gain, bad)
                    index = tl.where(inside, index, 0)
                    hit = (
                        chosen(key_of(p), index, limit, bounds, limits, ages, row, segments, STEPS, SEGMENTED) & inside
                    )
                    one = hit.to(tl.int32)
                    put(p, index, hit, before + tl.cumsum(one) - one, memory, offsets, values, slots, LIMIT, False)
                    before += tl.sum(one)


@triton.jit(do_not_specialize=PLAIN)
def squares(memory, stride, n, parts, WIDTH: tl.constexpr):
    """Partial squared norms of the rows, in float64."""
    row = tl.program_id(1)
    total = tl.zeros([WIDTH], tl.float64)
    memory += row.to(tl.int64) * stride
    for i in range(tl.program_id(0) * WIDTH, n, tl.num_programs(0) * WIDTH):
        index = i + tl.arange(0, WIDTH)
        m = tl.load(memory + index, mask=index < n, other=0.0).to(tl.float64)
        total += m * m
    tl.store(parts + row * tl.num_programs(0) + tl.program_id(0), tl.sum(total))


@triton.jit
def add_up(parts, out, PARTS: tl.constexpr):
    """The sum of each row, in one order however many rows there are."""
    row = tl.program_id(0)
    tl.store(out + row, tl.sum(tl.load(parts + row * PARTS + tl.arange(0, PARTS))))
