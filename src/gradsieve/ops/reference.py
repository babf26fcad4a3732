"""Every op in plain PyTorch: the formula, the oracle of the fast kernels, and the fallback.

Each op takes a ``Pending`` (``p = decay * memory + gain * grad``), writes what is not sent into its memory
and returns a ``Sparse``. L workers, n coordinates, S segments, B blocks, K slots (see ``types``).
"""

import itertools
import math
from collections.abc import Callable
from statistics import NormalDist

import torch
from torch import Tensor

from gradsieve.ops.rng import permute
from gradsieve.types import BLOCK, Pending, Sparse


def threshold(pending: Pending, threshold: float) -> Sparse:
    """Keep ``abs(p) >= threshold``; a NaN is kept too, so that it is seen."""
    p_Ln, finite_Ln = correct(pending)
    return send(pending, p_Ln, finite_Ln, ~(p_Ln.abs() < threshold))


def topk(pending: Pending, k_S: tuple[int, ...]) -> Sparse:
    """Keep the ``k_S[s]`` largest ``abs(p)`` of each segment; of equals, the lowest index."""
    p_Ln, finite_Ln = correct(pending)
    keep_Ln = torch.zeros_like(p_Ln, dtype=torch.bool)
    for (start, stop), k in zip(spans(pending), k_S, strict=True):
        keep_Ln[:, start:stop] = largest(p_Ln[:, start:stop].abs(), k)
    return send(pending, p_Ln, finite_Ln, keep_Ln)


def gaussiank(pending: Pending, k_S: tuple[int, ...]) -> Sparse:
    """Keep ``abs(p) > t`` with t the Gaussian quantile of each segment, refined to within [2/3, 4/3] of k."""
    p_Ln, finite_Ln = correct(pending)
    keep_Ln = torch.zeros_like(p_Ln, dtype=torch.bool)
    for (start, stop), k in zip(spans(pending), k_S, strict=True):
        for row in range(p_Ln.shape[0]):
            p_n = p_Ln[row, start:stop]
            if k == 0:
                continue
            mean, std = p_n.double().mean().item(), p_n.double().std(correction=0).item()
            t = refine(count_above(p_n), gaussian_start(mean, std, k, p_n.numel()), p_n.numel(), k, 2 / 3, 4 / 3)
            keep_Ln[row, start:stop] = ~(p_n.abs() <= t)
    return send(pending, p_Ln, finite_Ln, keep_Ln)


def sampledk(pending: Pending, k_S: tuple[int, ...], stride: int, start: int) -> Sparse:
    """Keep ``abs(p) > t`` with t the quantile of a strided sample, adapted to at least 0.8 k; the exact
    top k of the survivors where they are more than 1.3 k."""
    p_Ln, finite_Ln = correct(pending)
    keep_Ln = torch.zeros_like(p_Ln, dtype=torch.bool)
    for (begin, stop), k in zip(spans(pending), k_S, strict=True):
        for row in range(p_Ln.shape[0]):
            p_n = p_Ln[row, begin:stop]
            if k == 0:
                continue
            t = refine(count_above(p_n), sample_start(p_n, k, stride, start), p_n.numel(), k, 0.8, 1.3)
            magnitude_n = p_n.abs()
            keep_n = ~(magnitude_n <= t)
            if int(keep_n.sum()) > 1.3 * k:
                keep_n = largest(magnitude_n.masked_fill(~keep_n, -1.0)[None], k)[0]
            keep_Ln[row, begin:stop] = keep_n
    return send(pending, p_Ln, finite_Ln, keep_Ln)


def randomk(pending: Pending, k_S: tuple[int, ...], keys_LS: Tensor) -> Sparse:
    """Keep k uniformly drawn distinct coordinates of each segment, by ``keys_LS[worker, segment]``."""
    return take(pending, draw(pending, k_S, keys_LS))


def take(pending: Pending, index_LK: Tensor) -> Sparse:
    """Keep the given distinct coordinates (int64, any order, the same number for every worker)."""
    p_Ln, finite_Ln = correct(pending)
    keep_Ln = torch.zeros_like(p_Ln, dtype=torch.bool).scatter_(1, index_LK, True)
    return send(pending, p_Ln, finite_Ln, keep_Ln)


def decode(sparse: Sparse, out_n: Tensor, divisor: float) -> Tensor:
    """``out = (sum over workers in rank order of what each sent) / divisor``: bit-equal on every replica."""
    index_LK, valid_LK = positions(sparse)
    dtype = torch.promote_types(out_n.dtype, torch.float32)
    total_n = torch.zeros(sparse.size, dtype=dtype, device=out_n.device)
    values_LK = sparse.values_LK.to(dtype)
    if out_n.is_cpu:  # index_add_ walks its index in order there, so one call is in rank order
        total_n.index_add_(0, index_LK[valid_LK], values_LK[valid_LK])
    else:
        for index_K, values_K, valid_K in zip(index_LK, values_LK, valid_LK, strict=True):
            total_n.index_add_(0, index_K[valid_K], values_K[valid_K])
    return out_n.copy_(divide(total_n, divisor))


def mean(rows_Wn: Tensor, out_n: Tensor, divisor: float) -> Tensor:
    """``out = (sum of the rows in rank order) / divisor``: the dense twin of ``decode``."""
    total_n = rows_Wn[0].to(torch.promote_types(out_n.dtype, torch.float32), copy=True)
    for row_n in rows_Wn[1:]:
        total_n.add_(row_n)
    return out_n.copy_(divide(total_n, divisor))


def give_back(memory_Ln: Tensor, sparse: Sparse) -> None:
    """``memory += sent``: undo a sending. Exact: ``p - v`` and ``v`` were made from one ``p``."""
    index_LK, valid_LK = positions(sparse)
    rows, slots = valid_LK.nonzero(as_tuple=True)
    where = (rows, index_LK[rows, slots])
    wide = torch.promote_types(memory_Ln.dtype, torch.float32)
    memory_Ln[where] = (memory_Ln[where].to(wide) + sparse.values_LK[rows, slots].to(wide)).to(memory_Ln.dtype)


def undo(pending: Pending, sparse: Sparse, when: Tensor) -> None:
    """Where ``when`` (one bool) is true, take the step back: ``memory = (memory + sent - gain * grad) / decay``.

    Right to the rounding of that sum; a coordinate whose p is not finite kept its old memory anyway. With a decay of 0
    nothing reads the memory, and there is nothing to take back.
    """
    if pending.decay == 0 or not bool(when):
        return
    memory_Ln = pending.memory_Ln
    finite_Ln = correct(pending)[1]  # the old memory makes the same p again, whatever was sent of it
    before_Ln = memory_Ln.to(torch.promote_types(memory_Ln.dtype, torch.float32), copy=True)
    give_back(before_Ln, sparse)
    before_Ln = divide(before_Ln.sub_(pending.grad_Ln.to(before_Ln.dtype) * pending.gain), pending.decay)
    memory_Ln.copy_(torch.where(finite_Ln, before_Ln, memory_Ln))


def clear(target_Ln: Tensor, sparse: Sparse) -> None:
    """``target = 0`` at the coordinates that were sent (momentum factor masking)."""
    index_LK, valid_LK = positions(sparse)
    rows, slots = valid_LK.nonzero(as_tuple=True)
    target_Ln[rows, index_LK[rows, slots]] = 0.0


def misplaced(sparse: Sparse) -> Tensor:
    """True for a worker whose counts or positions are out of range, or that names a coordinate twice."""
    counts_LB, size = sparse.counts_LB, sparse.size
    if counts_LB.shape[1] == 0:
        return torch.zeros(len(counts_LB), dtype=torch.bool, device=counts_LB.device)
    last = size - (counts_LB.shape[1] - 1) * BLOCK
    bad_L = (counts_LB < 0).any(1) | (counts_LB > BLOCK).any(1) | (counts_LB[:, -1] > last)
    bad_L |= counts_LB.sum(1) > sparse.slots
    index_LK, valid_LK = positions(sparse)
    bad_L |= (valid_LK & (index_LK >= size)).any(1)
    ordered_LK = torch.where(valid_LK, index_LK, size + torch.arange(sparse.slots, device=index_LK.device))
    return bad_L | (ordered_LK.sort(1).values.diff(dim=1) == 0).any(1)


def positions(sparse: Sparse) -> tuple[Tensor, Tensor]:
    """The coordinate of every slot, and which slots hold an element. Padding points at 0."""
    ends_LB = sparse.counts_LB.long().cumsum(1)
    slot_LK = torch.arange(sparse.slots, device=ends_LB.device).expand(ends_LB.shape[0], -1).contiguous()
    valid_LK = slot_LK < ends_LB[:, -1:] if ends_LB.shape[1] else torch.zeros_like(slot_LK, dtype=torch.bool)
    block_LK = torch.searchsorted(ends_LB, slot_LK, right=True)
    index_LK = block_LK * BLOCK + (sparse.offsets_LK.long() & 0xFFFF)
    return index_LK.masked_fill(~valid_LK, 0), valid_LK


def divide(total_n: Tensor, divisor: float) -> Tensor:
    """In place. By a tensor: a number, CUDA turns into its reciprocal, which rounds differently."""
    return total_n.div_(torch.full((), divisor, dtype=total_n.dtype, device=total_n.device))


def to_bitmap(sparse: Sparse, bitmap_LN: Tensor) -> None:
    """Write one bit a coordinate, lowest bit first; elements must lie in ascending order."""
    index_LK, valid_LK = positions(sparse)
    bits = torch.zeros(len(index_LK), 8 * bitmap_LN.shape[1], dtype=torch.uint8, device=index_LK.device)
    bits.scatter_reduce_(1, index_LK, valid_LK.to(torch.uint8), "amax")
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=bits.device)
    bitmap_LN.copy_((bits.view(*bitmap_LN.shape, 8) * weights).sum(2, dtype=torch.uint8))


def from_bitmap(bitmap_LN: Tensor, sparse: Sparse) -> Tensor:
    """Write the offsets that a bitmap says into ``sparse``; true for a row whose bits and counts disagree."""
    shifts = torch.arange(8, dtype=torch.uint8, device=bitmap_LN.device)
    bits = ((bitmap_LN.unsqueeze(2) >> shifts) & 1).view(len(bitmap_LN), -1)
    body = torch.nn.functional.pad(bits[:, : sparse.size], (0, sparse.counts_LB.shape[1] * BLOCK - sparse.size))
    seen_LB = body.view(len(bits), -1, BLOCK).sum(2, dtype=torch.int32)
    wrong_L = (seen_LB != sparse.counts_LB).any(1) | bits[:, sparse.size :].bool().any(1)

    slot = bits.cumsum(1, dtype=torch.int32).long() - 1
    slot = torch.where(bits.bool() & (slot < sparse.slots), slot, sparse.slots)
    spare = torch.zeros(len(bits), sparse.slots + 1, dtype=torch.int16, device=bits.device)
    offset = to_int16(torch.arange(bits.shape[1], device=bits.device) % BLOCK).expand_as(slot)
    sparse.offsets_LK.copy_(spare.scatter_(1, slot, offset)[:, :-1])
    return wrong_L


def correct(pending: Pending) -> tuple[Tensor, Tensor]:
    """The error-corrected gradient p, and where it is finite: a number that the memory can hold.

    A memory of 16 bits loses what p is rounded by.
    """
    memory_Ln = pending.memory_Ln
    wide = torch.promote_types(memory_Ln.dtype, torch.float32)
    p_Ln = memory_Ln.to(wide) * pending.decay + pending.grad_Ln.to(wide) * pending.gain
    p_Ln = p_Ln.to(memory_Ln.dtype).to(wide)
    return p_Ln, p_Ln.isfinite()


def send(pending: Pending, p_Ln: Tensor, finite_Ln: Tensor, keep_Ln: Tensor) -> Sparse:
    """Pack ``p[keep]`` in index order as far as there are slots, and write the rest to the memory."""
    workers, size = p_Ln.shape
    rank_Ln = keep_Ln.cumsum(1)
    wanted_L = keep_Ln.sum(1, dtype=torch.int32)
    sparse = pending.into
    if sparse is None:
        slots = int(wanted_L.max()) if size else 0
        sparse = empty(workers, size, slots, pending.values, p_Ln.device)
    keep_Ln = keep_Ln & (rank_Ln <= sparse.slots)
    rows, index = keep_Ln.nonzero(as_tuple=True)
    slot = rank_Ln[rows, index] - 1

    blocks = sparse.counts_LB.shape[1]
    flat = torch.bincount(rows * blocks + index // BLOCK, minlength=workers * blocks)
    sparse.counts_LB.copy_(flat.view(workers, blocks))
    sparse.offsets_LK[rows, slot] = to_int16(index % BLOCK)
    sent = to_wire(p_Ln[rows, index], pending.values)
    sparse.values_LK[rows, slot] = sent
    sparse.wanted_L.copy_(wanted_L)
    sparse.nonfinite_L.copy_((~finite_Ln).sum(1, dtype=torch.int32))

    kept = p_Ln.clone()
    kept[rows, index] -= sent.to(p_Ln.dtype)
    pending.memory_Ln.copy_(torch.where(finite_Ln, kept, pending.memory_Ln))
    if not pending.measure:
        return sparse
    error_L = pending.memory_Ln.double().square().sum(1)
    return Sparse(
        size, sparse.counts_LB, sparse.offsets_LK, sparse.values_LK, sparse.wanted_L, sparse.nonfinite_L, error_L
    )


def empty(workers: int, size: int, slots: int, values: torch.dtype, device: torch.device) -> Sparse:
    """A ``Sparse`` with room for ``slots`` elements a worker."""
    blocks = -(-size // BLOCK)
    return Sparse(
        size,
        torch.zeros(workers, blocks, dtype=torch.int32, device=device),
        torch.zeros(workers, slots, dtype=torch.int16, device=device),
        torch.zeros(workers, slots, dtype=values, device=device),
        torch.zeros(workers, dtype=torch.int32, device=device),
        torch.zeros(workers, dtype=torch.int32, device=device),
    )


def to_wire(p: Tensor, values: torch.dtype) -> Tensor:
    """Round to the wire's precision, saturating: what does not fit stays in the memory."""
    limit = torch.finfo(values).max
    return p.clamp(-limit, limit).to(values)


def to_int16(offset: Tensor) -> Tensor:
    """An unsigned 16-bit number in int16 storage."""
    return torch.where(offset >= 0x8000, offset - 0x10000, offset).to(torch.int16)


def spans(pending: Pending) -> list[tuple[int, int]]:
    return list(itertools.pairwise(pending.segments.bounds))


def largest(magnitude_Ln: Tensor, k: int) -> Tensor:
    """A mask of the k largest of each row; a stable sort gives ties to the lowest index."""
    order_Ln = magnitude_Ln.sort(dim=1, descending=True, stable=True).indices
    return torch.zeros_like(magnitude_Ln, dtype=torch.bool).scatter_(1, order_Ln[:, :k], True)


def draw(pending: Pending, k_S: tuple[int, ...], keys_LS: Tensor) -> Tensor:
    """k distinct coordinates of each segment: the first k of a keyed permutation of it."""
    device = pending.grad_Ln.device
    k = torch.tensor(k_S, dtype=torch.int64, device=device)
    bounds = pending.segments.tensor(device)
    segment_K = torch.repeat_interleave(torch.arange(len(k_S), device=device), k)
    slot_K = torch.arange(len(segment_K), device=device) - (k.cumsum(0) - k)[segment_K]
    size_K = bounds.diff()[segment_K]
    keys_LK = keys_LS.to(device)[:, segment_K]
    return permute(slot_K.expand_as(keys_LK), size_K.expand_as(keys_LK), keys_LK) + bounds[segment_K]


def gaussian_start(mean: float, std: float, k: int, size: int) -> float:
    """The threshold that a Gaussian of this mean and spread would exceed k times (both tails)."""
    return abs(mean) + std * NormalDist().inv_cdf(1 - k / size / 2) if k < size else -1.0


def sample_start(p_n: Tensor, k: int, stride: int, start: int) -> float:
    """The magnitude that the sample exceeds as often, in proportion, as k of all."""
    size = p_n.numel()
    if k >= size:
        return -1.0
    sample = p_n[start % min(stride, size) :: stride].abs().nan_to_num(nan=math.inf)
    rank = max(1, int(sample.numel() * k / size))
    return min(float(sample.sort(descending=True).values[rank - 1]), torch.finfo(p_n.dtype).max)


def count_above(p_n: Tensor) -> Callable[[float], int]:
    magnitude_n = p_n.abs()
    return lambda t: int((~(magnitude_n <= t)).sum())


def refine(count: Callable[[float], int], t: float, size: int, k: int, low: float, high: float) -> float:
    """Move ``t`` until ``low * k <= count(t) <= high * k``, at most four times.

    The secant of log(count) over t between the nearest points below and above: exact for an exponential
    tail, and it never leaves the bracket, where halving and growing by half overshoots. Before there is a point above,
    t grows fourfold at most: where nearly all exceed t, their count says little of the tail.
    """
    under, log_under = 0.0, math.log(size)  # all of them exceed 0, or nearly
    over, log_over = math.inf, 0.0
    for _ in range(4):
        c = count(t)
        if low * k <= c <= high * k or not math.isfinite(t):
            break
        log_c = math.log(max(c, 0.5))
        if c > k:
            under, log_under = t, log_c
        else:
            over, log_over = t, log_c
        goal = math.log(k)
        if math.isfinite(over):
            t = under + (over - under) * (log_under - goal) / (log_under - log_over)
        else:
            t *= min(max((math.log(size) - goal) / max(math.log(size) - log_c, 1e-9), 1 + 1e-3), 4.0)
    return t
