"""Kernels over what travels: sum it, give it back, undo it, check it."""

import triton
import triton.language as tl

from gradsieve.ops.triton_kernels import INFINITE, PLAIN, key_of


@triton.jit(do_not_specialize=PLAIN)
def mean(rows, out, stride, workers, n, divisor, WIDTH: tl.constexpr):
    """out = (rows summed in rank order) / divisor."""
    index = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    inside = index < n
    total = tl.load(rows + index, mask=inside, other=0.0).to(tl.float32)
    for w in range(1, workers):
        total += tl.load(rows + tl.cast(w, tl.int64) * stride + index, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + index, tl.div_rn(total, tl.zeros_like(total) + divisor).to(out.dtype.element_ty), mask=inside)


@triton.jit
def share(counts, ends, counts_stride, worker, block, blocks):
    """First slot and number of a block's elements; not more than a block has, whatever arrived."""
    size = tl.load(counts + worker * counts_stride + block)
    return tl.load(ends + worker * blocks + block) - size, tl.minimum(size, 65536)


@triton.jit
def arrived(offsets, stride, worker, slot, hit, slots, room):
    """Positions in the block, and which are there and inside."""
    hit &= (slot >= 0) & (slot < slots)
    at = tl.load(offsets + tl.cast(worker, tl.int64) * stride + slot, mask=hit, other=0).to(tl.int32) & 0xFFFF
    return at, hit & (at < room)


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
        at, hit = arrived(offsets, offsets_stride, row, start + j, j < size, slots, n - block * 65536)
        if ADD:
            new = tl.load(target + at, mask=hit, other=0.0)
            new += tl.load(values + start + j, mask=hit, other=0.0).to(tl.float32)
        else:
            new = tl.zeros([WIDTH], tl.float32)
        tl.store(target + at, new.to(target.dtype.element_ty), mask=hit)


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
            at, hit = arrived(offsets, offsets_stride, row, start + j, j < size, slots, room)
            sent = tl.load(values + start + j, mask=hit, other=0.0).to(tl.float32)
            tl.store(before + start + j, taken_back(grad, memory, at, hit, sent, decay, gain), mask=hit)
        tl.debug_barrier()
        for i in range(0, 65536, WIDTH):
            at = i + tl.arange(0, WIDTH)
            hit = at < room
            back = taken_back(grad, memory, at, hit, tl.zeros([WIDTH], tl.float32), decay, gain)
            tl.store(memory + at, back, mask=hit)
        tl.debug_barrier()
        for i in range(0, size, WIDTH):
            j = i + tl.arange(0, WIDTH)
            at, hit = arrived(offsets, offsets_stride, row, start + j, j < size, slots, room)
            tl.store(memory + at, tl.load(before + start + j, mask=hit, other=0.0), mask=hit)


@triton.jit
def taken_back(grad, memory, at, hit, sent, decay, gain):
    m = tl.load(memory + at, mask=hit, other=0.0)
    g = tl.load(grad + at, mask=hit, other=0.0).to(tl.float32) * gain
    finite = key_of(m * decay + g) < INFINITE
    return tl.where(finite, tl.div_rn(m + sent - g, tl.zeros_like(m) + decay), m)


@triton.jit(do_not_specialize=PLAIN)
def misplaced(
    counts, ends, offsets, counts_stride, offsets_stride, slots, n, bad, WIDTH: tl.constexpr
):  # fmt: skip
    """Counts and positions in range, and none twice; rising positions, as our kernels send, need one look each."""
    block = tl.program_id(0)
    row = tl.program_id(1)
    size = tl.load(counts + row * counts_stride + block)
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
    counts, ends, offsets, values, counts_stride, offsets_stride, values_stride, slots, out, quotients,
    quotients_stride, workers, n, divisor, DIVIDE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Onto zeros: a program owns a block and walks the workers in rank order, so the sum is the same everywhere.

    Only what was sent is divided: all quotients are formed before the first is written, since workers that sent
    the same coordinate share it.
    """
    block = tl.program_id(0)
    blocks = tl.num_programs(0)
    high = n - block * 65536
    out += block.to(tl.int64) * 65536
    some = tl.arange(0, 8)
    sizes = tl.load(counts + some * counts_stride + block, mask=some < workers, other=0)
    starts = (tl.load(ends + some * blocks + block, mask=some < workers, other=0) - sizes)[:, None]
    if (workers <= 8) & (tl.max(sizes) <= WIDTH):  # all at once in registers
        j = tl.arange(0, WIDTH)[None, :]
        at, hit = arrived(offsets, offsets_stride, some[:, None], starts + j, j < sizes[:, None], slots, high)
        value = tl.load(values + some.to(tl.int64)[:, None] * values_stride + starts + j, mask=hit, other=0.0)
        value = value.to(tl.float32)
        for w in range(workers):
            turn = hit & (some[:, None] == w)
            tl.store(out + at, tl.load(out + at, mask=turn, other=0.0) + value, mask=turn)
            tl.debug_barrier()
        if DIVIDE:
            total = tl.load(out + at, mask=hit, other=0.0)
            tl.debug_barrier()
            tl.store(out + at, tl.div_rn(total, tl.zeros_like(total) + divisor), mask=hit)
    else:
        for w in range(workers):
            tl.debug_barrier()
            start, size = share(counts, ends, counts_stride, w, block, blocks)
            for i in range(0, size, WIDTH):
                slot = start + i + tl.arange(0, WIDTH)
                within = i + tl.arange(0, WIDTH) < size
                position, mine = arrived(offsets, offsets_stride, w, slot, within, slots, high)
                more = tl.load(values + tl.cast(w, tl.int64) * values_stride + slot, mask=mine, other=0.0)
                old = tl.load(out + position, mask=mine, other=0.0)
                tl.store(out + position, old + more.to(tl.float32), mask=mine)
        if DIVIDE:
            for writing in tl.static_range(2):
                tl.debug_barrier()
                for w in range(workers):
                    start, size = share(counts, ends, counts_stride, w, block, blocks)
                    for i in range(0, size, WIDTH):
                        slot = start + i + tl.arange(0, WIDTH)
                        within = i + tl.arange(0, WIDTH) < size
                        position, mine = arrived(offsets, offsets_stride, w, slot, within, slots, high)
                        quotient = quotients + tl.cast(w, tl.int64) * quotients_stride + slot
                        if writing == 0:
                            old = tl.load(out + position, mask=mine, other=0.0)
                            tl.store(quotient, tl.div_rn(old, tl.zeros_like(old) + divisor), mask=mine)
                        else:
                            tl.store(out + position, tl.load(quotient, mask=mine, other=0.0), mask=mine)
