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
from gradsieve.ops.triton_launch import launch
from gradsieve.ops.triton_plan import Plan, Sampling, Strided, bounds_of, cdiv, first_segments
from gradsieve.types import Pending, Sparse

TILE, TILES, UNITS, HEAD, REPLICAS, BINS, FIELDS = 512, 128, 4, 8, 64, 2048, 16
GATES = 64
NOTHING = 0x7FFFFFFF
MAXNREG = 80  # fewer spill, more leave too few programs in flight
RESIDENT = 2  # programs of 256 threads and 128 registers that a processor holds
WIRE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
LARGEST = {dtype: torch.finfo(dtype).max for dtype in WIRE}
PRECISE = {"enable_fp_fusion": False}  # decay * memory + gain * grad rounds twice, as in the reference


def stride(tensor: Tensor) -> int:
    """From row to row; 0 for a single row, which keeps its alignment known whatever its length."""
    return tensor.stride(0) if tensor.shape[0] > 1 else 0


def running(counts_LU: Tensor, units: int = 1) -> Tensor:
    """Where the elements of each block, which has so many units, end among their worker's slots."""
    workers, blocks = len(counts_LU), counts_LU.shape[1] // units
    ends_LB = torch.empty(workers, blocks, dtype=torch.int32, device=counts_LU.device)
    width = min(1 << (blocks - 1).bit_length(), 4096)
    launch(
        sending.running,
        (workers,),
        counts_LU,
        ends_LB,
        counts_LU.stride(0),
        blocks,
        WIDTH=width,
        UNITS=units,
        num_warps=max(width // 256, 1),
    )
    return ends_LB


@lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


class Work:
    """The lists of candidates, counters that start at zero, and for rules by segment a table of what is known."""

    def __init__(self, pending: Pending, candidates: int, by_segment: bool = False) -> None:
        grad_Ln, memory_Ln = pending.grad_Ln, pending.memory_Ln
        self.pending, self.device = pending, grad_Ln.device
        self.workers, self.n = grad_Ln.shape
        self.segments = len(pending.segments.keys) if by_segment else 1
        self.steps = (self.segments - 1).bit_length()
        self.tiles = cdiv(self.n, TILE)
        self.blocks = cdiv(self.tiles, TILES)
        self.lists = min(1 << (candidates // 4096).bit_length(), 1024)
        self.cap = self.room(min(candidates, self.n))
        self.sources = grad_Ln, memory_Ln, stride(grad_Ln), stride(memory_Ln)
        self.formula = *self.sources, self.n, pending.decay, pending.gain
        lines, rows = self.workers * self.lists, self.workers * self.segments
        self.words_LT = torch.empty(self.workers, self.tiles, dtype=torch.int32, device=self.device)
        self.list_p = torch.empty(lines, self.cap, device=self.device)
        self.list_at = torch.empty(lines, self.cap, dtype=torch.int32, device=self.device)
        self.copies = 16 if self.segments == 1 else 1
        sizes = [lines * HEAD, self.workers * self.blocks * UNITS, self.workers]
        sizes += [rows * FIELDS, GATES, rows * self.copies * BINS] if by_segment else [0, 0, 0]
        zeros = torch.zeros(sum(sizes), dtype=torch.int32, device=self.device)
        parts = zeros.split(sizes)
        self.heads, chosen, self.nonfinite_L, self.table, self.gates, self.histogram = parts
        self.chosen_LU = chosen.view(self.workers, self.blocks * UNITS)
        self.listed = self.words_LT, self.list_p, self.list_at
        self.sizes = self.segments, self.lists, self.cap, self.tiles, self.blocks

    def room(self, candidates: int) -> int:
        """Of one list: lists are hardly ever uneven by more than a tile, and a place in one has 21 bits."""
        return min(cdiv(candidates, self.lists) + TILE, 2**21 - 1)

    @cached_property
    def bounds_S(self) -> Tensor:
        return bounds_of(self.pending.segments, self.device)

    @cached_property
    def moments(self) -> Tensor:
        return torch.zeros(self.workers, self.segments, REPLICAS, 4, dtype=torch.float64, device=self.device)

    def together(self, jobs: int) -> tuple[tuple[int], dict[str, Any]]:
        """How to launch programs that wait for each other: no more than run at once (one in the interpreter)."""
        if self.device.type != "cuda":
            return (1,), PRECISE
        programs = max(min(jobs * self.workers, RESIDENT * processors(self.device)), 1)
        return (programs,), {"launch_cooperative_grid": True, "num_warps": 8, "maxnreg": 128, **PRECISE}

    def sample(self, strided: Strided, start: int, jitter: bool) -> Tensor:
        """Keys of p at some coordinates, ahead of the sieve."""
        keys = torch.empty(self.workers, strided.total, dtype=torch.int32, device=self.device)
        launch(selecting.sample, (cdiv(strided.total, 256), self.workers),
            *self.sources, self.pending.decay, self.pending.gain, self.bounds_S, strided.bounds_S, strided.strides_S,
            keys, start, strided.total, self.segments, STEPS=self.steps, JITTER=jitter, WIDTH=256, **PRECISE,
        )  # fmt: skip
        return keys

    def find_floors(self, sampling: Sampling) -> None:
        keys = self.sample(sampling, 0, True)
        launch(selecting.floors, (self.segments, self.workers),
            keys, sampling.bounds_S, sampling.ranks_S, self.table, sampling.total, self.segments, WIDTH=sampling.width,
            num_warps=max(sampling.width // 1024, 4),
        )  # fmt: skip

    def sieve(self, floor: int | None = None, moments: bool = False, take: bool = False) -> None:
        """Candidates exceed one floor, or without it their segment's."""
        unused = self.heads
        by_segment = floor is None
        wire = self.pending.values
        launch(sieving.sieve, (self.tiles, self.workers),
            *self.formula, floor or 0, self.bounds_S if by_segment else unused,
            first_segments(self.pending.segments, self.device) if by_segment else unused, self.table, self.heads,
            *self.listed, self.nonfinite_L, self.chosen_LU, self.moments if moments else unused, *self.sizes,
            STEPS=self.steps, SEGMENTED=by_segment, MOMENTS=moments, TAKE=take, WIRE=WIRE[wire], LARGEST=LARGEST[wire],
            ALIGN=math.gcd(self.sources[2], self.sources[3], 4), num_warps=1, maxnreg=128 if moments else MAXNREG,
            **PRECISE,
        )  # fmt: skip

    def choose(self, k_S: Tensor, gated: bool = False) -> None:
        """Exactly k of each segment, or of those that ``settle`` opened again."""
        grid, options = self.together(max(self.blocks, self.lists))
        launch(selecting.choose, grid,
            *self.formula, self.bounds_S, self.table, self.heads, *self.listed, self.nonfinite_L, self.histogram, k_S,
            self.gates, self.gates[32:], self.workers, *self.sizes, STEPS=self.steps, COPIES=self.copies, GATED=gated,
            **options,
        )  # fmt: skip

    def rank(self, keys: Tensor, strided: Strided, k_S: Tensor, start: int, step: int) -> None:
        """The quantile of each segment's sample."""
        grid, options = self.together(cdiv(strided.total, 2048))
        launch(selecting.rank, grid,
            keys, strided.bounds_S, self.bounds_S, self.table, self.histogram, k_S, self.gates[40:], self.workers,
            self.segments, strided.total, start, step, STEPS=self.steps, COPIES=self.copies, **options,
        )  # fmt: skip

    def settle(self, plan: Plan, low: float, high: float, gaussian: bool) -> None:
        """``reference.refine`` of every segment."""
        grid, options = self.together(max(self.blocks, self.lists))
        bracket = torch.empty(self.workers * self.segments, 5, dtype=torch.float64, device=self.device)
        launch(refining.settle, grid,
            *self.formula, self.bounds_S, self.table, self.heads, *self.listed, self.nonfinite_L,
            self.moments if gaussian else self.heads, bracket, plan.bands(low, high), plan.k_S, self.gates[8:],
            self.gates[48:], self.gates, self.workers, *self.sizes, STEPS=self.steps, GAUSSIAN=gaussian, **options,
        )  # fmt: skip

    def send(self, floor: int | None = None) -> Sparse:
        """Pack what a sieve with this floor took, or without it what lies above the segments' limits."""
        by_segment = floor is None
        grid = self.blocks * UNITS, self.workers
        rule = self.bounds_S if by_segment else self.heads, self.table, *self.listed
        found = self.nonfinite_L, self.chosen_LU
        search = {"STEPS": self.steps, "num_warps": 1, **PRECISE}
        if by_segment:
            launch(sending.count, grid, *self.formula, *rule, *found, *self.sizes, **search)
        ends_LB = running(self.chosen_LU, UNITS)
        into = self.pending.into
        if into is None:
            slots = int(ends_LB[:, -1].max())
            into = reference.empty(self.workers, self.n, slots, self.pending.values, self.device)
        parts = into.counts_LB, into.offsets_LK, into.values_LK, into.wanted_L, into.nonfinite_L
        launch(sending.pack, grid,
            *self.formula, floor or 0, *rule, *found, ends_LB, *parts, *(part.stride(0) for part in parts), into.slots,
            *self.sizes, LARGEST=LARGEST[into.values_LK.dtype], SEGMENTED=by_segment, **search,
        )  # fmt: skip
        return into
