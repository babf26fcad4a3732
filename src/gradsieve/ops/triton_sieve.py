"""The one pass over everything: the memory becomes p, and candidates go to lists.

A tile is 512 coordinates and one program's work; a block is 128 tiles. A tile's candidates (p and coordinate) are
appended to one of ``lists`` lists, tile modulo lists, so that a gradient whose large values sit together fills all
lists alike; one that finds its list full tries others. ``words[tile]`` says where and how many. A tile for which there
is no room is *unlisted*: later kernels read it from the memory. A magnitude is compared by its bits (``key``): the
order of non-negative floats, with infinity and NaN on top.
"""

import triton
import triton.language as tl

TILE: tl.constexpr = tl.constexpr(512)
TILES: tl.constexpr = tl.constexpr(128)  # in a block
UNLISTED: tl.constexpr = tl.constexpr(-1)  # as a word: there was no room
DISUSED: tl.constexpr = tl.constexpr(-2)  # there was, but its segment is read from the memory
TRIES: tl.constexpr = tl.constexpr(4)  # lists that a tile asks for room: two bits of its word
HEAD: tl.constexpr = tl.constexpr(8)  # a list's head has a memory sector: entries asked for, entries never written
REPLICAS: tl.constexpr = tl.constexpr(64)  # of the sums for the moments, against contention
INFINITE: tl.constexpr = tl.constexpr(0x7F800000)
NOTHING: tl.constexpr = tl.constexpr(0x7FFFFFFF)  # as a floor, a limit or an age: none is above
NEWEST: tl.constexpr = tl.constexpr(0x7FFFFFFE)  # "age" of a segment's first coordinate; equals go by age
FLOOR: tl.constexpr = tl.constexpr(0)  # fields of a segment in the table: candidates' keys exceed it
LACKING: tl.constexpr = tl.constexpr(1)  # its candidates are not all in the lists: SOME tiles are unlisted, or WHOLE
STATE: tl.constexpr = tl.constexpr(2)
NEED: tl.constexpr = tl.constexpr(3)
BASE: tl.constexpr = tl.constexpr(4)
SHIFT: tl.constexpr = tl.constexpr(5)
LIMIT: tl.constexpr = tl.constexpr(6)
AGE: tl.constexpr = tl.constexpr(7)
FOUND: tl.constexpr = tl.constexpr(8)
FIELDS: tl.constexpr = tl.constexpr(16)
SOME: tl.constexpr = tl.constexpr(1)
WHOLE: tl.constexpr = tl.constexpr(2)
PLAIN = [  # arguments that no version is compiled for
    "n", "floor", "limit", "segments", "lists", "cap", "tiles", "blocks", "slots", "kept", "samples", "workers",
    "counts_stride", "offsets_stride", "values_stride", "wanted_stride", "bad_stride", "before_stride", "start", "step",
    "zeros_size",
]  # fmt: skip


@triton.jit
def after_the_last(EARLY: tl.constexpr):
    """Wait for the kernel before this one, where this one was launched ahead of its end."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def empty(zeros, size, WIDTH: tl.constexpr):
    """All programs together."""
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    for i in range(program * WIDTH, size, tl.num_programs(0) * tl.num_programs(1) * WIDTH):
        cell = i + tl.arange(0, WIDTH)
        tl.store(zeros + cell, tl.zeros([WIDTH], tl.int32), mask=cell < size)


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
    p = tl.load(memory + index, mask=inside, other=0.0).to(tl.float32)
    if nonfinite > 0:
        g = tl.load(grad + index, mask=inside, other=0.0).to(tl.float32) * gain
        p = tl.where(key_of(g) < INFINITE, p, p * decay + g)
    return p


@triton.jit
def nearest(p, kind: tl.constexpr):
    """The number of this type that is nearest to p, as a float32; a NaN stays. The interpreter's casts cut off."""
    if kind == tl.bfloat16:
        bits = p.to(tl.int32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        p = tl.where(p == p, near.to(tl.float32, bitcast=True), p)
    elif kind == tl.float16:
        p = p.to(kind).to(tl.float32)
    return p


@triton.jit
def on_the_wire(p, kind: tl.constexpr, LARGEST: tl.constexpr):
    """Rounded to nearest; saturates at the wire type's largest number."""
    p = tl.where(p > LARGEST, LARGEST, tl.where(p < -LARGEST, -LARGEST, p))
    return nearest(p, kind).to(kind)


@triton.jit
def tile_index(tile):
    """A lane holds four runs of 4 neighbours."""
    place = tl.arange(0, 4)[:, None, None] * 128 + tl.arange(0, 32)[None, :, None] * 4
    return tile * TILE + place + tl.arange(0, 4)[None, None, :]


@triton.jit
def run_bits():
    return 1 << (tl.arange(0, 4)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :])


@triton.jit
def list_of(tile, attempt, row, lists):
    """The list that a tile asks at this attempt."""
    return row * lists + ((tile + attempt * 389) & (lists - 1))


@triton.jit
def ask(heads, line, count, cap):
    """Where the entries of one tile start in a list. The first that does not fit leaves the list's end unwritten."""
    start = tl.atomic_add(heads + line * HEAD, count, sem="relaxed")
    if (start < cap) & (start + count > cap):
        tl.store(heads + line * HEAD + 1, cap - start)
    return start


@triton.jit
def collect(
    p, mine, tile, row, memory, heads, words, list_p, list_at, lists, cap, tiles,
    TAKE: tl.constexpr, WIRE: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Append the hits of one tile to a list, in index order; says how many and whether there was room."""
    pairs = mine - ((mine >> 1) & 0x5555)
    kept = (pairs & 0x3333) + ((pairs >> 2) & 0x3333)  # how many a run, in 4 bits each
    kept = (kept & 0xF) | ((kept & 0xF0) << 4) | ((kept & 0xF00) << 8) | ((kept & 0xF000) << 12)
    kept = kept.to(tl.uint32)  # in 8 bits each, which hold the sum of 32 lanes
    total = tl.sum(kept)
    second = (total & 0xFF).to(tl.int32)
    third = second + ((total >> 8) & 0xFF).to(tl.int32)
    fourth = third + ((total >> 16) & 0xFF).to(tl.int32)
    count = fourth + (total >> 24).to(tl.int32)
    attempt = tile * 0
    line = list_of(tile, attempt, row, lists)
    start = ask(heads, line, count, cap)
    # a list that is asked for far more than it has says that all are full
    while (start + count > cap) & (start < cap + cap // 4) & (attempt < TRIES - 1):
        attempt += 1
        line = list_of(tile, attempt, row, lists)
        start = ask(heads, line, count, cap)
    place = (tl.cumsum(kept) - kept).to(tl.int32)
    most = tl.max(((kept + (kept >> 8) + (kept >> 16) + (kept >> 24)) & 0xFF).to(tl.int32))
    bit = run_bits()
    raw = p.to(tl.int32, bitcast=True)
    fits = start + count <= cap
    if fits:
        list_p += line.to(tl.int64) * cap + start
        list_at += line.to(tl.int64) * cap + start
        first = tile * TILE + tl.arange(0, 32) * 4
        left = mine
        for _ in range(most):
            low = left & -left
            at = tl.maximum((low.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127, 0)
            run = at >> 2
            before = (mine & (low - 1)) >> (run * 4)
            ahead = tl.where(run < 2, tl.where(run == 0, 0, second), tl.where(run == 2, third, fourth))
            rank = ahead + ((place >> (run * 8)) & 0xFF) + before - (before >> 1) - (before >> 2)
            value = tl.sum(tl.sum(tl.where(bit == low[None, :, None], raw, 0), 2), 0)
            hit = low != 0
            value = value.to(tl.float32, bitcast=True)
            index = first + run * 128 + (at & 3)
            tl.store(list_p + rank, value, mask=hit, eviction_policy="evict_last")  # read again, unlike the rest
            tl.store(list_at + rank, index, mask=hit, eviction_policy="evict_last")
            if TAKE:
                left_over = value - on_the_wire(value, WIRE, LARGEST).to(tl.float32)
                left_over = nearest(left_over, memory.dtype.element_ty)
                tl.store(memory + index, left_over, mask=hit & (key_of(value) < INFINITE))
            left = left & (left - 1)
    word = tl.where(fits, start * 4096 + attempt * 1024 + count, UNLISTED)
    tl.store(words + row * tiles + tile, word, eviction_policy="evict_last")
    return count, fits


@triton.jit(do_not_specialize=PLAIN)
def sieve(
    grad, memory, grad_stride, memory_stride, n, decay, gain, floor,
    bounds, starts, table, heads, words, list_p, list_at, nonfinite, per_unit, moments,
    segments, lists, cap, tiles, blocks,
    STEPS: tl.constexpr, SEGMENTED: tl.constexpr, MOMENTS: tl.constexpr, TAKE: tl.constexpr, WIRE: tl.constexpr,
    LARGEST: tl.constexpr, ALIGN: tl.constexpr, LISTING: tl.constexpr, UNIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """memory = p, and the candidates (key > floor) to the lists, with LISTING.

    TAKE: every candidate is sent, so the memory keeps its rounding only, and its unit counts it.
    """
    after_the_last(EARLY)
    tile = tl.program_id(0)
    row = tl.program_id(1)
    grad += tl.multiple_of(row.to(tl.int64) * grad_stride, ALIGN)
    memory += tl.multiple_of(row.to(tl.int64) * memory_stride, ALIGN)
    index = tile_index(tile)
    inside = index < n
    whole = tile * TILE + TILE <= n  # without a mask loads are 16 bytes wide whatever n is
    if whole:
        m = tl.load(memory + index).to(tl.float32)
        g = tl.load(grad + index).to(tl.float32)
    else:
        m = tl.load(memory + index, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + index, mask=inside, other=0.0).to(tl.float32)
    p = nearest(m * decay + g * gain, memory.dtype.element_ty)
    key = key_of(p)
    first = tile * 0
    last = first
    if SEGMENTED:
        if STEPS > 0:
            first = tl.load(starts + tile // TILES)
            last = first
            if first != tl.load(starts + tile // TILES + 1):  # else the whole block is in one segment
                while tl.load(bounds + first + 1) <= tile * TILE:
                    first += 1
                last = first
                while tl.load(bounds + last + 1) < tl.minimum(tile * TILE + TILE, n):
                    last += 1
        floor = tl.load(table + (row * segments + first) * FIELDS + FLOOR)
    keep = (key > floor) & inside
    for s in range(first + 1, last + 1):
        floor = tl.load(table + (row * segments + s) * FIELDS + FLOOR)
        keep = tl.where(index >= tl.load(bounds + s), (key > floor) & inside, keep)
    if MOMENTS:
        add_moments(moments, p.to(tl.float64), index, bounds, row, segments, first, last, tile)
    mine = tl.sum(tl.sum(tl.where(keep, run_bits(), 0), 2), 0)
    some = tl.max(mine) != 0
    finite = key < INFINITE
    bad = tl.sum((finite ^ True).to(tl.int32))
    if bad > 0:
        tl.atomic_add(nonfinite + row, bad, sem="relaxed")
    stay = tl.where(finite, p, m)
    if whole:
        tl.store(memory + index, stay)
    else:
        tl.store(memory + index, stay, mask=inside)
    if LISTING:
        if some:
            tl.debug_barrier()
            count, fits = collect(
                p, mine, tile, row, memory, heads, words, list_p, list_at, lists, cap, tiles, TAKE, WIRE, LARGEST
            )
            if TAKE:
                tl.atomic_add(per_unit + row * (blocks * (TILES // UNIT)) + tile // UNIT, count, sem="relaxed")
            else:
                for s in range(first, tl.where(fits, first, last + 1)):
                    tl.store(table + (row * segments + s) * FIELDS + LACKING, SOME)
        else:
            tl.store(words + row * tiles + tile, 0, eviction_policy="evict_last")


@triton.jit
def add_moments(moments, p, index, bounds, row, segments, first, last, tile):
    """The tile's share of the sum and the sum of squares of each segment."""
    if first == last:
        sums = moments + ((row * segments + first) * REPLICAS + tile % REPLICAS) * 4
        tl.atomic_add(sums, tl.sum(p), sem="relaxed")
        tl.atomic_add(sums + 1, tl.sum(p * p), sem="relaxed")
    else:
        for s in range(first, last + 1):
            part = tl.where((index >= tl.load(bounds + s)) & (index < tl.load(bounds + s + 1)), p, 0.0)
            sums = moments + ((row * segments + s) * REPLICAS + tile % REPLICAS) * 4
            tl.atomic_add(sums, tl.sum(part), sem="relaxed")
            tl.atomic_add(sums + 1, tl.sum(part * part), sem="relaxed")


@triton.jit(do_not_specialize=["stride", "n"])
def squares(memory, stride, n, parts, WIDTH: tl.constexpr):
    """Partial squared norms of the rows, in float64; in one order whatever the rows' alignment."""
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
