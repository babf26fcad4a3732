"""Kernels over what travels: sum it, give it back, undo it, check it."""

import triton
import triton.language as tl

from gradsieve.ops.triton_sieve import INFINITE, PLAIN, key_of, nearest


@triton.jit
def over(total, divisor):
    return tl.div_rn(total, tl.zeros_like(total) + divisor)


@triton.jit(do_not_specialize=PLAIN)
def mean(rows, out, stride, workers, n, divisor, WIDTH: tl.constexpr):
    """out = (rows summed in rank order) / divisor."""
    index = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = index < n
    total = tl.load(rows + index, mask=inside, other=0.0).to(tl.float32)
    for w in range(1, workers):
        total += tl.load(rows + tl.cast(w, tl.int64) * stride + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + index, over(total, divisor).to(out.dtype.element_ty), mask=inside)


@triton.jit
def share(counts, ends, counts_stride, worker, block, blocks):
    """First slot and number of a block's elements; not more than a block has, whatever arrived."""
    size = tl.load(counts + tl.cast(worker, tl.int64) * counts_stride + block)
    return tl.load(ends + worker * blocks + block) - size, tl.minimum(size, 65536)


@triton.jit
def arrived(offsets, stride, worker, slot, hit, slots, low, room):
    """Positions from ``low`` on in the block, and which are there and not beyond ``room``."""
    hit &= (slot >= 0) & (slot < slots)
    at = tl.load(offsets + tl.cast(worker, tl.int64) * stride + slot, mask=hit, other=0).to(tl.int32) & 0xFFFF
    return at - low, hit & (at >= low) & (at - low < room)


@triton.jit(do_not_specialize=PLAIN)
def touch(
    target, target_stride, counts, ends, offsets, values, counts_stride, offsets_stride, values_stride, slots, n,
    ADD: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """target += sent, or target = 0, at the coordinates that were sent."""
    block = tl.program_id(0)
    row = tl.program_id(1)
    start, size = share(counts, ends, counts_stride, row, block, tl.num_programs(0))
    target += row.to(tl.int64) * target_stride + block.to(tl.int64) * 65536
    values += row.to(tl.int64) * values_stride
    for i in range(0, size, WIDTH):
        j = i + tl.arange(0, WIDTH)
        at, hit = arrived(offsets, offsets_stride, row, start + j, j < size, slots, 0, n - block * 65536)
        if ADD:
            new = tl.load(target + at, mask=hit, other=0.0).to(tl.float32)
            new += tl.load(values + start + j, mask=hit, other=0.0).to(tl.float32)
        else:
            new = tl.zeros([WIDTH], tl.float32)
        tl.store(target + at, nearest(new, target.dtype.element_ty), mask=hit)


@triton.jit(do_not_specialize=PLAIN)
def undo(
    grad, memory, grad_stride, memory_stride, n, decay, gain, when,
    counts, ends, offsets, values, counts_stride, offsets_stride, values_stride, slots, before, before_stride,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """memory = (memory + sent - gain * grad) / decay where ``when``; the sent are set aside before the others."""
    block = tl.program_id(0)
    row = tl.program_id(1)
    if tl.load(when) != 0:
        start, size = share(counts, ends, counts_stride, row, block, tl.num_programs(0))
        room = n - block * 65536
        grad += row.to(tl.int64) * grad_stride + block.to(tl.int64) * 65536
        memory += row.to(tl.int64) * memory_stride + block.to(tl.int64) * 65536
        values += row.to(tl.int64) * values_stride
        before += row.to(tl.int64) * before_stride
        for i in range(0, size, WIDTH):
            j = i + tl.arange(0, WIDTH)
            at, hit = arrived(offsets, offsets_stride, row, start + j, j < size, slots, 0, room)
            sent = tl.load(values + start + j, mask=hit, other=0.0).to(tl.float32)
            tl.store(before + start + j, taken_back(grad, memory, at, hit, sent, decay, gain), mask=hit)
        tl.debug_barrier()
        for i in range(0, 65536, WIDTH):
            at = i + tl.arange(0, WIDTH)
            hit = at < room
            back = taken_back(grad, memory, at, hit, tl.zeros([WIDTH], tl.float32), decay, gain)
            tl.store(memory + at, nearest(back, memory.dtype.element_ty), mask=hit)
        tl.debug_barrier()
        for i in range(0, size, WIDTH):
            j = i + tl.arange(0, WIDTH)
            at, hit = arrived(offsets, offsets_stride, row, start + j, j < size, slots, 0, room)
            back = tl.load(before + start + j, mask=hit, other=0.0)
            tl.store(memory + at, nearest(back, memory.dtype.element_ty), mask=hit)


@triton.jit
def taken_back(grad, memory, at, hit, sent, decay, gain):
    m = tl.load(memory + at, mask=hit, other=0.0).to(tl.float32)
    g = tl.load(grad + at, mask=hit, other=0.0).to(tl.float32) * gain
    finite = key_of(nearest(m * decay + g, memory.dtype.element_ty)) < INFINITE
    return tl.where(finite, over(m + sent - g, decay), m)


@triton.jit(do_not_specialize=PLAIN)
def misplaced(
    counts, ends, offsets, values, counts_stride, offsets_stride, values_stride, slots, n, bad, WIDTH: tl.constexpr
):  # fmt: skip
    """Counts and positions in range, and none twice; rising positions, as our kernels send, need one look each."""
    block = tl.program_id(0)
    row = tl.program_id(1)
    size = tl.load(counts + row.to(tl.int64) * counts_stride + block)
    stop = tl.load(ends + row * tl.num_programs(0) + block)
    room = tl.minimum(n - block * 65536, 65536)
    wrong = (size < 0) | (size > room) | (stop > slots) | (stop < size)
    if wrong:
        tl.store(bad + row, 1)
    else:
        offsets += row.to(tl.int64) * offsets_stride + stop - size
        twice = 0
        outside = 0
        falls = 0
        for i in range(0, size, WIDTH):
            j = i + tl.arange(0, WIDTH)
            at = tl.load(offsets + j, mask=j < size, other=0).to(tl.int32) & 0xFFFF
            ahead = tl.load(offsets + j + 1, mask=j + 1 < size, other=-1).to(tl.int32) & 0xFFFF
            outside += tl.sum(((j < size) & (at >= room)).to(tl.int32))
            falls += tl.sum(((j + 1 < size) & (ahead <= at)).to(tl.int32))
        if falls > 0:
            for i in range(0, size, WIDTH):
                j = i + tl.arange(0, WIDTH)
                at = tl.load(offsets + j, mask=j < size, other=0).to(tl.int32) & 0xFFFF
                for other in range(size):
                    same = (j < size) & (j != other) & (at == (tl.load(offsets + other).to(tl.int32) & 0xFFFF))
                    twice += tl.sum(same.to(tl.int32))
        if outside + twice > 0:
            tl.store(bad + row, 1)


@triton.jit(do_not_specialize=PLAIN)
def decode(
    counts, ends, offsets, values, counts_stride, offsets_stride, values_stride, slots, out, workers, n, blocks,
    divisor, PART: tl.constexpr, WORKERS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out = (sum in rank order of what each worker sent) / divisor, of one part of a block, while the cache holds it.

    What one worker alone sent is its own sum. The cells first count their senders, so that only the others take turns.
    """
    begin = tl.program_id(0) * PART
    block = begin // 65536
    low = begin % 65536
    room = tl.minimum(n - begin, PART)
    out += begin.to(tl.int64)
    worker = tl.arange(0, WORKERS)
    sizes = tl.load(counts + worker.to(tl.int64) * counts_stride + block, mask=worker < workers, other=0)
    starts = tl.load(ends + worker * blocks + block, mask=worker < workers, other=0) - sizes
    if (workers <= WORKERS) & (tl.max(sizes) <= WIDTH):  # all at once in registers
        j = tl.arange(0, WIDTH)[None, :]
        slot = starts[:, None] + j
        hit = j < sizes[:, None]
        at, hit = arrived(offsets, offsets_stride, worker[:, None], slot, hit, slots, low, room)
        value = tl.load(values + worker.to(tl.int64)[:, None] * values_stride + slot, mask=hit, other=0.0)
        value = value.to(tl.float32) + 0.0  # as a sum that starts at 0 has it: no -0.0
        clear(out, room, PART)
        cell = (out + at).to(tl.pointer_type(tl.int32), bitcast=True)
        tl.atomic_add(cell, tl.full([WORKERS, WIDTH], 1, tl.int32), mask=hit, sem="relaxed")
        tl.debug_barrier()
        senders = tl.load(cell, mask=hit, other=0, cache_modifier=".cg")
        shared = hit & (senders > 1)
        tl.debug_barrier()
        tl.store(out + at, tl.where(shared, 0.0, over(value, divisor)), mask=hit)
        if tl.max(senders) > 1:
            for w in range(workers):
                tl.debug_barrier()
                turn = shared & (worker[:, None] == w)
                tl.store(out + at, tl.load(out + at, mask=turn, other=0.0) + value, mask=turn)
            tl.debug_barrier()
            total = tl.load(out + at, mask=shared, other=0.0)
            tl.debug_barrier()
            tl.store(out + at, over(total, divisor), mask=shared)
    else:
        clear(out, room, PART)
        for w in range(workers):
            start, size = share(counts, ends, counts_stride, w, block, blocks)
            for i in range(0, size, WIDTH):
                slot = start + i + tl.arange(0, WIDTH)
                hit = i + tl.arange(0, WIDTH) < size
                at, hit = arrived(offsets, offsets_stride, w, slot, hit, slots, low, room)
                value = tl.load(values + tl.cast(w, tl.int64) * values_stride + slot, mask=hit, other=0.0)
                tl.store(out + at, tl.load(out + at, mask=hit, other=0.0) + value.to(tl.float32), mask=hit)
            tl.debug_barrier()
        for i in range(0, room, WIDTH):
            place = i + tl.arange(0, WIDTH)
            total = tl.load(out + place, mask=place < room, other=0.0)
            tl.store(out + place, over(total, divisor), mask=place < room)


@triton.jit
def clear(out, room, PART: tl.constexpr):
    place = tl.arange(0, PART)
    if room == PART:  # without a mask stores are 16 bytes wide whatever n is
        tl.store(out + place, tl.zeros([PART], tl.float32))
    else:
        tl.store(out + place, tl.zeros([PART], tl.float32), mask=place < room)
    tl.debug_barrier()
