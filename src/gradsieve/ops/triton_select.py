"""Kernels that find the limit of each segment: exactly k by a radix select, about k by counting and refining.

They read the sieve's lists, or the memory of rows that are dense, and never wait for the host: a kernel whose
gate is shut for a row leaves at once. A segment's choice is ``key > limit``, and of the keys equal to it those
whose ``age`` (high for low coordinates) is at least ``ages``.
"""

import triton
import triton.language as tl

from gradsieve.ops.triton_kernels import (
    CHUNK,
    INFINITE,
    NEWEST,
    PLAIN,
    REPLICAS,
    TILE,
    TILES,
    block_words,
    entries,
    key_of,
    reload,
    segment_of,
)

BINS: tl.constexpr = tl.constexpr(2048)
NOTHING: tl.constexpr = tl.constexpr(0x7FFFFFFF)  # as a limit, or as an age
OPEN: tl.constexpr = tl.constexpr(0)
CLOSED: tl.constexpr = tl.constexpr(1)
TIED: tl.constexpr = tl.constexpr(2)  # the limit is known, but not how old its equals must be
SELECT: tl.constexpr = tl.constexpr(0)  # exactly as many as are wanted
ESTIMATE: tl.constexpr = tl.constexpr(1)  # a floor from a sample
RANK: tl.constexpr = tl.constexpr(2)  # the value of the wanted rank


@triton.jit
def everyone(arrivals, turn):
    """Wait until all programs are here for the turn-th time. They must run at once (a cooperative launch)."""
    tl.debug_barrier()
    tl.atomic_add(arrivals, 1)
    while tl.atomic_add(arrivals, 0) < turn * tl.num_programs(0):
        pass
    tl.debug_barrier()
    return turn + 1


@triton.jit
def span(floors, bases, shifts, at, everything, level):
    """Where a level's histogram starts, how wide its bins are and how far it goes, in bits.

    Level 0 starts at the floor, in fine bins over two octaves; without a floor it spans all keys.
    """
    floor = tl.load(floors + at) + 1
    floor = tl.where(everything | (floor < 0), 0, floor)
    base = tl.where(level % 3 == 0, tl.where(level == 0, floor, 0), tl.load(bases + at))
    shift = tl.where(level % 3 == 0, tl.where(base == 0, 20, 13) + 31 * 256, tl.load(shifts + at))
    return base, shift & 255, shift >> 8


@triton.jit
def ballot(key, age, there, base, shift, reach, limit, state, level):
    """Which take part in this level's histogram, and in which bin. Levels 0 to 2 split keys, 3 to 5 ages."""
    value = key
    state += key * 0  # the interpreter spoils a scalar condition when it makes a tensor of it
    hit = there & (state == OPEN)
    if level > 2:
        value = age
        hit = there & (state == TIED) & (key == limit)
    beyond = value - base
    hit = hit & (beyond >= 0) & ((beyond >> reach) == 0)
    return hit, tl.minimum(beyond >> shift, BINS - 1)


@triton.jit
def tally_block(
    grad, memory, n, decay, gain, bounds, words, list_p, list_offset, bad, everything,
    floors, states, bases, shifts, limits, histogram, row, block, segments, lists, cap, tiles, level,
    STEPS: tl.constexpr, SAMPLE: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """One level's histogram of the open segments in one block. SAMPLE: memory holds keys, -1 for none."""
    begin = block * SPAN
    stop = tl.minimum(begin + SPAN, n)
    first = segment_of(bounds, begin, segments, STEPS)
    last = segment_of(bounds, stop - 1, segments, STEPS)
    if everything:
        for s in range(first, last + 1):
            at = row * segments + s
            start = tl.load(bounds + s).to(tl.int32)
            high = tl.minimum(tl.load(bounds + s + 1).to(tl.int32), stop)
            state = tl.load(states + at)
            limit = tl.load(limits + at)
            base, shift, reach = span(floors, bases, shifts, at, everything, level)
            votes = tl.zeros([BINS], tl.int32)
            for i in range(tl.maximum(start, begin), high, CHUNK):
                index = i + tl.arange(0, CHUNK)
                inside = index < high
                if SAMPLE:
                    key = tl.load(memory + index, mask=inside, other=-1)
                    inside &= key >= 0
                else:
                    key = key_of(reload(memory, grad, index, inside, decay, gain, bad))
                hit, bin = ballot(key, NEWEST - (index - start), inside, base, shift, reach, limit, state, level)
                votes += tl.histogram(tl.where(hit, bin, 0), BINS, mask=hit)
            tl.atomic_add(histogram + at * BINS + tl.arange(0, BINS), votes, mask=votes > 0, sem="relaxed")
    else:
        if SAMPLE == 0:
            tile, place, size = block_words(words, row, block, tiles)
            only = row * segments + first
            begins = tl.load(bounds + first).to(tl.int32)
            base1, shift1, reach1 = span(floors, bases, shifts, only, everything, level)
            limit1 = tl.load(limits + only)
            state1 = tl.load(states + only)
            for i in range(0, tl.max(size), 4):
                p, index, there = entries(list_p, list_offset, row, tile, place, size, i, lists, cap, 4)
                one = tl.full([TILES, 4], 1, tl.int32)
                if first == last:
                    age = NEWEST - (index - begins)
                    hit, bin = ballot(key_of(p), age, there, base1, shift1, reach1, limit1, state1, level)
                    tl.atomic_add(histogram + only * BINS + bin, one, mask=hit, sem="relaxed")
                else:
                    s = segment_of(bounds, tl.where(there, index, begin), segments, STEPS)
                    at = row * segments + s
                    age = NEWEST - (index - tl.load(bounds + s).to(tl.int32))
                    base, shift, reach = span(floors, bases, shifts, at, everything, level)
                    limit = tl.load(limits + at)
                    hit, bin = ballot(key_of(p), age, there, base, shift, reach, limit, tl.load(states + at), level)
                    tl.atomic_add(histogram + at * BINS + bin, one, mask=hit, sem="relaxed")


@triton.jit
def narrow_segment(
    histogram, wants, need, states, bases, shifts, limits, ages, seen, short, floors, floors_again,
    everything, full, failed, onward, tied, row, s, segments, level, first, MODE: tl.constexpr,
):  # fmt: skip
    """Go into the bin that holds the wanted rank; close the segment where the whole bin is wanted."""
    at = row * segments + s
    if tl.load(states + at) == tl.where(level < 3, OPEN, TIED):
        bin = tl.arange(0, BINS)
        votes = tl.load(histogram + at * BINS + bin)
        tl.store(histogram + at * BINS + bin, tl.zeros([BINS], tl.int32))
        total = tl.sum(votes)
        wanted = tl.where(level == 0, tl.load(wants + s), tl.load(need + at))
        base, shift, _ = span(floors, bases, shifts, at, everything, level)
        over = total - tl.cumsum(votes)
        into = (over < wanted) & (over + votes >= wanted)
        inner = tl.sum(tl.where(into, bin, 0))
        fine = (level > 0) | ((total >= wanted) & (full == 0) & ((inner < BINS - 1) | (shift == 20)))
        if MODE == SELECT:
            if first:
                tl.store(seen + at, total)
                tl.store(short + at, (fine ^ True).to(tl.int32))
            if fine ^ True:
                tl.store(failed + row, 1)
        else:
            fine |= True
        if fine:
            none = wanted == 0
            wanted -= tl.sum(tl.where(into, over, 0))
            whole = (tl.sum(tl.where(into, votes, 0)) == wanted) | none
            edge = base + (inner << shift)
            state = 0
            if MODE == SELECT:
                state = tl.where(whole, CLOSED, tl.where((shift == 0) | (level > 2), TIED, OPEN))
                if level < 3:
                    tl.store(limits + at, tl.where(none, NOTHING, tl.where(state == TIED, edge, edge - 1)))
                    tl.store(ages + at, NOTHING)
                    if state == TIED:
                        tl.store(tied + row, 1)
                else:
                    tl.store(ages + at, edge)
                if (state == OPEN) | ((state == TIED) & (level > 2)):
                    tl.store(onward + row, 1)
            elif MODE == ESTIMATE:
                edge = tl.where(total <= wanted, 0, edge)
                old = tl.load(floors + at)
                tl.store(floors_again + at, tl.where(tl.load(short + at) != 0, edge - 1, old))
            else:
                tl.store(limits + at, edge)
            tl.store(states + at, state)
            tl.store(need + at, wanted)
            tl.store(bases + at, edge)
            tl.store(shifts + at, tl.maximum(shift - 11, 0) + shift * 256)


@triton.jit(do_not_specialize=PLAIN)
def choose(
    grad, memory, grad_stride, memory_stride, n, decay, gain,
    bounds, words, list_p, list_offset, nonfinite, dense, overflow, gates, arrivals,
    wants, need, states, bases, shifts, limits, ages, seen, short, floors, floors_again, histogram,
    workers, segments, lists, cap, tiles, blocks, first_phase, last_phase,
    STEPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Phases of a selection: level 0 from the lists; again from the lists made anew; from the memory; levels 1 to 5.

    Each runs only for the rows whose gate an earlier one opened; the first for all.
    """
    turn = 1
    rows = tl.arange(0, ROWS)
    for phase in range(first_phase, last_phase + 1):
        level = tl.maximum(phase - 2, 0)
        gate = gates + phase * workers
        open = tl.load(gate + rows, mask=rows < workers, other=0)
        if (phase == 0) | (tl.max(open) != 0):
            base_floors = floors
            if phase > 0:
                base_floors = floors_again
            for job in range(tl.program_id(0), blocks * workers, tl.num_programs(0)):
                row = job // blocks
                if (phase == 0) | (tl.load(gate + row) != 0):
                    everything = (phase > 1) & (tl.load(dense + row) != 0)
                    tally_block(
                        grad + row.to(tl.int64) * grad_stride, memory + row.to(tl.int64) * memory_stride, n, decay,
                        gain, bounds, words, list_p, list_offset, tl.load(nonfinite + row), everything,
                        base_floors, states, bases, shifts, limits, histogram, row, job % blocks,
                        segments, lists, cap, tiles, level, STEPS, False, TILES * TILE,
                    )  # fmt: skip
            turn = everyone(arrivals, turn)
            ahead = gates + tl.maximum(phase + 1, 3) * workers
            for job in range(tl.program_id(0), segments * workers, tl.num_programs(0)):
                row = job // segments
                if (phase == 0) | (tl.load(gate + row) != 0):
                    everything = (phase > 1) & (tl.load(dense + row) != 0)
                    full = tl.load(overflow + phase * workers + row) if phase < 2 else 0
                    narrow_segment(
                        histogram, wants, need, states, bases, shifts, limits, ages, seen, short, base_floors,
                        floors_again, everything, full, gates + (phase + 1) * workers, ahead,
                        gates + 5 * workers, row, job % segments, segments, level, phase == 0, SELECT,
                    )  # fmt: skip
            turn = everyone(arrivals, turn)


@triton.jit(do_not_specialize=PLAIN)
def estimate(
    keys, samples, sampled, gate, arrivals, wants, need, states, bases, shifts, limits, short, floors, floors_again,
    histogram, workers, segments, blocks,
    LEVELS: tl.constexpr, MODE: tl.constexpr, GATED: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Floors (ESTIMATE) or values of a rank (RANK) from samples of the gated rows."""
    rows = tl.arange(0, ROWS)
    turn = 1
    run = True
    if GATED:
        run = tl.max(tl.load(gate + rows, mask=rows < workers, other=0)) != 0
    if run:
        for level in range(LEVELS):
            for job in range(tl.program_id(0), blocks * workers, tl.num_programs(0)):
                row = job // blocks
                if (GATED == 0) | (tl.load(gate + row) != 0):
                    mine = keys + row.to(tl.int64) * samples
                    tally_block(
                        mine, mine, samples, 1.0, 1.0, sampled, keys, keys, keys, 0, True, floors, states, bases,
                        shifts, limits, histogram, row, job % blocks, segments, 1, 1, 1, level, STEPS, True, CHUNK,
                    )  # fmt: skip
            turn = everyone(arrivals, turn)
            for job in range(tl.program_id(0), segments * workers, tl.num_programs(0)):
                row = job // segments
                if (GATED == 0) | (tl.load(gate + row) != 0):
                    narrow_segment(
                        histogram, wants, need, states, bases, shifts, limits, limits, short, short, floors,
                        floors_again, True, 0, gate, gate, gate, row, job % segments, segments, level, False, MODE,
                    )  # fmt: skip
            turn = everyone(arrivals, turn)


@triton.jit
def lower(limit, factor):
    """The floor for candidates down to this fraction of a limit."""
    floor = (limit.to(tl.float32, bitcast=True) * factor).to(tl.int32, bitcast=True) - 1
    return tl.where(limit < INFINITE, tl.where(limit < 0, -1, floor), limit)


@triton.jit(do_not_specialize=PLAIN)
def steer(floors, gaps, rates, limits_before, limits, seen, bounds, wants, overflow, segments, SMALL: tl.constexpr):
    """Next step's floor: where the limit is heading, less a gap that doubles when it was too small, else shrinks."""
    s = tl.program_id(0)
    row = tl.program_id(1)
    at = row * segments + s
    k = tl.load(wants + s)
    found = tl.load(seen + at)
    gap = tl.load(gaps + at)
    if (tl.load(overflow + row) != 0) | (found > 4 * k + 256):
        gap *= 0.7
    elif found < k:
        if tl.load(floors + at) < INFINITE:
            gap *= 2.0
    elif found > 2 * k + 128:
        gap *= 0.95
    gap = tl.minimum(tl.maximum(tl.where(gap == gap, gap, 0.06), 0.002), 0.3)
    limit = tl.load(limits + at)
    before = tl.load(limits_before + at)
    rate = tl.load(rates + at)
    now = limit.to(tl.float32, bitcast=True)
    steady = (before > 0.0) & (before < 1e30) & (limit > 0) & (now < 1e30) & (rate == rate)
    step = tl.log(tl.where(steady, now / before, 1.0))
    rate = tl.where(steady, 0.7 * rate + 0.3 * tl.minimum(tl.maximum(step, -0.3), 0.3), 0.0)
    factor = tl.exp(rate) * (1.0 - gap)
    small = tl.load(bounds + s + 1) - tl.load(bounds + s) <= SMALL
    tl.store(floors + at, lower(limit, tl.where(small, 0.5, factor)))
    tl.store(gaps + at, gap)
    tl.store(rates + at, rate)
    tl.store(limits_before + at, tl.where((limit > 0) & (limit < INFINITE), now, 0.0))


@triton.jit(do_not_specialize=PLAIN)
def sample(
    grad, memory, grad_stride, memory_stride, decay, gain, bounds, sampled, firsts, strides, keys, nonfinite, gate,
    samples, segments, STEPS: tl.constexpr, GATED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Keys of every stride-th coordinate of each segment, from a memory that holds p."""
    row = tl.program_id(1)
    run = True
    if GATED:
        run = tl.load(gate + row) != 0
    if run:
        grad += row.to(tl.int64) * grad_stride
        memory += row.to(tl.int64) * memory_stride
        bad = tl.load(nonfinite + row)
        for i in range(tl.program_id(0) * WIDTH, samples, tl.num_programs(0) * WIDTH):
            at = i + tl.arange(0, WIDTH)
            there = at < samples
            s = segment_of(sampled, tl.where(there, at, 0), segments, STEPS)
            index = tl.load(bounds + s) + tl.load(firsts + s) + (at - tl.load(sampled + s)) * tl.load(strides + s)
            inside = there & (index < tl.load(bounds + s + 1))
            key = key_of(reload(memory, grad, index, inside, decay, gain, bad))
            tl.store(keys + row.to(tl.int64) * samples + at, tl.where(inside, key, -1), mask=there)


@triton.jit
def above_block(
    grad, memory, n, decay, gain, bounds, words, list_p, list_offset, bad, everything, limits, found, row, block,
    segments, lists, cap, tiles, STEPS: tl.constexpr,
):  # fmt: skip
    """How many keys of each segment exceed its limit in one block."""
    begin = block * (TILES * TILE)
    stop = tl.minimum(begin + TILES * TILE, n)
    first = segment_of(bounds, begin, segments, STEPS)
    last = segment_of(bounds, stop - 1, segments, STEPS)
    for s in range(first, last + 1):
        limit = tl.load(limits + row * segments + s)
        low = tl.maximum(tl.load(bounds + s), begin).to(tl.int32)
        high = tl.minimum(tl.load(bounds + s + 1), stop).to(tl.int32)
        more = 0
        if everything:
            for i in range(low, high, CHUNK):
                index = i + tl.arange(0, CHUNK)
                inside = index < high
                key = key_of(reload(memory, grad, index, inside, decay, gain, bad))
                more += tl.sum(((key > limit) & inside).to(tl.int32))
        else:
            tile, place, size = block_words(words, row, block, tiles)
            for i in range(0, tl.max(size), 4):
                p, index, there = entries(list_p, list_offset, row, tile, place, size, i, lists, cap, 4)
                hit = there & (key_of(p) > limit) & (index >= low) & (index < high)
                more += tl.sum(hit.to(tl.int32))
        if more > 0:
            tl.atomic_add(found + row * segments + s, more, sem="relaxed")


@triton.jit
def incomplete(limit, floor, overflow):
    """Whether the lists may lack something that exceeds the limit."""
    return (limit < floor) | (overflow != 0)


@triton.jit
def propose(t, k, at, row, limits, ages, floors, overflow, dense, gate):
    """Make t the limit: keys exceed it in float32."""
    limit = t.to(tl.float32).to(tl.int32, bitcast=True)
    limit = tl.where(t >= 0.0, limit, -1)  # a negative or a NaN keeps everything
    limit = tl.where(k == 0, NOTHING, limit)
    tl.store(limits + at, limit)
    tl.store(ages + at, NOTHING)
    if incomplete(limit, tl.load(floors + at), tl.load(overflow + row)):
        tl.store(dense + row, 1)
    if k > 0:
        tl.store(gate + row, 1)


@triton.jit(do_not_specialize=PLAIN)
def gaussian_start(
    moments, plan, wants, bounds, bracket, limits, ages, floors, overflow, dense, gate, segments
):  # fmt: skip
    """t = abs(mean) + std * z of each segment, with z the quantile that a Gaussian exceeds k times."""
    s = tl.program_id(0)
    row = tl.program_id(1)
    at = row * segments + s
    replica = tl.arange(0, REPLICAS)
    sums = moments + at * REPLICAS * 4 + replica * 4
    size = tl.load(bounds + s + 1) - tl.load(bounds + s)
    mean = tl.sum(tl.load(sums)) / size.to(tl.float64)
    variance = tl.sum(tl.load(sums + 1)) / size.to(tl.float64) - mean * mean
    std = tl.sqrt(tl.where(variance > 0.0, variance, variance * 0.0))
    t = tl.abs(mean) + std * tl.load(plan + s * 5 + 4)
    k = tl.load(wants + s)
    t = tl.where(k >= size, tl.full((), -1.0, tl.float64), t)
    tl.store(bracket + at * 5, t)
    propose(t, k, at, row, limits, ages, floors, overflow, dense, gate)


@triton.jit(do_not_specialize=PLAIN)
def sample_start(
    values, wants, bounds, bracket, limits, ages, floors, overflow, dense, gate, segments
):  # fmt: skip
    """t = the sample's value of the wanted rank."""
    s = tl.program_id(0)
    row = tl.program_id(1)
    at = row * segments + s
    k = tl.load(wants + s)
    t = tl.load(values + at).to(tl.float32, bitcast=True).to(tl.float64)
    t = tl.where(k >= tl.load(bounds + s + 1) - tl.load(bounds + s), tl.full((), -1.0, tl.float64), t)
    tl.store(bracket + at * 5, t)
    propose(t, k, at, row, limits, ages, floors, overflow, dense, gate)


@triton.jit
def refine_segment(
    found, plan, wants, bracket, states, limits, ages, floors, overflow, dense, gate, row, s, segments, turn
):  # fmt: skip
    """One turn of ``reference.refine``: the secant of log(count) over t, inside the bracket."""
    at = row * segments + s
    c = tl.load(found + at)
    tl.store(found + at, 0)
    k = tl.load(wants + s)
    low = tl.load(plan + s * 5)
    high = tl.load(plan + s * 5 + 1)
    log_k = tl.load(plan + s * 5 + 2)
    log_size = tl.load(plan + s * 5 + 3)
    infinite = tl.full((), float("inf"), tl.float64)
    t = tl.load(bracket + at * 5)
    under = tl.where(turn == 0, log_k * 0.0, tl.load(bracket + at * 5 + 1))
    log_under = tl.where(turn == 0, log_size, tl.load(bracket + at * 5 + 2))
    over = tl.where(turn == 0, infinite, tl.load(bracket + at * 5 + 3))
    log_over = tl.where(turn == 0, log_k * 0.0, tl.load(bracket + at * 5 + 4))
    exact = c.to(tl.float64)
    settled = (tl.load(states + at) != OPEN) | (k == 0) | ((low <= exact) & (exact <= high))
    settled |= (tl.abs(t) < infinite) ^ True
    if settled:
        tl.store(states + at, CLOSED)
    else:
        log_c = tl.log(tl.where(c > 0, exact, tl.full((), 0.5, tl.float64)))
        more = c > k
        under = tl.where(more, t, under)
        log_under = tl.where(more, log_c, log_under)
        over = tl.where(more, over, t)
        log_over = tl.where(more, log_over, log_c)
        inner = under + (over - under) * (log_under - log_k) / (log_under - log_over)
        growth = (log_size - log_k) / tl.maximum(log_size - log_c, tl.full((), 1e-9, tl.float64))
        t = tl.where(over < infinite, inner, t * tl.maximum(growth, tl.full((), 1 + 1e-3, tl.float64)))
        tl.store(bracket + at * 5, t)
        tl.store(bracket + at * 5 + 1, under)
        tl.store(bracket + at * 5 + 2, log_under)
        tl.store(bracket + at * 5 + 3, over)
        tl.store(bracket + at * 5 + 4, log_over)
        propose(t, k, at, row, limits, ages, floors, overflow, dense, gate)


@triton.jit(do_not_specialize=PLAIN)
def settle(
    grad, memory, grad_stride, memory_stride, n, decay, gain,
    bounds, words, list_p, list_offset, nonfinite, overflow, dense, gates, arrivals,
    found, plan, wants, bracket, states, limits, ages, floors,
    workers, segments, lists, cap, tiles, blocks, STEPS: tl.constexpr, ROWS: tl.constexpr, RECOUNT: tl.constexpr,
):  # fmt: skip
    """Count what exceeds the thresholds and move them, up to four times. RECOUNT: and count once more."""
    rows = tl.arange(0, ROWS)
    step = 1
    for turn in range(4 + RECOUNT):
        gate = gates + turn * workers
        if turn == 4:
            gate = gates
        lacking = dense + turn * workers
        if tl.max(tl.load(gate + rows, mask=rows < workers, other=0)) != 0:
            for job in range(tl.program_id(0), blocks * workers, tl.num_programs(0)):
                row = job // blocks
                if tl.load(gate + row) != 0:
                    above_block(
                        grad + row.to(tl.int64) * grad_stride, memory + row.to(tl.int64) * memory_stride, n, decay,
                        gain, bounds, words, list_p, list_offset, tl.load(nonfinite + row), tl.load(lacking + row) != 0,
                        limits, found, row, job % blocks, segments, lists, cap, tiles, STEPS,
                    )  # fmt: skip
            step = everyone(arrivals, step)
            if turn < 4:
                for job in range(tl.program_id(0), segments * workers, tl.num_programs(0)):
                    row = job // segments
                    if tl.load(gate + row) != 0:
                        refine_segment(
                            found, plan, wants, bracket, states, limits, ages, floors, overflow,
                            dense + (turn + 1) * workers, gates + (turn + 1) * workers, row, job % segments, segments,
                            turn,
                        )  # fmt: skip
                step = everyone(arrivals, step)
        if turn == 3:
            for job in range(tl.program_id(0), segments * workers, tl.num_programs(0)):
                row = job // segments
                if incomplete(tl.load(limits + job), tl.load(floors + job), tl.load(overflow + row)):
                    tl.store(dense + 4 * workers + row, 1)
            step = everyone(arrivals, step)
    for job in range(tl.program_id(0), segments * workers, tl.num_programs(0)):
        tl.store(floors + job, lower(tl.load(limits + job), 0.92))


@triton.jit(do_not_specialize=PLAIN)
def overshoot(found, plan, wants, states, gate, segments):
    """Open again the segments that kept too many: they get the exact k."""
    s = tl.program_id(0)
    row = tl.program_id(1)
    at = row * segments + s
    c = tl.load(found + at).to(tl.float64)
    if (c > tl.load(plan + s * 5 + 1)) & (tl.load(wants + s) > 0):
        tl.store(states + at, OPEN)
        tl.store(gate + row, 1)
    else:
        tl.store(states + at, CLOSED)
