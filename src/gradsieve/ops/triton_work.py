"""One call's scratch on the device and the launches over it, and what a rule knows ahead of the data.

L workers, n coordinates, S segments, B blocks, K slots (see ``types``).
"""

import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from statistics import NormalDist
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from gradsieve.ops import reference
from gradsieve.ops import triton_kernels as kernels
from gradsieve.ops import triton_select as finding
from gradsieve.types import Pending, Segments, Sparse

TILE, SUPERS, SPREAD, REPLICAS, BINS = 512, 256, 8, 64, 2048
NOTHING = 0x7FFFFFFF
MAXNREG = 80  # fewer spill, more leave too few programs in flight
RESIDENT = 4  # programs of 128 threads and 128 registers that a processor holds
WIRE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
SMALL = 2048  # of a segment of this size half the limit is the floor: its k-th value moves too much to predict
PROGRAMS = 1024  # of a kernel that walks blocks, and mostly finds its gate shut
PRECISE = {"enable_fp_fusion": False}  # decay * memory + gain * grad rounds twice, as in the reference


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def steps(segments: int) -> int:
    """Of a binary search among them."""
    return (segments - 1).bit_length()


def stride(tensor: Tensor) -> int:
    """From row to row; 0 for a single row, which keeps its alignment known whatever its length."""
    return tensor.stride(0) if tensor.shape[0] > 1 else 0


@lru_cache(maxsize=16)
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 0


def programs(device: torch.device, jobs: int) -> int:
    """Of a kernel whose programs wait for each other: no more than run at once (one in the interpreter)."""
    return max(min(jobs, RESIDENT * processors(device)), 1)


def together(device: torch.device) -> dict[str, Any]:
    return {"launch_cooperative_grid": True, "maxnreg": 128} if device.type == "cuda" else {}


def row_strides(into: Sparse) -> tuple[int, ...]:
    parts = into.counts_LB, into.offsets_LK, into.values_LK, into.wanted_L, into.nonfinite_L
    return tuple(part.stride(0) for part in parts)


def constant(values: list, dtype: torch.dtype, device: torch.device) -> Tensor:
    """On the device without waiting for it."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


@dataclass(frozen=True)
class Sampling:
    """Every ``strides[s]``-th coordinate of segment s, starting at ``firsts[s]``."""

    samples: int
    sampled_S: Tensor  # bounds of the segments among the samples
    firsts_S: Tensor
    strides_S: Tensor

    @classmethod
    def of(cls, segments: Segments, strides: list[int], device: torch.device) -> "Sampling":
        sampled = [0]
        for size, step in zip(segments.sizes, strides, strict=True):
            sampled.append(sampled[-1] + cdiv(size, step))
        zeros = [0] * len(strides)
        tensors = (constant(x, torch.int64, device) for x in (sampled, zeros, strides))
        return cls(sampled[-1], *tensors)

    @classmethod
    @lru_cache(maxsize=64)
    def every(cls, segments: Segments, step: int, device: torch.device) -> "Sampling":
        return cls.of(segments, [step] * len(segments.sizes), device)


@dataclass(frozen=True)
class Plan:
    """What ``k_S`` coordinates of each segment mean, as tensors on the device."""

    segments: Segments
    k: tuple[int, ...]
    device: torch.device

    @staticmethod
    def of(pending: Pending, k_S: tuple[int, ...]) -> "Plan":
        return _plan(pending.segments, tuple(k_S), pending.grad_Ln.device)

    @cached_property
    def clipped(self) -> list[int]:
        return [min(k, size) for k, size in zip(self.k, self.segments.sizes, strict=True)]

    @property
    def total(self) -> int:
        return self.firsts[-1]

    @cached_property
    def firsts(self) -> list[int]:
        firsts = [0]
        for k in self.clipped:
            firsts.append(firsts[-1] + k)
        return firsts

    @cached_property
    def small(self) -> int:
        """Coordinates of small segments: many of them are candidates."""
        return sum(size for size in self.segments.sizes if size <= SMALL)

    @cached_property
    def k_S(self) -> Tensor:
        return constant(self.clipped, torch.int32, self.device)

    @cached_property
    def firsts_S(self) -> Tensor:
        return constant(self.firsts, torch.int64, self.device)

    @cached_property
    def bounds_S(self) -> Tensor:
        return constant(list(self.segments.bounds), torch.int64, self.device)

    @cached_property
    def sizes_S(self) -> Tensor:
        return constant(list(self.segments.sizes), torch.int64, self.device)

    @cached_property
    def half_S(self) -> Tensor:
        """Half the bits of the power of four that ``rng.permute`` permutes."""
        half = [(max(size - 1, 1).bit_length() + 1) // 2 for size in self.segments.sizes]
        return constant(half, torch.int32, self.device)

    @cached_property
    def strides(self) -> list[int]:
        return [max(1, size // (8192 + size // 256)) for size in self.segments.sizes]

    @cached_property
    def sampling(self) -> Sampling:
        return Sampling.of(self.segments, self.strides, self.device)

    @cached_property
    def ranks_S(self) -> Tensor:
        """Rank in the sample that k of all hardly ever exceed: four standard deviations on the safe side."""
        means = [k / step for k, step in zip(self.clipped, self.strides, strict=True)]
        return constant([math.ceil(mean + 4 * math.sqrt(mean) + 4) for mean in means], torch.int32, self.device)

    @lru_cache(maxsize=8)  # noqa: B019 - plans live in a bounded cache themselves
    def bands(self, low: float, high: float) -> Tensor:
        """A segment: low * k, high * k, log k, log size, and the quantile that a Gaussian exceeds k times."""
        rows = []
        for k, size in zip(self.k, self.segments.sizes, strict=True):
            inside = 0 < k < size
            z = NormalDist().inv_cdf(1 - k / size / 2) if inside else 0.0
            rows.append([low * k, high * k, math.log(max(k, 1)), math.log(max(size, 1)), z])
        return constant(rows, torch.float64, self.device)


@lru_cache(maxsize=256)
def _plan(segments: Segments, k: tuple[int, ...], device: torch.device) -> Plan:
    return Plan(segments, k, device)


@dataclass(frozen=True)
class Choice:
    """A radix select on its way: what is left to find in each segment, and its limit."""

    need_LS: Tensor
    states_LS: Tensor
    bases_LS: Tensor
    shifts_LS: Tensor
    limits_LS: Tensor
    ages_LS: Tensor


@dataclass
class Work:
    """The lists of candidates, and small counters that all start at zero in one tensor."""

    pending: Pending
    lists: int
    cap: int
    words_LT: Tensor
    list_p: Tensor
    list_offset: Tensor
    zeros: Tensor
    used: int = 0
    named: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, pending: Pending, candidates: int, small: int = 0) -> "Work":
        workers, n = pending.grad_Ln.shape
        device = pending.grad_Ln.device
        segments = len(pending.segments.keys)
        lists = min(1 << (candidates // 4096).bit_length(), 1024)
        cap = min(cdiv(min(candidates, n) + small, lists) + 2 * TILE, 2**21 - 1)
        counters = workers * (2 * lists * SPREAD + SUPERS + 64 + segments * (32 + BINS)) + 1024
        return cls(
            pending, lists, cap,
            torch.empty(workers, cdiv(n, TILE), dtype=torch.int32, device=device),
            torch.empty(workers, lists, cap, device=device),
            torch.empty(workers, lists, cap, dtype=torch.int16, device=device),
            torch.zeros(counters, dtype=torch.int32, device=device),
        )  # fmt: skip

    @property
    def workers(self) -> int:
        return self.pending.grad_Ln.shape[0]

    @property
    def n(self) -> int:
        return self.pending.grad_Ln.shape[1]

    @property
    def segments(self) -> int:
        return len(self.pending.segments.keys)

    @property
    def device(self) -> torch.device:
        return self.pending.grad_Ln.device

    @property
    def tiles(self) -> int:
        return self.words_LT.shape[1]

    @property
    def blocks(self) -> int:
        return cdiv(self.tiles, 128)

    @cached_property
    def bounds_S(self) -> Tensor:
        return _plan(self.pending.segments, (0,) * self.segments, self.device).bounds_S

    @cached_property
    def choice(self) -> Choice:
        return self.new_choice()

    @cached_property
    def bracket_LS(self) -> Tensor:
        return torch.empty(self.workers, self.segments, 5, dtype=torch.float64, device=self.device)

    @cached_property
    def moments(self) -> Tensor:
        return torch.zeros(self.workers, self.segments, REPLICAS, 4, dtype=torch.float64, device=self.device)

    def counters(self, name: str, count: int) -> Tensor:
        if name not in self.named:
            self.named[name] = self.zeros[self.used : self.used + count]
            self.used += count
        return self.named[name]

    def flags(self, name: str) -> Tensor:
        return self.counters(name, self.workers)

    def ints(self, name: str) -> Tensor:
        return self.counters(name, self.workers * self.segments)

    def new_choice(self) -> Choice:
        return Choice(*(self.ints(f"choice{self.used}") for _ in range(6)))

    def heads(self, name: str) -> Tensor:
        return self.counters(name, self.workers * self.lists * SPREAD)

    @property
    def sources(self) -> tuple[Tensor, Tensor, int, int]:
        grad_Ln, memory_Ln = self.pending.grad_Ln, self.pending.memory_Ln
        return grad_Ln, memory_Ln, stride(grad_Ln), stride(memory_Ln)

    @property
    def formula(self) -> tuple:
        return (*self.sources, self.n, self.pending.decay, self.pending.gain)

    @property
    def found_lists(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.words_LT, self.list_p, self.list_offset

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return self.segments, self.lists, self.cap, self.tiles

    def sieve(
        self, floor: int = 0, floors_LS: Tensor | None = None, moments: Tensor | None = None, take: bool = False
    ) -> None:
        none = self.zeros
        kernels.sieve[(self.tiles, self.workers)](
            *self.formula, floor, self.bounds_S, none if floors_LS is None else floors_LS, self.heads("heads"),
            *self.found_lists, self.overflows, self.flags("nonfinite"), none if moments is None else moments,
            *self.sizes, STEPS=steps(self.segments), SEGMENTED=floors_LS is not None, MOMENTS=moments is not None,
            TAKE=take, WIRE=WIRE[self.pending.values], LIMIT=torch.finfo(self.pending.values).max,
            ALIGN=math.gcd(self.sources[2], self.sources[3], 4), GROUPS=4, num_warps=1,
            maxnreg=128 if moments is not None else MAXNREG, **PRECISE,
        )  # fmt: skip

    def resieve(self, gate: Tensor) -> None:
        kernels.resieve[(min(self.tiles, 4 * PROGRAMS), self.workers)](
            *self.formula, self.bounds_S, self.ints("floors_again"), self.ints("short"), self.heads("heads"),
            self.heads("heads_again"), *self.found_lists, self.overflows,
            self.overflows[self.workers :],
            self.flags("nonfinite"), gate, *self.sizes, STEPS=steps(self.segments), num_warps=1, **PRECISE,
        )  # fmt: skip

    @property
    def histogram(self) -> Tensor:
        return self.counters("histogram", self.workers * self.segments * BINS)

    @property
    def rows(self) -> int:
        return 1 << (self.workers - 1).bit_length()

    def rounds(self) -> tuple[dict[str, Any], Tensor]:
        """How to launch programs that wait for each other, and what they count their arrivals in."""
        return together(self.device), self.counters(f"arrivals{self.used}", 1)

    def choose(self, phases: range, wants_S: Tensor, gates: Tensor, dense_L: Tensor, floors_LS: Tensor) -> None:
        """Phases of ``triton_select.choose``."""
        launch, arrivals = self.rounds()
        choice = self.choice
        finding.choose[(programs(self.device, self.blocks * self.workers),)](
            *self.formula, self.bounds_S, *self.found_lists, self.flags("nonfinite"), dense_L, self.overflows,
            gates, arrivals, wants_S, choice.need_LS, choice.states_LS, choice.bases_LS, choice.shifts_LS,
            choice.limits_LS, choice.ages_LS, self.ints("seen"), self.ints("short"), floors_LS,
            self.ints("floors_again"), self.histogram, self.workers, *self.sizes, self.blocks, phases.start,
            phases.stop - 1, STEPS=steps(self.segments), ROWS=self.rows, **launch, **PRECISE,
        )  # fmt: skip

    @property
    def overflows(self) -> Tensor:
        """Whether a list was full: at first, and when the candidates were gathered again."""
        return self.counters("overflows", 2 * self.workers)

    def estimate(
        self, sampling: Sampling, firsts_S: Tensor, wants_S: Tensor, floors_LS: Tensor, gate: Tensor | None = None
    ) -> Choice:
        """From a sample: floors for the gated rows, or without a gate the values of the wanted ranks."""
        keys = torch.empty(self.workers, sampling.samples, dtype=torch.int32, device=self.device)
        open_L = self.zeros if gate is None else gate
        search = {"STEPS": steps(self.segments), "GATED": gate is not None}
        finding.sample[(min(cdiv(sampling.samples, 256), PROGRAMS), self.workers)](
            *self.sources, self.pending.decay, self.pending.gain, self.bounds_S, sampling.sampled_S, firsts_S,
            sampling.strides_S, keys, self.flags("nonfinite"), open_L, sampling.samples, self.segments, WIDTH=256,
            **search, **PRECISE,
        )  # fmt: skip
        launch, arrivals = self.rounds()
        choice = self.new_choice()
        blocks = cdiv(sampling.samples, 2048)
        finding.estimate[(programs(self.device, blocks * self.workers),)](
            keys, sampling.samples, sampling.sampled_S, open_L, arrivals, wants_S, choice.need_LS, choice.states_LS,
            choice.bases_LS, choice.shifts_LS, choice.limits_LS, self.ints("short"), floors_LS,
            self.ints("floors_again"), self.histogram, self.workers, self.segments, blocks,
            LEVELS=3 if gate is None else 2, MODE=finding.RANK if gate is None else finding.ESTIMATE, ROWS=self.rows,
            **search, **launch, **PRECISE,
        )  # fmt: skip
        return choice

    def trial(self, floors_LS: Tensor) -> tuple[Tensor, ...]:
        """Where the first threshold goes, and what it means for the first count."""
        dense, gates = self.counters("lacking", 5 * self.workers), self.counters("turns", 5 * self.workers)
        return self.bracket_LS, self.choice.limits_LS, self.choice.ages_LS, floors_LS, self.overflows, dense, gates

    def settle(self, wants_S: Tensor, bands: Tensor, floors_LS: Tensor, recount: bool = False) -> Tensor:
        """``reference.refine`` of every segment; returns which rows' lists lack something that is chosen."""
        launch, arrivals = self.rounds()
        bracket_LS, limits_LS, ages_LS, _, overflow, dense, gates = self.trial(floors_LS)
        finding.settle[(programs(self.device, self.blocks * self.workers),)](
            *self.formula, self.bounds_S, *self.found_lists, self.flags("nonfinite"), overflow, dense, gates, arrivals,
            self.ints("found"), bands, wants_S, bracket_LS, self.choice.states_LS, limits_LS, ages_LS, floors_LS,
            self.workers, *self.sizes, self.blocks, STEPS=steps(self.segments), ROWS=self.rows, RECOUNT=recount,
            **launch, **PRECISE,
        )  # fmt: skip
        return dense[4 * self.workers :]

    def send(self, dense_L: Tensor, floor: int | None = None) -> Sparse:
        """Pack what is chosen: the segments' choices, or all that a sieve with this floor took."""
        chosen_LB = torch.empty(self.workers, self.blocks, dtype=torch.int32, device=self.device)
        supers, nonfinite_L = self.counters("supers", self.workers * SUPERS), self.flags("nonfinite")
        grid = (self.blocks, self.workers)
        memory = self.pending.memory_Ln, stride(self.pending.memory_Ln)
        segmented = floor is None
        rule = (
            0 if segmented else floor, self.bounds_S, self.choice.limits_LS if segmented else self.zeros,
            self.choice.ages_LS if segmented else self.zeros,
        )  # fmt: skip
        search = {"STEPS": steps(self.segments), "SEGMENTED": segmented}
        wide = {"WIDE": 4 if self.lists * self.cap < self.n // 64 else 8, "TAKEN": not segmented}
        kernels.count[grid](
            *self.formula, *rule, *self.found_lists, dense_L, nonfinite_L, chosen_LB, supers, *self.sizes, self.blocks,
            **search, **wide, **PRECISE,
        )  # fmt: skip
        into = self.pending.into
        if into is None:
            slots = int(chosen_LB.sum(1).max())
            into = reference.empty(self.workers, self.n, slots, self.pending.values, self.device)
        search["LIMIT"] = torch.finfo(into.values_LK.dtype).max
        strides = row_strides(into)
        kernels.pack[grid](
            *memory, *rule, *self.found_lists, dense_L, nonfinite_L, chosen_LB, supers, into.counts_LB,
            into.offsets_LK, into.values_LK, into.wanted_L, into.nonfinite_L, *strides, into.slots, *self.sizes,
            self.blocks, **search, **wide, **PRECISE,
        )  # fmt: skip
        kernels.pack_dense[(min(self.blocks, PROGRAMS), self.workers)](
            *self.formula, *rule, dense_L, nonfinite_L, chosen_LB, supers, into.offsets_LK, into.values_LK,
            *strides[1:3], into.slots, self.segments, self.blocks, **search, **PRECISE,
        )  # fmt: skip
        return into
