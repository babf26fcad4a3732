"""The ops as torch.compile sees them: opaque operators, so that it traces a call and not the launches behind it.

Slots must be tensors of their own there, not a frame's views of one buffer. Numbers such as ``decay`` that change from
call to call have it compile anew. Under ``mode="reduce-overhead"`` call a rule once before, without being compiled:
what it makes for its layout then lies outside of the graph's memory.

L workers, n coordinates, S segments, B blocks, K slots (see ``types``).
"""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TypeVar, cast

import torch
from torch import Tensor

from gradsieve.types import Pending, Segments, Sparse

RuleOp = TypeVar("RuleOp", bound=Callable[..., Sparse])
DecodeOp = Callable[[Sparse, Tensor, float], Tensor]

_WRITTEN = ("memory_Ln", "counts_LB", "offsets_LK", "values_LK", "wanted_L", "nonfinite_L")
_PAYLOAD = ", ".join(f"Tensor({letter}!) {name}" for letter, name in zip("abcdef", _WRITTEN, strict=True))
_PENDING = f"Tensor grad_Ln, {_PAYLOAD}, SymInt[] bounds, SymInt[] keys, float decay, float gain"


def rule(schema: str) -> Callable[[RuleOp], RuleOp]:
    """Register an op that sends into given slots. ``schema`` says what it takes after the ``Pending``."""

    def register(op: RuleOp) -> RuleOp:
        def opaque(
            grad_Ln: Tensor, memory_Ln: Tensor, counts_LB: Tensor, offsets_LK: Tensor, values_LK: Tensor,
            wanted_L: Tensor, nonfinite_L: Tensor, bounds: Sequence[int], keys: Sequence[int],
            decay: float, gain: float, *arguments: object,
        ) -> None:  # fmt: skip
            into = Sparse(bounds[-1], counts_LB, offsets_LK, values_LK, wanted_L, nonfinite_L)
            segments = Segments(tuple(bounds), tuple(keys))
            given = (tuple(a) if isinstance(a, list) else a for a in arguments)
            op(Pending(grad_Ln, memory_Ln, segments, decay, gain, values_LK.dtype, into), *given)

        operator = torch.library.custom_op(
            f"gradsieve::{op.__name__}", opaque, mutates_args=_WRITTEN, schema=f"({_PENDING}, {schema}) -> ()"
        )
        operator.register_fake(lambda *_: None)

        @wraps(op)
        def call(pending: Pending, *arguments: object) -> Sparse:
            into, segments = pending.into, pending.segments
            if into is None or pending.measure or not torch.compiler.is_compiling():
                return op(pending, *arguments)
            operator(
                pending.grad_Ln, pending.memory_Ln, into.counts_LB, into.offsets_LK, into.values_LK, into.wanted_L,
                into.nonfinite_L, segments.bounds, segments.keys, pending.decay, pending.gain, *arguments,
            )  # fmt: skip
            return into

        return cast(RuleOp, call)

    return register


def decoder(op: DecodeOp) -> DecodeOp:
    """Register the op that sums what has arrived."""

    def opaque(
        counts_LB: Tensor, offsets_LK: Tensor, values_LK: Tensor, out_n: Tensor, size: int, divisor: float
    ) -> None:
        none_L = counts_LB.new_empty(0)
        op(Sparse(size, counts_LB, offsets_LK, values_LK, none_L, none_L), out_n, divisor)

    operator = torch.library.custom_op(f"gradsieve::{op.__name__}", opaque, mutates_args=("out_n",))
    operator.register_fake(lambda *_: None)

    @wraps(op)
    def call(sparse: Sparse, out_n: Tensor, divisor: float) -> Tensor:
        if not torch.compiler.is_compiling():
            return op(sparse, out_n, divisor)
        operator(sparse.counts_LB, sparse.offsets_LK, sparse.values_LK, out_n, sparse.size, float(divisor))
        return out_n

    return call
