"""Kernels that find a limit for each segment: a floor from a sample ahead of the sieve, then exactly the k largest.

The selection is a radix select over the sieve's lists. Tiles that found no room there are read from the memory, and a
segment whose floor was too high is, as a whole.
Nothing waits for the host: what a step does not need finds its gate shut. A segment's choice is ``key > LIMIT``, and of
the keys equal to it those whose age (high for low coordinates) is at least ``AGE``.
"""

import triton
import triton.language as tl

from gradsieve.ops.triton_sieve import (
    AGE,
    BASE,
    DISUSED,
    FIELDS,
    FLOOR,
    HEAD,
    LACKING,
    LIMIT,
    NEED,
    NEWEST,
    NOTHING,
    PLAIN,
    SHIFT,
    SOME,
    STATE,
    TILE,
    TILES,
    UNLISTED,
    WHOLE,
    after_the_last,
    empty,
    key_of,
    nearest,
    reload,
    segment_of,
)

BINS: tl.constexpr = tl.constexpr(2048)
CHUNK: tl.constexpr = tl.constexpr(2048)  # coordinates that are read at a time
OPEN: tl.constexpr = tl.constexpr(0)
CLOSED: tl.constexpr = tl.constexpr(1)
TIED: tl.constexpr = tl.constexpr(2)  # the limit is known, but not how old its equals must be
AGES: tl.constexpr = tl.constexpr(3)  # levels below split keys, the others ages


@triton.jit
def everyone(arrivals, turn):
    """Wait until all programs are here for the turn-th time. They must run at once (a cooperative launch)."""
    tl.debug_barrier()
    here = tl.atomic_add(arrivals, 1) + 1
    while here < turn * tl.num_programs(0):
        here = tl.atomic_add(arrivals, 0, sem="relaxed")  # one thread asks; a load would be all threads'
    tl.atomic_add(arrivals, 0)  # acquires what the others wrote
    tl.debug_barrier()
    return turn + 1


@triton.jit
def mixed(x):
    """Murmur3's finaliser."""
    x = x.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=PLAIN)
def sample(
    grad, memory, grad_stride, memory_stride, decay, gain, bounds, sampled, strides, keys, samples, segments,
    zeros, zeros_size, STEPS: tl.constexpr, WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The keys of one coordinate in every stride of each segment, -1 past its end; and empty the counters.

    Which one of a stride is different each time, so that no period of the data can fool the sample.
    """
    after_the_last(EARLY)
    row = tl.program_id(1)
    at = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    there = at < samples
    s = segment_of(sampled, tl.where(there, at, 0), segments, STEPS)
    begin = tl.load(bounds + s)
    size = tl.load(bounds + s + 1) - begin
    stride = tl.load(strides + s)
    place = (at - tl.load(sampled + s)) * stride + (mixed(at) % stride.to(tl.uint32)).to(tl.int64)
    inside = there & (place < size)
    index = tl.where(inside, begin + place, 0)
    m = tl.load(memory + row.to(tl.int64) * memory_stride + index, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad + row.to(tl.int64) * grad_stride + index, mask=inside, other=0.0).to(tl.float32)
    empty(zeros, zeros_size, WIDTH)
    p = nearest(m * decay + g * gain, memory.dtype.element_ty)
    tl.store(keys + row.to(tl.int64) * samples + at, tl.where(inside, key_of(p), -1), mask=there)


@triton.jit(do_not_specialize=PLAIN)
def floors(
    keys, sampled, ranks, table, samples, segments, WIDTH: tl.constexpr, GROUPS: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Of each segment the floor that about as many samples exceed as its rank says, or a few more: bit by bit.

    Of every group of samples only the largest is looked at: there are so many groups that hardly two of those above
    the floor share one. Neighbours are in different groups.
    """
    after_the_last(EARLY)
    s = tl.program_id(0)
    row = tl.program_id(1)
    begin = tl.load(sampled + s)
    size = tl.load(sampled + s + 1) - begin
    rank = tl.load(ranks + s)
    keys += row.to(tl.int64) * samples + begin
    j = tl.arange(0, WIDTH // GROUPS)[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    key = tl.max(tl.load(keys + j, mask=j < size, other=-1), 0)
    edge = 0
    for i in range(17):  # the last 14 bits are left: 1 part in 512
        above = edge + (1 << (30 - i))
        edge = tl.where(tl.sum((key >= above).to(tl.int32)) >= rank, above, edge)
    floor = tl.maximum(edge - 1, 0)  # zeros are no candidates: there may be any number of them
    tl.store(table + (row * segments + s) * FIELDS + FLOOR, tl.where(rank == 0, NOTHING, floor))


@triton.jit
def span(at, from_memory, level):
    """Where a level's histogram starts, how wide its bins are and how far it goes, in bits.

    Level 0 spans 4 octaves above the floor; from the memory, all keys.
    """
    base = tl.where(level == 0, tl.load(at + FLOOR) + 1, 0)
    base = tl.where(from_memory | (base < 0), 0, base)
    shift = tl.where((level > 0) | from_memory, 20, 14) + 31 * 256
    later = level % 3 != 0
    base = tl.where(later, tl.load(at + BASE), base)
    shift = tl.where(later, tl.load(at + SHIFT), shift)
    return base, shift & 255, shift >> 8


@triton.jit
def ballot(key, age, there, at, from_memory, level):
    """Which take part in this level's histogram, and in which bin."""
    base, shift, reach = span(at, from_memory, level)
    state = tl.load(at + STATE) + key * 0  # the interpreter spoils a scalar condition when it makes a tensor of it
    value = key
    hit = there & (state == OPEN)
    if level >= AGES:
        value = age
        hit = there & (state == TIED) & (key == tl.load(at + LIMIT))
    beyond = value - base
    hit = hit & (beyond >= 0) & ((beyond >> reach) == 0)
    return hit, tl.minimum(beyond >> shift, BINS - 1)


@triton.jit
def list_length(heads, line, cap):
    """How many entries of a list were written."""
    return tl.minimum(tl.load(heads + line * HEAD), cap) - tl.load(heads + line * HEAD + 1)


@triton.jit
def vote(histogram, cell, bin, hit, COPIES: tl.constexpr):
    """Programs vote in several copies of a histogram, against contention."""
    cells = histogram + (cell * COPIES + tl.program_id(0) % COPIES) * BINS + bin
    tl.atomic_add(cells, hit.to(tl.int32), mask=hit, sem="relaxed")


@triton.jit
def in_sample(offset, size, start, step):
    """Whether a strided sample has this coordinate of a segment."""
    return offset % step == start % tl.maximum(tl.minimum(step, size), 1)


@triton.jit
def tally_list(
    bounds, table, heads, list_p, list_at, histogram, line, begin, segments, lists, cap, level, start, step,
    STEPS: tl.constexpr, COPIES: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    """One level's histogram of the open segments that a piece of one list tells of."""
    row = line // lists
    length = list_length(heads, line, cap)
    if begin < length:
        j = begin + tl.arange(0, CHUNK)
        there = j < length
        key = key_of(tl.load(list_p + tl.cast(line, tl.int64) * cap + j, mask=there, other=0.0))
        index = tl.load(list_at + tl.cast(line, tl.int64) * cap + j, mask=there, other=0)
        s = segment_of(bounds, index, segments, STEPS)
        at = table + (row * segments + s) * FIELDS
        first = tl.load(bounds + s).to(tl.int32)
        there = there & (tl.load(at + LACKING) != WHOLE)
        if SAMPLED:
            size = tl.load(bounds + s + 1).to(tl.int32) - first
            there = there & in_sample(index - first, size, start, step)
        hit, bin = ballot(key, NEWEST - (index - first), there, at, False, level)
        vote(histogram, row * segments + s, bin, hit, COPIES)


@triton.jit
def overflowed(heads, lines, cap, WIDTH: tl.constexpr):
    """Whether a list was ever asked for more than it has."""
    most = 0
    for i in range(0, lines, WIDTH):
        line = i + tl.arange(0, WIDTH)
        most = tl.maximum(most, tl.max(tl.load(heads + line * HEAD, mask=line < lines, other=0)))
    return most > cap


@triton.jit
def tally_unlisted(
    grad, memory, n, decay, gain, bounds, table, words, bad, histogram, row, block, segments, tiles, level, start, step,
    STEPS: tl.constexpr, COPIES: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    """One level's histogram of the tiles of one block that found no room in the lists."""
    tile = block * TILES + tl.arange(0, TILES)
    word = tl.load(words + row * tiles + tile, mask=tile < tiles, other=0)
    if tl.max((word == UNLISTED).to(tl.int32)) > 0:
        for i in range(TILES):
            if tl.sum(tl.where(tile == block * TILES + i, word, 0)) == UNLISTED:
                index = (block * TILES + i) * TILE + tl.arange(0, TILE)
                inside = index < n
                s = segment_of(bounds, tl.where(inside, index, 0), segments, STEPS)
                at = table + (row * segments + s) * FIELDS
                first = tl.load(bounds + s).to(tl.int32)
                key = key_of(reload(memory, grad, index, inside, decay, gain, bad))
                there = inside & (key > tl.load(at + FLOOR)) & (tl.load(at + LACKING) == SOME)
                if SAMPLED:
                    size = tl.load(bounds + s + 1).to(tl.int32) - first
                    there = there & in_sample(index - first, size, start, step)
                hit, bin = ballot(key, NEWEST - (index - first), there, at, False, level)
                vote(histogram, row * segments + s, bin, hit, COPIES)


@triton.jit
def tally_memory(
    grad, memory, n, decay, gain, bounds, table, words, bad, histogram, row, block, segments, tiles, level, start, step,
    STEPS: tl.constexpr, COPIES: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    """One level's histogram of the open segments of one block that the lists lack."""
    begin = block * (TILES * TILE)
    stop = tl.minimum(begin + TILES * TILE, n)
    first = segment_of(bounds, begin, segments, STEPS)
    last = segment_of(bounds, stop - 1, segments, STEPS)
    for s in range(first, last + 1):
        at = table + (row * segments + s) * FIELDS
        if (tl.load(at + LACKING) == WHOLE) & (tl.load(at + STATE) != CLOSED):
            first_at = tl.load(bounds + s).to(tl.int32)
            end = tl.load(bounds + s + 1).to(tl.int32)
            low = tl.maximum(first_at, begin)
            high = tl.minimum(end, stop)
            if level == 0:
                unlist(words, row, low, high, tiles)
            for i in range(low, high, 2 * CHUNK):
                index = i + tl.arange(0, 2 * CHUNK)
                inside = index < high
                if SAMPLED:
                    inside = inside & in_sample(index - first_at, end - first_at, start, step)
                key = key_of(reload(memory, grad, index, inside, decay, gain, bad))
                hit, bin = ballot(key, NEWEST - (index - first_at), inside, at, True, level)
                # zeros, other equals and ages of neighbours share a bin: they vote with one voice
                least = tl.min(tl.where(hit, bin, BINS))
                if least < BINS:
                    alike = hit & (bin == least)
                    cell = ((row * segments + s) * COPIES + tl.program_id(0) % COPIES) * BINS + least
                    tl.atomic_add(histogram + cell, tl.sum(alike.to(tl.int32)), sem="relaxed")
                    vote(histogram, row * segments + s, bin, hit & (bin != least), COPIES)


@triton.jit
def unlist(words, row, low, high, tiles):
    """Later kernels read these coordinates, all of one block, from the memory."""
    tile = low // TILE + tl.arange(0, TILES)
    word = tl.load(words + row * tiles + tile, mask=tile * TILE < high, other=UNLISTED)
    tl.store(words + row * tiles + tile, tl.full([TILES], DISUSED, tl.int32), mask=word >= 0)


@triton.jit
def wanted_bin(histogram, cell, wanted, COPIES: tl.constexpr):
    """The bin that holds the wanted rank from above, how many lie above it and in it, and in all. Empties the bins."""
    bin = tl.arange(0, BINS)
    cells = histogram + cell * (COPIES * BINS) + bin
    votes = tl.zeros([BINS], tl.int32)
    for copy in tl.static_range(COPIES):
        votes += tl.load(cells + copy * BINS)
    for copy in tl.static_range(COPIES):
        tl.store(cells + copy * BINS, tl.zeros([BINS], tl.int32))
    total = tl.sum(votes)
    over = total - tl.cumsum(votes)
    into = (over < wanted) & (over + votes >= wanted)
    inner = tl.sum(tl.where(into, bin, 0))
    return inner, tl.sum(tl.where(into, over, 0)), tl.sum(tl.where(into, votes, 0)), total


@triton.jit
def sample_rank(k, size, start, step):
    """Which of a strided sample's values, from above, k of all exceed in proportion."""
    first = start % tl.maximum(tl.minimum(step, size), 1)
    taken = (size - first + step - 1) // step
    share = (taken * k).to(tl.float64) / tl.maximum(size, 1).to(tl.float64)
    return tl.maximum(share.to(tl.int64), 1).to(tl.int32)


@triton.jit
def narrow(
    histogram, bounds, table, wants, gates, row, s, segments, phase, level, start, step,
    COPIES: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    """Go into the bin that holds the wanted rank; close the segment where the whole bin is wanted."""
    at = table + (row * segments + s) * FIELDS
    from_memory = tl.load(at + LACKING) == WHOLE
    turn = tl.where(level < AGES, OPEN, TIED)
    rank = tl.load(wants + s)
    open = tl.load(at + STATE) == turn
    if SAMPLED:
        open = open & (rank > 0)
        rank = sample_rank(rank, tl.load(bounds + s + 1) - tl.load(bounds + s), start, step)
    if open:
        if (phase == 0) & from_memory:
            tl.store(gates + 1, 1)
        elif (phase != 1) | from_memory:
            wanted = tl.where(level == 0, rank, tl.load(at + NEED))
            base, shift, _ = span(at, from_memory, level)
            inner, over, inside, total = wanted_bin(histogram, row * segments + s, wanted, COPIES)
            if (phase == 0) & ((total < wanted) | (inner == BINS - 1)):
                tl.store(at + LACKING, WHOLE)
                tl.store(gates + 1, 1)
            else:
                none = wanted == 0
                wanted -= over
                edge = base + (inner << shift)
                if SAMPLED:  # to the last bit, and open for what follows
                    tl.store(at + LIMIT, edge)
                    if shift > 0:
                        tl.store(gates + tl.maximum(phase, 1) + 1, 1)
                else:
                    state = tl.where((shift == 0) | (level >= AGES), TIED, OPEN)
                    state = tl.where((inside == wanted) | none, CLOSED, state)
                    if level < AGES:
                        tl.store(at + LIMIT, tl.where(none, NOTHING, tl.where(state == TIED, edge, edge - 1)))
                        tl.store(at + AGE, NOTHING)
                    else:
                        tl.store(at + AGE, edge)
                    if state != CLOSED:
                        tl.store(gates + tl.where(state == turn, tl.maximum(phase, 1) + 1, 1 + AGES), 1)
                    tl.store(at + STATE, state)
                tl.store(at + NEED, wanted)
                tl.store(at + BASE, edge)
                tl.store(at + SHIFT, tl.maximum(shift - 11, 0) + shift * 256)


@triton.jit(do_not_specialize=PLAIN)
def choose(
    grad, memory, grad_stride, memory_stride, n, decay, gain,
    bounds, table, heads, words, list_p, list_at, nonfinite, histogram, wants, gates, arrivals,
    workers, segments, lists, cap, tiles, blocks, start, step, STEPS: tl.constexpr, COPIES: tl.constexpr,
    GATED: tl.constexpr, SAMPLED: tl.constexpr,
):  # fmt: skip
    """The limit and age of exactly ``wants`` of each open segment. GATED: perhaps there is none.

    Phases: level 0 from the lists; level 0 from the memory where the floor was too high; levels 1 to 5 from both.
    ``gates[phase]`` opens a phase; ``gates[1]`` also says that some segment is read from the memory. ``narrow`` opens
    the next level's, or the ages' (1 + AGES) where only ties are left.
    SAMPLED: the value that ``wants`` exceed in proportion in a strided sample, and nothing is closed.
    """
    turn = 1
    lines = lists * workers
    full = overflowed(heads, lines, cap, CHUNK // 2)
    for phase in range(7):
        level = tl.maximum(phase - 1, 0)
        run = tl.load(gates + phase) != 0
        if GATED == 0:
            run = run | (phase == 0)
        if run:
            if phase != 1:
                for job in range(tl.program_id(0), lines * ((cap + CHUNK - 1) // CHUNK), tl.num_programs(0)):
                    tally_list(
                        bounds, table, heads, list_p, list_at, histogram, job % lines, job // lines * CHUNK, segments,
                        lists, cap, level, start, step, STEPS, COPIES, SAMPLED,
                    )  # fmt: skip
                for job in range(tl.program_id(0), tl.where(full, blocks * workers, 0), tl.num_programs(0)):
                    row = job // blocks
                    tally_unlisted(
                        grad + row.to(tl.int64) * grad_stride, memory + row.to(tl.int64) * memory_stride, n, decay,
                        gain, bounds, table, words, tl.load(nonfinite + row), histogram, row, job % blocks, segments,
                        tiles, level, start, step, STEPS, COPIES, SAMPLED,
                    )  # fmt: skip
            if (phase > 0) & (tl.load(gates + 1) != 0):
                for job in range(tl.program_id(0), blocks * workers, tl.num_programs(0)):
                    row = job // blocks
                    tally_memory(
                        grad + row.to(tl.int64) * grad_stride, memory + row.to(tl.int64) * memory_stride, n, decay,
                        gain, bounds, table, words, tl.load(nonfinite + row), histogram, row, job % blocks, segments,
                        tiles, level, start, step, STEPS, COPIES, SAMPLED,
                    )  # fmt: skip
            turn = everyone(arrivals, turn)
            for job in range(tl.program_id(0), segments * workers, tl.num_programs(0)):
                narrow(
                    histogram, bounds, table, wants, gates, job // segments, job % segments, segments, phase, level,
                    start, step, COPIES, SAMPLED,
                )  # fmt: skip
            turn = everyone(arrivals, turn)
