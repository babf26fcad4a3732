"""The ops on CUDA: one pass over the gradient and the memory, then kernels over the few candidates.

Same names and meaning as ``reference``, same result, in the same (index) order. Given ``into`` nothing waits for the
device, but for the first call with a layout, which brings its constants there. L workers, n coordinates, S segments,
B blocks, K slots (see ``types``).
"""

from collections.abc import Callable
from ctypes import c_float
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from gradsieve.ops import reference
from gradsieve.ops import triton_arrived as arrived
from gradsieve.ops import triton_compiled as compiled
from gradsieve.ops import triton_given as given
from gradsieve.ops import triton_sieve as sieving
from gradsieve.ops.ahead import sent_ahead
from gradsieve.ops.rng import ROUNDS
from gradsieve.ops.triton_plan import Plan, bounds_of, cdiv
from gradsieve.ops.triton_work import LARGEST, NOTHING, PRECISE, Work, running, stride
from gradsieve.types import BLOCK, Pending, Sparse

WIDTH = 1024
TOO_LARGE = 2**31 - 2**20  # coordinates: kernels count in int32, up to a stride of ``squares`` beyond the last
to_bitmap, from_bitmap = reference.to_bitmap, reference.from_bitmap


@compiled.rule("float threshold")
def threshold(pending: Pending, threshold: float) -> Sparse:
    """Keep ``abs(p) >= threshold``; a NaN is kept too, so that it is seen."""
    if not fits(pending):
        return reference.threshold(pending, threshold)
    floor = floor_of(threshold)
    slots = pending.into.slots if pending.into is not None else pending.grad_Ln.shape[1] // 64
    work = Work(pending, slots + slots // 4)
    work.sieve(floor, take=True)
    return measured(pending, work.send(floor))


@compiled.rule("SymInt[] k_S")
def topk(pending: Pending, k_S: tuple[int, ...]) -> Sparse:
    """Keep the ``k_S[s]`` largest ``abs(p)`` of each segment; of equals, the lowest index.

    A sample of p gives a floor that a few more than k exceed; the exact k are found among those. A segment where it was
    too high, or 16 times too low, is searched in the memory.
    """
    if not fits(pending):
        return reference.topk(pending, k_S)
    plan = Plan.of(pending, k_S)
    work = Work(pending, plan.exact_sampling.candidates, by_segment=True)
    work.find_floors(plan.exact_sampling)
    work.sieve()
    work.choose(plan.k_S)
    return measured(pending, work.send())


@compiled.rule("SymInt[] k_S")
def gaussiank(pending: Pending, k_S: tuple[int, ...]) -> Sparse:
    """Keep ``abs(p) > t`` with t the Gaussian quantile of each segment, refined to within [2/3, 4/3] of k."""
    if not fits(pending):
        return reference.gaussiank(pending, k_S)
    plan = Plan.of(pending, k_S)
    work = Work(pending, plan.sampling.candidates, by_segment=True)
    work.find_floors(plan.sampling)
    work.sieve(moments=True)
    work.settle(plan, 2 / 3, 4 / 3, gaussian=True)
    return measured(pending, work.send())


@compiled.rule("SymInt[] k_S, SymInt stride, SymInt start")
def sampledk(pending: Pending, k_S: tuple[int, ...], stride: int, start: int) -> Sparse:
    """Keep ``abs(p) > t`` with t the quantile of a strided sample, adapted to at least 0.8 k; the exact
    top k of the survivors where they are more than 1.3 k."""
    if not fits(pending):
        return reference.sampledk(pending, k_S, stride, start)
    plan = Plan.of(pending, k_S)
    work = Work(pending, plan.sampling.candidates, by_segment=True)
    work.find_floors(plan.sampling)
    work.sieve()
    work.rank(plan.k_S, start, stride)
    work.settle(plan, 0.8, 1.3, gaussian=False)
    work.choose(plan.k_S, gated=True)
    return measured(pending, work.send())


@compiled.rule("SymInt[] k_S, Tensor keys_LS")
def randomk(pending: Pending, k_S: tuple[int, ...], keys_LS: Tensor) -> Sparse:
    """Keep k uniformly drawn distinct coordinates of each segment, by ``keys_LS[worker, segment]``."""
    if not fits(pending):
        return reference.randomk(pending, k_S, keys_LS)
    plan = Plan.of(pending, k_S)
    device = pending.grad_Ln.device
    known = plan.firsts_S, bounds_of(pending.segments, device), plan.half_S

    def drawn() -> Tensor:
        on_device = sent_ahead(keys_LS.long(), device).contiguous()
        index_LK = torch.empty(len(keys_LS), plan.total, dtype=torch.int32, device=device)
        if plan.total:
            given.draw[cdiv(plan.total, 256), len(keys_LS)](
                index_LK, on_device, *known, plan.total, len(k_S),
                STEPS=(len(k_S) - 1).bit_length(), ROUNDS=ROUNDS, WIDTH=256, **PRECISE,
            )  # fmt: skip
        return index_LK.sort(1).values

    return send_given(pending, plan.total, drawn)


@compiled.rule("Tensor index_LK")
def take(pending: Pending, index_LK: Tensor) -> Sparse:
    """Keep the given distinct coordinates (any order, the same number for every worker)."""
    if not fits(pending):
        return reference.take(pending, index_LK)
    return send_given(pending, index_LK.shape[1], lambda: index_LK.to(torch.int32).contiguous().sort(1).values)


def send_given(pending: Pending, kept: int, make: Callable[[], Tensor]) -> Sparse:
    """Send the coordinates that ``make`` returns, sorted; it runs beside the pass over the memory."""
    work = Work(pending, None)
    into = pending.into
    if into is None:
        into = reference.empty(work.workers, work.n, kept, pending.values, work.device)

    def counted() -> Tensor:
        sorted_LK = make()
        given.place_counts[cdiv(work.blocks, 128), work.workers](
            sorted_LK,
            kept,
            into.counts_LB,
            into.counts_LB.stride(0),
            into.slots,
            work.blocks,
            STEPS=kept.bit_length(),
            **PRECISE,
        )
        return sorted_LK

    sorted_LK = beside(counted, work.device, lambda: work.sieve(NOTHING))
    parts = into.offsets_LK, into.values_LK, into.wanted_L, into.nonfinite_L
    given.place[max(cdiv(kept, 256), 1), work.workers](
        *work.sources, pending.decay, pending.gain, sorted_LK, kept, work.nonfinite_L,
        *parts, *(part.stride(0) for part in parts), into.slots, LARGEST=LARGEST[into.values_LK.dtype], WIDTH=256,
        **PRECISE,
    )  # fmt: skip
    return measured(pending, into)


def beside(first: Callable[[], Tensor], device: torch.device, second: Callable[[], None]) -> Tensor:
    """Run both at once: many small kernels hide behind one large one."""
    if device.type != "cuda":
        second()
        return first()
    here, there = torch.cuda.current_stream(device), side_stream(device)
    ready = here.record_event()
    second()  # first on the host: the device is busy with it while the small ones are launched
    with torch.cuda.stream(there):
        there.wait_event(ready)
        result = first()
    here.wait_stream(there)
    result.record_stream(here)
    return result


@lru_cache(maxsize=16)
def side_stream(device: torch.device) -> torch.cuda.Stream:
    # without priority its small kernels queue behind the large one
    return torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]


@compiled.decoder
def decode(sparse: Sparse, out_n: Tensor, divisor: float) -> Tensor:
    """``out = (sum over workers in rank order of what each sent) / divisor``: bit-equal on every replica."""
    if torch.float64 in (out_n.dtype, sparse.values_LK.dtype) or not 0 < sparse.size < TOO_LARGE:
        return reference.decode(sparse, out_n, divisor)
    direct = out_n.dtype == torch.float32 and out_n.is_contiguous()
    total_n = out_n if direct else out_n.new_empty(sparse.size, dtype=torch.float32)
    workers, blocks = sparse.counts_LB.shape
    width = min(max(1 << (3 * sparse.slots // (2 * blocks)).bit_length(), 64), 1024)
    abreast = min(1 << (workers - 1).bit_length(), 8192 // width)
    part = 16_384 if width <= 256 else BLOCK  # those of all running programs fit in the cache
    arrived.decode[(cdiv(sparse.size, part),)](
        *received(sparse), total_n, workers, sparse.size, blocks, float(divisor),
        PART=part, WORKERS=abreast, WIDTH=width, num_warps=min(max(abreast * width // 128, 4), 16), **PRECISE,
    )  # fmt: skip
    return out_n if direct else out_n.copy_(total_n)


def mean(rows_Wn: Tensor, out_n: Tensor, divisor: float) -> Tensor:
    """``out = (sum of the rows in rank order) / divisor``: the dense twin of ``decode``."""
    whole = rows_Wn.stride(1) == 1 and out_n.is_contiguous()
    if torch.float64 in (rows_Wn.dtype, out_n.dtype) or not 0 < out_n.numel() < TOO_LARGE or not whole:
        return reference.mean(rows_Wn, out_n, divisor)
    workers, n = rows_Wn.shape
    arrived.mean[(cdiv(n, WIDTH),)](
        rows_Wn, out_n, rows_Wn.stride(0), workers, n, float(divisor), WIDTH=WIDTH, **PRECISE
    )
    return out_n


def give_back(memory_Ln: Tensor, sparse: Sparse) -> None:
    """``memory += sent``: undo a sending."""
    if memory_Ln.dtype not in LARGEST or sparse.size >= TOO_LARGE:
        reference.give_back(memory_Ln, sparse)
    else:
        touch(memory_Ln, sparse, add=True)


def undo(pending: Pending, sparse: Sparse, when: Tensor) -> None:
    """Where ``when`` (one bool) is true, take the step back: ``memory = (memory + sent - gain * grad) / decay``."""
    if not fits(pending) or pending.decay == 0:
        reference.undo(pending, sparse, when)
        return
    before_LK = torch.empty(sparse.values_LK.shape, dtype=torch.float32, device=when.device)
    workers, blocks = sparse.counts_LB.shape
    arrived.undo[blocks, workers](
        pending.grad_Ln, pending.memory_Ln, stride(pending.grad_Ln), stride(pending.memory_Ln), sparse.size,
        pending.decay, pending.gain, when, *received(sparse), before_LK, stride(before_LK), WIDTH=WIDTH, **PRECISE,
    )  # fmt: skip


def clear(target_Ln: Tensor, sparse: Sparse) -> None:
    """``target = 0`` at the coordinates that were sent (momentum factor masking)."""
    if sparse.size >= TOO_LARGE:
        reference.clear(target_Ln, sparse)
    else:
        touch(target_Ln, sparse, add=False)


def misplaced(sparse: Sparse) -> Tensor:
    """True for a worker whose counts or positions are out of range, or that names a coordinate twice."""
    if sparse.size >= TOO_LARGE:
        return reference.misplaced(sparse)
    workers, blocks = sparse.counts_LB.shape
    bad_L = torch.zeros(workers, dtype=torch.int32, device=sparse.counts_LB.device)
    if blocks:
        arrived.misplaced[blocks, workers](
            *received(sparse), sparse.size, bad_L, WIDTH=256, **PRECISE,
        )  # fmt: skip
    return bad_L != 0


def touch(target_Ln: Tensor, sparse: Sparse, add: bool) -> None:
    workers, blocks = sparse.counts_LB.shape
    if blocks:
        arrived.touch[blocks, workers](
            target_Ln, stride(target_Ln), *received(sparse), sparse.size, ADD=add, WIDTH=256, **PRECISE,
        )  # fmt: skip


def measured(pending: Pending, sparse: Sparse) -> Sparse:
    """With the squared norm of the new memory, where it was asked for."""
    if not pending.measure:
        return sparse
    return replace(sparse, error_L=squared_norm(pending.memory_Ln))


def squared_norm(memory_Ln: Tensor) -> Tensor:
    workers, n = memory_Ln.shape
    parts = torch.empty(workers, 1024, dtype=torch.float64, device=memory_Ln.device)
    sieving.squares[1024, workers](memory_Ln, stride(memory_Ln), n, parts, WIDTH=WIDTH, **PRECISE)
    error_L = torch.empty(workers, dtype=torch.float64, device=memory_Ln.device)
    sieving.add_up[(workers,)](parts, error_L, PARTS=1024, **PRECISE)
    return error_L


def fits(pending: Pending) -> bool:
    """No float64, rows in one piece, something to do: else the reference does it.

    A memory may not hold the sum of what it held and a gradient, and could not tell that later. In float16 that is
    common. In the others it takes 3e38: the step is then not finite, and that coordinate of the memory not as before.
    """
    grad_Ln, memory_Ln = pending.grad_Ln, pending.memory_Ln
    narrow = all(dtype in LARGEST for dtype in (grad_Ln.dtype, memory_Ln.dtype, pending.values))
    whole = grad_Ln.stride(1) == 1 and memory_Ln.stride(1) == 1 and 0 < grad_Ln.shape[1] < TOO_LARGE
    return narrow and whole and memory_Ln.dtype != torch.float16


def floor_of(threshold: float) -> int:
    """The bits that a magnitude's exceed where it is not less than the threshold."""
    if not threshold > 0:
        return -1
    return int.from_bytes(bytes(c_float(threshold)), "little") - 1


def received(sparse: Sparse) -> tuple[Tensor | int, ...]:
    """What a kernel over the elements of all workers is given of them."""
    parts = sparse.counts_LB, sparse.offsets_LK, sparse.values_LK
    strides = (part.stride(0) for part in parts)
    return parts[0], running(parts[0]), *parts[1:], *strides, sparse.slots
