"""The ops behind one set of names: ``ops.of(tensor)`` is the fastest module that can work on that tensor.

What each op means stands in ``ops.reference``; ``native`` (CPU) and ``triton`` (CUDA) do the same, faster.
"""

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Protocol

import torch
from torch import Tensor

from gradsieve.ops import reference
from gradsieve.types import Pending, Sparse


class Ops(Protocol):
    """What a module of ops has."""

    def threshold(self, pending: Pending, threshold: float) -> Sparse: ...
    def topk(self, pending: Pending, k_S: tuple[int, ...]) -> Sparse: ...
    def gaussiank(self, pending: Pending, k_S: tuple[int, ...]) -> Sparse: ...
    def sampledk(self, pending: Pending, k_S: tuple[int, ...], stride: int, start: int) -> Sparse: ...
    def randomk(self, pending: Pending, k_S: tuple[int, ...], keys_LS: Tensor) -> Sparse: ...
    def take(self, pending: Pending, index_LK: Tensor) -> Sparse: ...
    def decode(self, sparse: Sparse, out_n: Tensor, divisor: float) -> Tensor: ...
    def mean(self, rows_Wn: Tensor, out_n: Tensor, divisor: float) -> Tensor: ...
    def give_back(self, memory_Ln: Tensor, sparse: Sparse) -> None: ...
    def undo(self, pending: Pending, sparse: Sparse, when: Tensor) -> None: ...
    def clear(self, target_Ln: Tensor, sparse: Sparse) -> None: ...
    def misplaced(self, sparse: Sparse) -> Tensor: ...
    def to_bitmap(self, sparse: Sparse, bitmap_LN: Tensor) -> None: ...
    def from_bitmap(self, bitmap_LN: Tensor, sparse: Sparse) -> Tensor: ...


TRITON = 3, 3
"""The first that can launch programs which wait for each other."""

_forced: list[Ops] = []


def of(tensor: Tensor) -> Ops:
    """The module of ops for this tensor's device."""
    return _forced[-1] if _forced else _fastest(tensor.device.type)


@contextmanager
def using(module: Ops) -> Iterator[None]:
    """Force one module of ops, for tests and comparisons."""
    _forced.append(module)
    try:
        yield
    finally:
        _forced.pop()


@cache
def _fastest(device: str) -> Ops:
    if device == "cuda":
        if _numbers(triton_version()) >= TRITON and torch.version.hip is None:
            from gradsieve.ops import triton

            return triton
        warnings.warn(
            "gradsieve's kernels for GPUs need CUDA and Triton {}.{} or later, which comes with torch 2.7: "
            "sparsification in plain PyTorch is slower".format(*TRITON),
            stacklevel=2,
        )
    if device == "cpu":
        from gradsieve.ops import native

        if native.available():
            return native
        warnings.warn(
            "gradsieve was installed without its compiled kernels, so sparsification in plain PyTorch is slower; "
            "install it again where there is a C compiler",
            stacklevel=2,
        )
    return reference


def triton_version() -> str:
    """Empty without Triton. Asked of the module: nightly builds of torch bring it under other distribution names."""
    try:
        return str(import_module("triton").__version__)
    except ImportError:
        return ""


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, found.groups())) if found else ()
