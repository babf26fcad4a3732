"""The ops in C for float32 memories on the CPU: one pass over gradient and memory; the rest goes to ``reference``.

Scratch, last step's thresholds and what the C code was told live in ``pending.cache``. L workers, n coordinates,
S segments (see ``types``).
"""

import ctypes
import os
from collections.abc import Callable
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from gradsieve.ops import reference
from gradsieve.types import Pending, Segments, Sparse

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_PER_THREAD = 1 << 18  # coordinates that are worth a thread
_LARGEST = (1 << 31) - 1
_CPU = torch.device("cpu")


def _structure(name: str, fields: str) -> type[ctypes.Structure]:
    """A struct of 8-byte fields: ``*name`` is a pointer, ``.name`` a double, any other an integer."""
    types: dict[str, Any] = {"*": c_void_p, ".": c_double}
    layout = [(field.lstrip("*."), types.get(field[0], c_int64)) for field in fields.split()]
    return type(name, (ctypes.Structure,), {"_fields_": layout})


_Step: Any = _structure(
    "_Step",
    "workers size segments threads measure grad_kind value_kind .decay .gain *grad grad_stride *memory memory_stride"
    " *bounds *scratch scratch_bytes scratch_wanted *totals slots *counts counts_stride *offsets offsets_stride"
    " *values values_stride *wanted wanted_stride *nonfinite nonfinite_stride *error *plan",
)
_Mean: Any = _structure("_Mean", "workers size threads kind out_kind .divisor *rows stride *out")
_Meeting: Any = _structure(
    "_Meeting",
    "workers size slots threads value_kind out_kind .divisor *counts counts_stride *offsets offsets_stride"
    " *values values_stride *out out_stride *starts",
)


def _load() -> ctypes.CDLL | None:
    path = os.environ.get("GRADSIEVE_NATIVE") or Path(__file__).with_name("_native.so")
    try:
        library = ctypes.CDLL(str(path))
        for name, arguments in {
            "threshold": [c_void_p, c_double],
            "topk": [c_void_p, c_void_p, c_void_p],
            "gaussiank": [c_void_p, c_void_p, c_void_p, c_void_p],
            "sampledk": [c_void_p, c_void_p, c_int64, c_int64, c_void_p],
            "randomk": [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64],
            "take": [c_void_p, c_void_p, c_void_p, c_int64],
            "send": [c_void_p],
            "pick": [c_void_p, c_void_p, c_void_p, c_void_p, c_int64],
            "mean": [c_void_p],
            "decode": [c_void_p],
            "give_back": [c_void_p],
            "clear": [c_void_p],
            "misplaced": [c_void_p, c_void_p],
            "to_bitmap": [c_void_p, c_void_p, c_int64, c_int64],
            "from_bitmap": [c_void_p, c_void_p, c_int64, c_int64, c_void_p],
            "vectors": [ctypes.c_int],
        }.items():
            getattr(library, f"gradsieve_{name}").argtypes = arguments
    except (OSError, AttributeError):
        return None
    return library


_library: Any = _load()


def available() -> bool:
    """Whether the compiled library is there."""
    return _library is not None


PORTABLE, AVX2, AVX512 = range(3)


def vectors(most: int = AVX512) -> int:
    """Use loops for the widest vectors up to ``most`` that this CPU has; returns which."""
    level: int = _library.gradsieve_vectors(most)
    return level


def threshold(pending: Pending, threshold: float) -> Sparse:
    call = _call(pending, _whole(pending.grad_Ln.shape[1]))
    if call is None:
        return reference.threshold(pending, threshold)
    return _send(pending, call, pending.into, _library.gradsieve_threshold, threshold)


def topk(pending: Pending, k_S: tuple[int, ...]) -> Sparse:
    call = _call(pending, pending.segments.tensor(_CPU))
    if call is None:
        return reference.topk(pending, k_S)
    k, hints = _once(call, "topk", k_S, lambda: (_integers(k_S), _hints(pending, "topk")))
    return _send(pending, call, pending.into, _library.gradsieve_topk, k, hints)


def gaussiank(pending: Pending, k_S: tuple[int, ...]) -> Sparse:
    call = _call(pending, pending.segments.tensor(_CPU))
    if call is None:
        return reference.gaussiank(pending, k_S)

    def known() -> tuple[Tensor | int, ...]:
        return _integers(k_S), _quantiles(k_S, pending.segments), _hints(pending, "gaussiank")

    return _send(pending, call, pending.into, _library.gradsieve_gaussiank, *_once(call, "gaussiank", k_S, known))


def sampledk(pending: Pending, k_S: tuple[int, ...], stride: int, start: int) -> Sparse:
    call = _call(pending, pending.segments.tensor(_CPU))
    if call is None:
        return reference.sampledk(pending, k_S, stride, start)
    k, hints = _once(call, "sampledk", k_S, lambda: (_integers(k_S), _hints(pending, "sampledk")))
    return _send(pending, call, pending.into, _library.gradsieve_sampledk, k, stride, start, hints)


def randomk(pending: Pending, k_S: tuple[int, ...], keys_LS: Tensor) -> Sparse:
    call = _call(pending, pending.segments.tensor(_CPU))
    if call is None:
        return reference.randomk(pending, k_S, keys_LS)

    def known() -> tuple[Tensor | int, ...]:
        room = sum(min(k, size) for k, size in zip(k_S, pending.segments.sizes, strict=True))
        return _integers(k_S), *_picks(pending, room), room

    keys_LS = keys_LS.to("cpu", torch.int64).contiguous()
    k, *picked, room = _once(call, "randomk", k_S, known)
    into = pending.into or _slots(pending, room)
    return _send(pending, call, into, _library.gradsieve_randomk, k, keys_LS.data_ptr(), *picked, room)


def take(pending: Pending, index_LK: Tensor) -> Sparse:
    call = _call(pending, _whole(pending.grad_Ln.shape[1]))
    if call is None:
        return reference.take(pending, index_LK)
    index_LK, room = index_LK.contiguous(), index_LK.shape[1]
    picked = _once(call, "take", room, lambda: _picks(pending, room))
    if not _library.gradsieve_pick(call.at, index_LK.data_ptr(), *picked, room):
        raise IndexError(f"a coordinate to take is outside of 0..{call.step.size - 1}")
    into = pending.into or _slots(pending, room)
    return _send(pending, call, into, _library.gradsieve_take, *picked, room)


def decode(sparse: Sparse, out_n: Tensor, divisor: float) -> Tensor:
    if not (divisor > 0 and out_n.dtype in _KINDS and _rows_contiguous(out_n[None]) and _readable(sparse)):
        return reference.decode(sparse, out_n, divisor)
    _meet(_library.gradsieve_decode, sparse, out_n, 0, divisor)
    return out_n


def mean(rows_Wn: Tensor, out_n: Tensor, divisor: float) -> Tensor:
    dense = rows_Wn.dtype in _KINDS and out_n.dtype in _KINDS and _rows_contiguous(rows_Wn)
    if not (dense and _rows_contiguous(out_n[None]) and len(rows_Wn)):
        return reference.mean(rows_Wn, out_n, divisor)
    workers, size = rows_Wn.shape
    call = _Mean(
        workers, size, _threads(rows_Wn.numel()), _KINDS[rows_Wn.dtype], _KINDS[out_n.dtype], divisor,
        rows_Wn.data_ptr(), rows_Wn.stride(0), out_n.data_ptr(),
    )  # fmt: skip
    _library.gradsieve_mean(ctypes.byref(call))
    return out_n


def give_back(memory_Ln: Tensor, sparse: Sparse) -> None:
    if memory_Ln.dtype == torch.float32 and _rows_contiguous(memory_Ln) and _readable(sparse):
        _meet(_library.gradsieve_give_back, sparse, memory_Ln, memory_Ln.stride(0), 1.0)
    else:
        reference.give_back(memory_Ln, sparse)


def clear(target_Ln: Tensor, sparse: Sparse) -> None:
    if target_Ln.dtype == torch.float32 and _rows_contiguous(target_Ln) and _readable(sparse):
        _meet(_library.gradsieve_clear, sparse, target_Ln, target_Ln.stride(0), 1.0)
    else:
        reference.clear(target_Ln, sparse)


def undo(pending: Pending, sparse: Sparse, when: Tensor) -> None:
    reference.undo(pending, sparse, when)  # once in a training, if ever


def misplaced(sparse: Sparse) -> Tensor:
    if not _readable(sparse):
        return reference.misplaced(sparse)
    bad_L = torch.empty(len(sparse.counts_LB), dtype=torch.bool, device="cpu")
    _library.gradsieve_misplaced(ctypes.byref(_meeting(sparse, sparse.values_LK, 0, 1.0)), bad_L.data_ptr())
    return bad_L


def to_bitmap(sparse: Sparse, bitmap_LN: Tensor) -> None:
    if _readable(sparse) and _rows_contiguous(bitmap_LN):
        meeting = _meeting(sparse, sparse.values_LK, 0, 1.0)
        pointers = bitmap_LN.data_ptr(), bitmap_LN.stride(0), bitmap_LN.shape[1]
        _library.gradsieve_to_bitmap(ctypes.byref(meeting), *pointers)
    else:
        reference.to_bitmap(sparse, bitmap_LN)


def from_bitmap(bitmap_LN: Tensor, sparse: Sparse) -> Tensor:
    if not (_readable(sparse) and _rows_contiguous(bitmap_LN)):
        return reference.from_bitmap(bitmap_LN, sparse)
    wrong_L = torch.empty(len(sparse.counts_LB), dtype=torch.bool, device="cpu")
    meeting = _meeting(sparse, sparse.values_LK, 0, 1.0)
    pointers = bitmap_LN.data_ptr(), bitmap_LN.stride(0), bitmap_LN.shape[1], wrong_L.data_ptr()
    _library.gradsieve_from_bitmap(ctypes.byref(meeting), *pointers)
    return wrong_L


def _rows_contiguous(rows: Tensor) -> bool:
    return rows.is_cpu and (rows.stride(1) == 1 or rows.shape[1] <= 1)


def _readable(sparse: Sparse) -> bool:
    whole_rows = all(map(_rows_contiguous, (sparse.counts_LB, sparse.offsets_LK, sparse.values_LK)))
    return whole_rows and sparse.values_LK.dtype in _KINDS


def _fits(pending: Pending) -> bool:
    """Whether the C code knows these dtypes and strides."""
    grad_Ln, memory_Ln, into = pending.grad_Ln, pending.memory_Ln, pending.into
    return (
        memory_Ln.dtype == torch.float32
        and grad_Ln.dtype in _KINDS
        and pending.values in _KINDS
        and _rows_contiguous(grad_Ln)
        and _rows_contiguous(memory_Ln)
        and grad_Ln.shape[1] <= _LARGEST
        and (into is None or (_readable(into) and into.values_LK.dtype == pending.values))
    )


def _threads(coordinates: int) -> int:
    return max(1, min(torch.get_num_threads(), coordinates // _PER_THREAD))


@lru_cache(maxsize=256)
def _integers(numbers: tuple[int, ...]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _whole(size: int) -> Tensor:
    """The bounds of one segment: for rules that do not look at segments."""
    return _integers((0, size))


@lru_cache(maxsize=256)
def _quantiles(k_S: tuple[int, ...], segments: Segments) -> Tensor:
    """``z`` of ``reference.gaussian_start``; unused where a segment is sent whole or not at all."""
    partial = [0 < k < size for k, size in zip(k_S, segments.sizes, strict=True)]
    tails = [k / size / 2 if p else 0.5 for k, size, p in zip(k_S, segments.sizes, partial, strict=True)]
    return torch.tensor([NormalDist().inv_cdf(1 - tail) for tail in tails], dtype=torch.float64, device="cpu")


def _cached(pending: Pending, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of the cache, made (zero) where it is missing or of another kind."""
    tensor = pending.cache.get(name)
    if tensor is None or tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        tensor = pending.cache[name] = torch.zeros(shape, dtype=dtype, device="cpu")
    return tensor


def _hints(pending: Pending, rule: str) -> Tensor:
    """For each worker and segment, last step's threshold and how far below it to sieve."""
    shape = (pending.grad_Ln.shape[0], len(pending.segments.sizes), 2)
    return _cached(pending, f"native.{rule}", shape, torch.float32)


def _picks(pending: Pending, room: int) -> tuple[Tensor, Tensor]:
    """Room for the coordinates to take of each worker, and for how many they are."""
    workers = pending.grad_Ln.shape[0]
    picks = _cached(pending, "native.picks", (workers, room), torch.int32)
    return picks, _cached(pending, "native.picked", (workers,), torch.int64)


@dataclass(slots=True)
class _Call:
    """What the C code is told, filled in once for the same tensors: behind a pass all that is asked comes from a cold
    cache."""

    step: Any
    at: Any  # by reference
    told: tuple[object, ...]  # of the tensors
    factors: tuple[bool, float, float]
    into: Sparse | None
    bounds: Tensor
    totals_L: Tensor
    scratch: Tensor | None = None
    scratch_bytes: int = 0
    given: tuple[str, object] = ("", None)  # a rule and its counts,
    known: tuple[Tensor | int, ...] = ()  # and what goes with them
    arguments: tuple[int, ...] = ()


def _call(pending: Pending, bounds: Tensor) -> _Call | None:
    """The call for these tensors; None where the C code does not know their dtypes or strides."""
    grad_Ln, memory_Ln, into = pending.grad_Ln, pending.memory_Ln, pending.into
    told = grad_Ln.data_ptr(), grad_Ln.stride(), grad_Ln.dtype, memory_Ln.data_ptr(), pending.values
    call: _Call | None = pending.cache.get("native.call")
    if call is None or call.told != told or call.into is not into or call.bounds is not bounds:
        if not _fits(pending):
            return None
        call = pending.cache["native.call"] = _new_call(pending, bounds, told, call)
    factors = pending.measure, pending.decay, pending.gain
    if call.factors != factors:
        call.step.measure, call.step.decay, call.step.gain = call.factors = factors
    return call


def _new_call(pending: Pending, bounds: Tensor, told: tuple[object, ...], before: _Call | None) -> _Call:
    grad_Ln, memory_Ln = pending.grad_Ln, pending.memory_Ln
    workers, size = grad_Ln.shape
    totals_L = torch.empty(workers, dtype=torch.int64, device="cpu")
    step = _Step(
        workers, size, len(bounds) - 1, _threads(workers * size), 0, _KINDS[grad_Ln.dtype], _KINDS[pending.values],
        1.0, 1.0, grad_Ln.data_ptr(), grad_Ln.stride(0), memory_Ln.data_ptr(), memory_Ln.stride(0), bounds.data_ptr(),
        totals=totals_L.data_ptr(), slots=-1,
    )  # fmt: skip
    call = _Call(step, ctypes.byref(step), told, (False, 1.0, 1.0), pending.into, bounds, totals_L)
    if pending.into is not None:
        _point(step, pending.into)
    if before is not None:
        _lend(call, before.scratch)
    return call


def _once(call: _Call, rule: str, counts: object, known: Callable[[], tuple[Tensor | int, ...]]) -> tuple[int, ...]:
    """What goes with a rule and its counts, looked up once; of tensors a pointer."""
    if call.given != (rule, counts):
        call.given, call.known = (rule, counts), known()
        call.arguments = tuple(a.data_ptr() if isinstance(a, Tensor) else a for a in call.known)
    return call.arguments


def _lend(call: _Call, scratch: Tensor | None) -> None:
    """Room for hits, so that the C code need not take it from the heap."""
    if scratch is not None:
        call.scratch, call.scratch_bytes = scratch, scratch.numel() * 8
        call.step.scratch, call.step.scratch_bytes = scratch.data_ptr(), call.scratch_bytes


def _slots(pending: Pending, room: int) -> Sparse:
    workers, size = pending.grad_Ln.shape
    return reference.empty(workers, size, room, pending.values, _CPU)


def _send(pending: Pending, call: _Call, into: Sparse | None, choose: Any, *arguments: object) -> Sparse:
    """Choose and send; without slots in between make as many as it needs."""
    step = call.step
    if into is None:
        step.slots = -1
    elif into is not call.into:
        _point(step, into)
    error_L = torch.empty(len(call.totals_L), dtype=torch.float64, device="cpu") if pending.measure else None
    if error_L is not None:
        step.error = error_L.data_ptr()
    choose(call.at, *arguments)
    if into is None:
        workers, size = pending.grad_Ln.shape
        into = reference.empty(workers, size, max(call.totals_L.tolist(), default=0), pending.values, _CPU)
        _point(step, into)
        _library.gradsieve_send(call.at)
    if step.scratch_wanted > call.scratch_bytes:
        _lend(call, torch.empty(step.scratch_wanted // 8 * 5 // 4, dtype=torch.int64, device="cpu"))
    return into if error_L is None else replace(into, error_L=error_L)


def _point(step: Any, into: Sparse) -> None:
    step.slots = into.slots
    step.counts, step.counts_stride = into.counts_LB.data_ptr(), into.counts_LB.stride(0)
    step.offsets, step.offsets_stride = into.offsets_LK.data_ptr(), into.offsets_LK.stride(0)
    step.values, step.values_stride = into.values_LK.data_ptr(), into.values_LK.stride(0)
    step.wanted, step.wanted_stride = into.wanted_L.data_ptr(), into.wanted_L.stride(0)
    step.nonfinite, step.nonfinite_stride = into.nonfinite_L.data_ptr(), into.nonfinite_L.stride(0)


def _meeting(sparse: Sparse, dense: Tensor, stride: int, divisor: float) -> Any:
    counts_LB, offsets_LK, values_LK = sparse.counts_LB, sparse.offsets_LK, sparse.values_LK
    return _Meeting(
        counts_LB.shape[0], sparse.size, sparse.slots, _threads(sparse.size), _KINDS[values_LK.dtype],
        _KINDS[dense.dtype], divisor, counts_LB.data_ptr(), counts_LB.stride(0), offsets_LK.data_ptr(),
        offsets_LK.stride(0), values_LK.data_ptr(), values_LK.stride(0), dense.data_ptr(), stride,
    )  # fmt: skip


def _meet(op: Any, sparse: Sparse, dense: Tensor, stride: int, divisor: float) -> None:
    if not op(ctypes.byref(_meeting(sparse, dense, stride, divisor))):
        raise IndexError("the counts or offsets of a Sparse point outside of its slots or its coordinates")
