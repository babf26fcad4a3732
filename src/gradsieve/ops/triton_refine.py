"""Kernels of the rules that estimate: a first threshold for each segment, then count and refine.

``reference.refine`` to the letter, from a start whose moments are summed in another order: elements next to a
Gaussian threshold may differ. Counts come from the sieve's lists where the threshold is not under their floor, and
from the memory else.
"""

import triton
import triton.language as tl

from gradsieve.ops.triton_select import CHUNK, CLOSED, OPEN, everyone, list_length, unlist
from gradsieve.ops.triton_sieve import (
    AGE,
    FIELDS,
    FLOOR,
    FOUND,
    LACKING,
    LIMIT,
    NOTHING,
    PLAIN,
    REPLICAS,
    STATE,
    TILE,
    TILES,
    WHOLE,
    key_of,
    reload,
    segment_of,
)

TURNS: tl.constexpr = tl.constexpr(4)
LARGEST_KEY: tl.constexpr = tl.constexpr(0x7F7FFFFF)


@triton.jit
def incomplete(at):
    """Whether the lists may lack something that exceeds the limit."""
    return (tl.load(at + LIMIT) < tl.load(at + FLOOR)) | (tl.load(at + LACKING) != 0)


@triton.jit
def propose(t, k, at, gate, lacking):
    """Make t the limit: keys exceed it in float32."""
    limit = t.to(tl.float32).to(tl.int32, bitcast=True)
    limit = tl.where(t >= 0.0, limit, -1)  # a negative or a NaN keeps everything
    tl.store(at + LIMIT, tl.where(k == 0, NOTHING, limit))
    tl.store(at + AGE, NOTHING)
    if k > 0:
        tl.store(gate, 1)
        if (limit < tl.load(at + FLOOR)) | (tl.load(at + LACKING) != 0):
            tl.store(lacking, 1)


@triton.jit
def gaussian_threshold(moments, quantile, size):
    """abs(mean) + std * z, with z the quantile that a Gaussian exceeds k times."""
    sums = moments + tl.arange(0, REPLICAS) * 4
    mean = tl.sum(tl.load(sums)) / size.to(tl.float64)
    variance = tl.sum(tl.load(sums + 1)) / size.to(tl.float64) - mean * mean
    return tl.abs(mean) + tl.sqrt(tl.where(variance > 0.0, variance, variance * 0.0)) * quantile


@triton.jit
def above_list(bounds, table, heads, list_p, list_at, line, begin, segments, lists, cap, STEPS: tl.constexpr):
    """How many keys of a piece of one list exceed their segment's limit."""
    row = line // lists
    length = list_length(heads, line, cap)
    if begin < length:
        j = begin + tl.arange(0, CHUNK)
        there = j < length
        key = key_of(tl.load(list_p + tl.cast(line, tl.int64) * cap + j, mask=there, other=0.0))
        if STEPS == 0:
            at = table + row * FIELDS
            more = tl.sum((there & (key > tl.load(at + LIMIT))).to(tl.int32))
            if (more > 0) & (tl.load(at + STATE) == OPEN) & (incomplete(at) ^ True):
                tl.atomic_add(at + FOUND, more, sem="relaxed")
        else:
            index = tl.load(list_at + tl.cast(line, tl.int64) * cap + j, mask=there, other=0)
            at = table + (row * segments + segment_of(bounds, index, segments, STEPS)) * FIELDS
            hit = there & (key > tl.load(at + LIMIT)) & (tl.load(at + STATE) == OPEN) & (incomplete(at) ^ True)
            tl.atomic_add(at + FOUND, tl.full([CHUNK], 1, tl.int32), mask=hit, sem="relaxed")


@triton.jit
def above_memory(
    grad, memory, n, decay, gain, bounds, table, bad, row, block, segments, STEPS: tl.constexpr
):  # fmt: skip
    """How many keys of one block exceed their segment's limit, of the segments that the lists lack."""
    begin = block * (TILES * TILE)
    stop = tl.minimum(begin + TILES * TILE, n)
    first = segment_of(bounds, begin, segments, STEPS)
    last = segment_of(bounds, stop - 1, segments, STEPS)
    for s in range(first, last + 1):
        at = table + (row * segments + s) * FIELDS
        if incomplete(at) & (tl.load(at + STATE) == OPEN):
            limit = tl.load(at + LIMIT)
            high = tl.minimum(tl.load(bounds + s + 1), stop).to(tl.int32)
            more = 0
            for i in range(tl.maximum(tl.load(bounds + s), begin).to(tl.int32), high, CHUNK):
                index = i + tl.arange(0, CHUNK)
                inside = index < high
                key = key_of(reload(memory, grad, index, inside, decay, gain, bad))
                more += tl.sum(((key > limit) & inside).to(tl.int32))
            if more > 0:
                tl.atomic_add(at + FOUND, more, sem="relaxed")


@triton.jit
def refine(bracket, band, at, k, gate, lacking, turn):
    """One turn of ``reference.refine``: the secant of log(count) over t, inside the bracket."""
    c = tl.load(at + FOUND)
    low = tl.load(band)
    high = tl.load(band + 1)
    log_k = tl.load(band + 2)
    log_size = tl.load(band + 3)
    infinite = tl.full((), float("inf"), tl.float64)
    t = tl.load(bracket)
    under = tl.where(turn == 0, log_k * 0.0, tl.load(bracket + 1))
    log_under = tl.where(turn == 0, log_size, tl.load(bracket + 2))
    over = tl.where(turn == 0, infinite, tl.load(bracket + 3))
    log_over = tl.where(turn == 0, log_k * 0.0, tl.load(bracket + 4))
    exact = c.to(tl.float64)
    settled = (k == 0) | ((low <= exact) & (exact <= high)) | ((tl.abs(t) < infinite) ^ True)
    if settled:
        tl.store(at + STATE, CLOSED)
    else:
        log_c = tl.log(tl.where(c > 0, exact, tl.full((), 0.5, tl.float64)))
        more = c > k
        under = tl.where(more, t, under)
        log_under = tl.where(more, log_c, log_under)
        over = tl.where(more, over, t)
        log_over = tl.where(more, log_over, log_c)
        inner = under + (over - under) * (log_under - log_k) / (log_under - log_over)
        growth = (log_size - log_k) / tl.maximum(log_size - log_c, tl.full((), 1e-9, tl.float64))
        growth = tl.minimum(tl.maximum(growth, tl.full((), 1 + 1e-3, tl.float64)), tl.full((), 4.0, tl.float64))
        t = tl.where(over < infinite, inner, t * growth)
        tl.store(bracket, t)
        tl.store(bracket + 1, under)
        tl.store(bracket + 2, log_under)
        tl.store(bracket + 3, over)
        tl.store(bracket + 4, log_over)
        tl.store(at + FOUND, 0)
        propose(t, k, at, gate, lacking)


@triton.jit(do_not_specialize=PLAIN)
def settle(
    grad, memory, grad_stride, memory_stride, n, decay, gain,
    bounds, table, heads, words, list_p, list_at, nonfinite, moments, bracket, bands, wants, gates, arrivals, reopened,
    workers, segments, lists, cap, tiles, blocks, STEPS: tl.constexpr, GAUSSIAN: tl.constexpr,
):  # fmt: skip
    """A first threshold for each segment, then count what exceeds it and move it, up to four times.

    GAUSSIAN: the first is the Gaussian quantile. Else it is the sample's, which LIMIT holds, and a segment that ends
    with too many is opened again, for the exact k.
    """
    open = gates
    lacking = gates + TURNS + 2
    step = 1
    for job in range(tl.program_id(0), segments * workers, tl.num_programs(0)):
        s = job % segments
        at = table + job * FIELDS
        size = tl.load(bounds + s + 1) - tl.load(bounds + s)
        k = tl.load(wants + s)
        if GAUSSIAN:
            t = gaussian_threshold(moments + job * REPLICAS * 4, tl.load(bands + s * 5 + 4), size)
        else:
            t = tl.minimum(tl.load(at + LIMIT), LARGEST_KEY).to(tl.float32, bitcast=True).to(tl.float64)
        t = tl.where(k >= size, tl.full((), -1.0, tl.float64), t)
        tl.store(bracket + job * 5, t)
        propose(t, k, at, open, lacking)
    step = everyone(arrivals, step)
    for turn in range(TURNS + 1):
        if (tl.load(open + turn) != 0) & ((turn < TURNS) | (GAUSSIAN == 0)):
            lines = lists * workers
            for job in range(tl.program_id(0), lines * ((cap + CHUNK - 1) // CHUNK), tl.num_programs(0)):
                above_list(
                    bounds, table, heads, list_p, list_at, job % lines, job // lines * CHUNK, segments, lists, cap,
                    STEPS,
                )  # fmt: skip
            if tl.load(lacking + turn) != 0:
                for job in range(tl.program_id(0), blocks * workers, tl.num_programs(0)):
                    row = job // blocks
                    above_memory(
                        grad + row.to(tl.int64) * grad_stride, memory + row.to(tl.int64) * memory_stride, n, decay,
                        gain, bounds, table, tl.load(nonfinite + row), row, job % blocks, segments, STEPS,
                    )  # fmt: skip
            step = everyone(arrivals, step)
            if turn < TURNS:
                for job in range(tl.program_id(0), segments * workers, tl.num_programs(0)):
                    s = job % segments
                    at = table + job * FIELDS
                    if tl.load(at + STATE) == OPEN:
                        refine(
                            bracket + job * 5, bands + s * 5, at, tl.load(wants + s), open + turn + 1,
                            lacking + turn + 1, turn,
                        )  # fmt: skip
                step = everyone(arrivals, step)
    for job in range(tl.program_id(0), segments * workers, tl.num_programs(0)):
        s = job % segments
        at = table + job * FIELDS
        lacks = incomplete(at)
        if lacks:
            tl.store(at + LACKING, WHOLE)
            tl.store(lacking + TURNS + 1, 1)
        if GAUSSIAN == 0:
            many = (tl.load(at + FOUND).to(tl.float64) > tl.load(bands + s * 5 + 1)) & (tl.load(wants + s) > 0)
            tl.store(at + STATE, tl.where(many, OPEN, CLOSED))
            if many:
                tl.store(reopened + lacks.to(tl.int32), 1)
    step = everyone(arrivals, step)
    if tl.load(lacking + TURNS + 1) != 0:
        for job in range(tl.program_id(0), blocks * workers, tl.num_programs(0)):
            row = job // blocks
            begin = job % blocks * (TILES * TILE)
            stop = tl.minimum(begin + TILES * TILE, n)
            first = segment_of(bounds, begin, segments, STEPS)
            last = segment_of(bounds, stop - 1, segments, STEPS)
            for s in range(first, last + 1):
                if tl.load(table + (row * segments + s) * FIELDS + LACKING) == WHOLE:
                    low = tl.maximum(tl.load(bounds + s), begin).to(tl.int32)
                    unlist(words, row, low, tl.minimum(tl.load(bounds + s + 1), stop).to(tl.int32), tiles)
