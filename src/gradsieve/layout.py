"""Scope: how parameters lie in a flat gradient, and which stretches of it a rule sees at once."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from gradsieve.ops.rng import key_of
from gradsieve.types import Segments

SCOPES = ("layer", "bucket", "global")
BUCKET_BYTES = 25 * 1024 * 1024
"""DDP's own default: what one bucket holds where nothing else is said."""


@dataclass(frozen=True)
class Layout:
    """Named parameters one behind the other in a flat gradient.

    >>> Layout(("w", "b"), (6, 2)).segments("layer").bounds
    (0, 6, 8)
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        bounds = [0]
        for size in self.sizes:
            bounds.append(bounds[-1] + size)
        return tuple(bounds)

    @property
    def size(self) -> int:
        return self.bounds[-1]

    @cached_property
    def fingerprint(self) -> int:
        """31 bits that agree on two ranks only if names, sizes and order do."""
        return key_of(*self.names, *self.sizes)

    def segments(self, scope: str) -> Segments:
        """``layer``: each parameter; ``global`` (and one ``bucket``): all of them as one."""
        if scope == "layer":
            return Segments(self.bounds, tuple(key_of(name) for name in self.names))
        if scope == "bucket":
            return self._joined(self.buckets(BUCKET_BYTES))
        return self._joined([range(len(self.names))])

    def buckets(self, cap_bytes: int) -> list[range]:
        """Parameters in runs of up to ``cap_bytes`` of float32, in order: what DDP does with its own list."""
        runs, start, filled = [], 0, 0
        for i, size in enumerate(self.sizes):
            filled += 4 * size
            if filled >= cap_bytes:
                runs.append(range(start, i + 1))
                start, filled = i + 1, 0
        if start < len(self.sizes) or not runs:
            runs.append(range(start, len(self.sizes)))
        return runs

    def _joined(self, runs: Sequence[range]) -> Segments:
        bounds = (0, *(self.bounds[run.stop] for run in runs))
        return Segments(bounds, tuple(key_of(*self.names[run.start : run.stop]) for run in runs))


def layout_of(params: nn.Module | Iterable[Tensor] | int) -> Layout:
    """The layout of a module's trainable parameters, of a list of tensors, or of n plain coordinates."""
    if isinstance(params, bool) or (isinstance(params, int) and params < 0):
        raise ValueError(f"params takes a module, tensors or a count of at least 0, not {params!r}")
    if isinstance(params, int):
        return Layout(("0",), (params,))
    if isinstance(params, nn.Module):
        named: list[tuple[str, Tensor]] = [(name, p) for name, p in params.named_parameters() if p.requires_grad]
    else:
        named = [(str(i), p) for i, p in enumerate(params)]
        if not all(isinstance(p, torch.Tensor) for _, p in named):
            raise TypeError("params takes a module, tensors or a count")
    return Layout(tuple(name for name, _ in named), tuple(p.numel() for _, p in named))


def check_scope(scope: object) -> str:
    if scope not in SCOPES:
        raise ValueError(f"scope takes one of {', '.join(SCOPES)}, not {scope!r}")
    return str(scope)
