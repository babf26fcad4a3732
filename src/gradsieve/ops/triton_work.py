"""One call's scratch on the device, and the launches over it.

L workers, n coordinates, S segments, B blocks, K slots (see ``types``).
"""

import math
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from gradsieve.ops import reference
from gradsieve.ops import triton_refine as refining
from gradsieve.ops import triton_select as selecting
from gradsieve.ops import triton_send as sending
from gradsieve.ops import triton_sieve as sieving
from gradsieve.ops.triton_plan import Plan, Sampling, bounds_of, cdiv, first_segments
from gradsieve.types import Pending, Sparse

TILE, TILES, HEAD = sieving.TILE.value, sieving.TILES.value, sieving.HEAD.value
REPLICAS, FIELDS, NOTHING = sieving.REPLICAS.value, sieving.FIELDS.value, sieving.NOTHING.value
BINS, CHUNK, GROUP = selecting.BINS.value, selecting.CHUNK.value, sending.GROUP.value
COPIES = 8  # of the histogram of a single segment, against contention
# UNIT: tiles that are counted and packed together, a part of a block. WIDE: candidates of each that are read at once
# where no tile of the unit has more; DENSE: where one has
FEW = {"UNIT": 32, "WIDE": 4, "DENSE": 8, "num_warps": 1, "maxnreg": 64}  # for a threshold
MANY = {"UNIT": 16, "WIDE": 4, "DENSE": 16, "num_warps": 2, "maxnreg": 64}  # for the largest, which may sit together
ENTRIES = 4096  # of a list, while there are fewer than 1024 lists
COUNTERS = "triton.counters"  # of the cache
GATES = 64  # of the selections, which open their phases there,
CHOOSE, SETTLE, RANK = 0, 8, 24
CHOOSE_HERE, RANK_HERE, SETTLE_HERE = 32, 40, 48  # and how many programs have come to a turn
MAXNREG = 80  # fewer spill, more leave too few programs in flight
RESIDENT = 2  # programs of 256 threads and 128 registers that a processor holds
WIRE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
LARGEST = {dtype: torch.finfo(dtype).max for dtype in WIRE}
# decay * memory + gain * grad rounds twice, as in the reference; for all launches: a Triton that is not told warns
PRECISE = {"enable_fp_fusion": False}


def stride(tensor: Tensor) -> int:
    """From row to row; 0 for a single row, which keeps its alignment known whatever its length."""
    return tensor.stride(0) if tensor.shape[0] > 1 else 0


@lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


@lru_cache(maxsize=16)
def early(device: torch.device) -> dict[str, bool]:
    """Launch a kernel ahead of the end of the one before, for which it waits, where the device can."""
    able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    able = able and hasattr(tl.extra.cuda, "gdc_wait")  # an older Triton cannot
    return {"EARLY": True, "launch_pdl": True} if able else {"EARLY": False}


def running(counts_LB: Tensor) -> Tensor:
    """Where the elements of each block end among their worker's slots."""
    workers, blocks = counts_LB.shape
    ends_LB = torch.empty(workers, blocks, dtype=torch.int32, device=counts_LB.device)
    width = min(1 << (blocks - 1).bit_length(), 4096)
    sending.running[(workers,)](
        counts_LB, ends_LB, counts_LB.stride(0), blocks, WIDTH=width, num_warps=max(width // 256, 1),
        **early(counts_LB.device), **PRECISE,
    )  # fmt: skip
    return ends_LB


class Work:
    """The lists of candidates, counters that start at zero, and for rules by segment a table of what is known."""

    def __init__(self, pending: Pending, candidates: int | None, by_segment: bool = False) -> None:
        """Without ``candidates`` there are no lists: the rule knows what it sends."""
        grad_Ln, memory_Ln = pending.grad_Ln, pending.memory_Ln
        self.pending, self.device = pending, grad_Ln.device
        self.workers, self.n = grad_Ln.shape
        self.segments = len(pending.segments.keys) if by_segment else 1
        self.steps = (self.segments - 1).bit_length()
        self.tiles = cdiv(self.n, TILE)
        self.blocks = cdiv(self.tiles, TILES)
        self.listing = candidates is not None
        candidates = candidates or 0
        self.lists = min(1 << (candidates // ENTRIES).bit_length(), 1024)
        self.cap = self.room(min(candidates, self.n)) if self.listing else 1
        self.sources = grad_Ln, memory_Ln, stride(grad_Ln), stride(memory_Ln)
        self.formula = *self.sources, self.n, pending.decay, pending.gain
        lines, rows = self.workers * self.lists, self.workers * self.segments
        self.words_LT = self.integers(self.workers * self.tiles if self.listing else 1)
        self.entries = self.integers(2 * lines * self.cap)
        list_p, list_at = self.entries.chunk(2)
        self.copies = COPIES if self.segments == 1 else 1
        self.packing = MANY if by_segment else FEW
        self.units = self.blocks * (TILES // self.packing["UNIT"])
        parts = {
            "heads": lines * HEAD,
            "nonfinite_L": self.workers,
            "per_unit": self.workers * self.units * self.listing,
            "per_group": self.workers * cdiv(self.units, GROUP) * self.listing,
            "table": rows * FIELDS * by_segment,
            "gates": GATES * by_segment,
            "histogram": rows * self.copies * BINS * by_segment,
        }
        sizes = [cdiv(size, 4) * 4 for size in parts.values()]  # 16 bytes: no version of a kernel for each misalignment
        # emptied by the first kernel of a rule by segment, else by the last kernel of the call before
        self.zeros = self.integers(sum(sizes)) if by_segment else self.counters(sum(sizes))
        made = dict(zip(parts, self.zeros.split(sizes), strict=True))
        self.heads, self.nonfinite_L, self.table = made["heads"], made["nonfinite_L"], made["table"]
        self.gates, self.histogram = made["gates"], made["histogram"]
        self.per_unit, self.per_group = made["per_unit"], made["per_group"]
        self.listed = self.words_LT, list_p.view(torch.float32), list_at
        self.sizes = self.segments, self.lists, self.cap, self.tiles, self.blocks

    def counters(self, size: int) -> Tensor:
        """Two sets that take turns. They are the cache's again only once the next set is sure to be emptied."""
        sets = self.pending.cache.pop(COUNTERS, None)
        replayed = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()  # with this set each time
        if sets is None or len(sets[0]) != size or sets[0].device != self.device or replayed:
            sets = torch.zeros(2, size, dtype=torch.int32, device=self.device).unbind()
        self.next, self.lasting = sets[::-1], not replayed
        return sets[0]

    def integers(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=self.device)

    def room(self, candidates: int) -> int:
        """Of one list: those of full lists find room in others, and a place in one has 19 bits."""
        return min(cdiv(candidates, self.lists) + TILE, 2**19 - 1)

    @cached_property
    def bounds_S(self) -> Tensor:
        return bounds_of(self.pending.segments, self.device)

    @cached_property
    def moments(self) -> Tensor:
        return torch.zeros(self.workers, self.segments, REPLICAS, 4, dtype=torch.float64, device=self.device)

    def together(self) -> tuple[tuple[int], dict[str, Any]]:
        """How to launch programs that wait for each other: no more than run at once (one in the interpreter)."""
        if self.device.type != "cuda":
            return (1,), PRECISE
        jobs = max(self.blocks, self.lists * cdiv(self.cap, CHUNK)) * self.workers
        programs = min(jobs, RESIDENT * processors(self.device))
        return (programs,), {"launch_cooperative_grid": True, "num_warps": 8, "maxnreg": 128, **PRECISE}

    def find_floors(self, sampling: Sampling) -> None:
        """From keys of p at some coordinates, which lie where the lists will be."""
        fits = self.workers * sampling.total <= self.entries.numel()
        keys = self.entries if fits else self.integers(self.workers * sampling.total)
        selecting.sample[cdiv(sampling.total, 256), self.workers](
            *self.sources, self.pending.decay, self.pending.gain, self.bounds_S, sampling.bounds_S, sampling.strides_S,
            keys, sampling.total, self.segments, self.zeros, self.zeros.numel(), STEPS=self.steps, WIDTH=256,
            **early(self.device), **PRECISE,
        )  # fmt: skip
        selecting.floors[self.segments, self.workers](
            keys, sampling.bounds_S, sampling.ranks_S, self.table, sampling.total, self.segments, WIDTH=sampling.width,
            GROUPS=sampling.groups, **early(self.device), **PRECISE,
            num_warps=min(max(sampling.width // 1024, 4), 16),
        )  # fmt: skip

    def sieve(self, floor: int | None = None, moments: bool = False, take: bool = False) -> None:
        """Candidates exceed one floor, or without it their segment's."""
        unused = self.heads
        by_segment = floor is None
        wire = self.pending.values
        sieving.sieve[self.tiles, self.workers](
            *self.formula, floor or 0, self.bounds_S if by_segment else unused,
            first_segments(self.pending.segments, self.device) if by_segment else unused, self.table, self.heads,
            *self.listed, self.nonfinite_L, self.per_unit, self.moments if moments else unused, *self.sizes,
            STEPS=self.steps, SEGMENTED=by_segment, MOMENTS=moments, TAKE=take, WIRE=WIRE[wire],
            LARGEST=LARGEST[wire], ALIGN=math.gcd(self.sources[2], self.sources[3], 4), LISTING=self.listing,
            UNIT=self.packing["UNIT"], **early(self.device), num_warps=1,
            maxnreg=128 if moments else MAXNREG, **PRECISE,
        )  # fmt: skip

    def choose(self, k_S: Tensor, gated: bool = False) -> None:
        """Exactly k of each segment, or of those that ``settle`` opened again."""
        self.select(k_S, CHOOSE, CHOOSE_HERE, 0, 1, GATED=gated, SAMPLED=False)

    def rank(self, k_S: Tensor, start: int, step: int) -> None:
        """The quantile of a strided sample of each segment."""
        self.select(k_S, RANK, RANK_HERE, start, step, GATED=False, SAMPLED=True)

    def select(self, k_S: Tensor, gates: int, here: int, start: int, step: int, **kind: bool) -> None:
        grid, options = self.together()
        selecting.choose[grid](
            *self.formula, self.bounds_S, self.table, self.heads, *self.listed, self.nonfinite_L, self.histogram, k_S,
            self.gates[gates:], self.gates[here:], self.workers, *self.sizes, start, step, STEPS=self.steps,
            COPIES=self.copies, **kind, **options,
        )  # fmt: skip

    def settle(self, plan: Plan, low: float, high: float, gaussian: bool) -> None:
        """``reference.refine`` of every segment."""
        grid, options = self.together()
        bracket = torch.empty(self.workers * self.segments, 5, dtype=torch.float64, device=self.device)
        refining.settle[grid](
            *self.formula, self.bounds_S, self.table, self.heads, *self.listed, self.nonfinite_L,
            self.moments if gaussian else self.heads, bracket, plan.bands(low, high), plan.k_S, self.gates[SETTLE:],
            self.gates[SETTLE_HERE:], self.gates[CHOOSE:], self.workers, *self.sizes, STEPS=self.steps,
            GAUSSIAN=gaussian, **options,
        )  # fmt: skip

    def send(self, floor: int | None = None) -> Sparse:
        """Pack what a sieve with this floor took, or without it what lies above the segments' limits."""
        by_segment = floor is None
        grid = self.units, self.workers
        rule = self.bounds_S if by_segment else self.heads, self.table, *self.listed, self.nonfinite_L
        rule += self.per_unit, self.per_group
        options = {"STEPS": self.steps, **self.packing, **early(self.device), **PRECISE}
        if by_segment:
            sending.count[grid](*self.formula, *rule, *self.sizes, **options)
        else:
            sending.groups[cdiv(self.units, GROUP), self.workers](
                self.per_unit, self.per_group, self.units, **early(self.device), **PRECISE, num_warps=1
            )
        into = self.pending.into
        if into is None:
            slots = int(self.per_unit[: self.workers * self.units].view(self.workers, -1).sum(1).max())
            into = reference.empty(self.workers, self.n, slots, self.pending.values, self.device)
        parts = into.counts_LB, into.offsets_LK, into.values_LK, into.wanted_L, into.nonfinite_L
        next_zeros = self.heads if by_segment else self.next[0]
        sending.pack[grid](
            *self.formula, floor or 0, *rule, *parts, *(part.stride(0) for part in parts), into.slots,
            *self.sizes, next_zeros, 0 if by_segment else len(next_zeros),
            LARGEST=LARGEST[into.values_LK.dtype], SEGMENTED=by_segment, **options,
        )  # fmt: skip
        if not by_segment and self.lasting:
            self.pending.cache[COUNTERS] = self.next
        return into
