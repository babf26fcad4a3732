"""What travels between the parts: data and protocols, no logic.

Shape suffixes, here and in all of the core: L workers held by this process, W workers in all,
n coordinates, S segments, B blocks of 65,536 coordinates, K slots for kept elements.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

BLOCK = 65_536
"""Coordinates in a block: a position inside one fits in 16 bits."""

BY_SLOT, BY_WORKER = ("offsets_LK", "values_LK"), ("counts_LB", "wanted_L", "nonfinite_L")
"""The parts of a ``Sparse``."""


@dataclass(frozen=True)
class Segments:
    """The stretches of a flat gradient that a rule looks at one by one.

    Segment ``s`` is ``[bounds[s], bounds[s + 1])``. ``keys[s]`` names it stably (it comes from parameter
    names), so that a random rule draws the same coordinates however buckets are arranged.
    """

    bounds: tuple[int, ...]
    keys: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.bounds[-1]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in pairwise(self.bounds))

    def __hash__(self) -> int:
        return self._hash  # asked at every step; tuples do not remember theirs

    @cached_property
    def _hash(self) -> int:
        return hash((self.bounds, self.keys))

    @cached_property
    def _tensors(self) -> dict[torch.device, Tensor]:
        return {}

    def tensor(self, device: torch.device) -> Tensor:
        """``bounds`` as an int64 tensor of S + 1 elements, made once a device."""
        if device not in self._tensors:
            self._tensors[device] = torch.tensor(self.bounds, dtype=torch.int64, device=device)
        return self._tensors[device]


@dataclass(frozen=True, slots=True)
class Sparse:
    """The kept coordinates of L workers, block by block: the body of the wire form.

    Row ``l`` holds ``counts_LB[l].sum()`` elements in its first slots, all of block 0, then all of block 1,
    and so on. The coordinate of a slot is ``block * BLOCK + offset``; ``offsets_LK`` holds the unsigned
    16-bit offset in an int16. Slots past the last element are padding with no meaning.
    """

    size: int
    counts_LB: Tensor  # int32
    offsets_LK: Tensor  # int16, read as unsigned
    values_LK: Tensor  # float32, bfloat16, float16 or float64
    wanted_L: Tensor  # int32: what the rule chose; what exceeds the slots was deferred to the memory
    nonfinite_L: Tensor  # int32: more than 0 where p held an infinity or a NaN
    error_L: Tensor | None = None  # squared norm of the memory after the step, where it was asked for

    @property
    def slots(self) -> int:
        return self.values_LK.shape[1]

    def rows(self, part: slice) -> "Sparse":
        """What some of the workers keep: views."""
        return replace(self, **{name: getattr(self, name)[part] for name in (*BY_SLOT, *BY_WORKER)})


@dataclass(slots=True)
class Pending:
    """A gradient and a memory on their way into one sparsification: ``p = decay * memory + gain * grad``.

    An op reads both, decides, writes ``p - decoded(sent)`` into ``memory_Ln`` and returns what is sent. The
    sum is formed in the memory's dtype. Where ``p`` is not finite the memory keeps its old value.
    """

    grad_Ln: Tensor
    memory_Ln: Tensor
    segments: Segments
    decay: float = 1.0
    gain: float = 1.0
    values: torch.dtype = torch.float32
    into: Sparse | None = None  # preallocated slots; without it an op makes exactly as many as it needs
    measure: bool = False  # also return the squared norm of the new memory
    cache: dict[str, Any] = field(default_factory=dict)  # an op's own between steps; never changes a result


@dataclass(slots=True)
class Turn:
    """When and where a rule is applied."""

    step: int
    ranks: range | None  # the ranks of the L workers; None where all workers must choose the same coordinates
    state: dict[str, Tensor] = field(default_factory=dict)  # what the rule remembers, one row a segment
    lr: float | None = None
    gain: float = 1.0  # brings a gradient into the memory's units: 1 / loss scale


class Rule(Protocol):
    """Which coordinates of ``p`` are sent. Rules are frozen values; what they remember is in ``Turn.state``."""

    def slots(self, segments: Segments) -> int | None:
        """The most elements it keeps of one worker, or None where that depends on the gradient."""

    def __call__(self, pending: Pending, turn: Turn) -> Sparse: ...


class Arrival(Protocol):
    """A tensor that will be there: complete at once among virtual workers, later over a network."""

    def then(self, use: Callable[[Tensor], Tensor]) -> "Arrival": ...

    def wait(self) -> Tensor: ...


class Link(Protocol):
    """How the L workers here reach all W. Calls are collective: every rank makes the same ones in the same order."""

    workers: int
    ranks: range

    def gather(self, rows_LN: Tensor, into_WN: Tensor | None = None) -> Arrival:
        """The rows of all workers in rank order, ``[W, N]``; in ``into_WN`` where they must move at all."""

    def sum(self, rows_LN: Tensor) -> Arrival:
        """The sum over all workers, ``[N]``. In rank order among virtual workers, in the backend's order else."""

    def scatter(self, parts_LWN: Tensor) -> Arrival:
        """Part ``w`` of every worker goes to worker ``w``: rows by receiver become rows by sender."""

    def gather_varying(self, rows: list[Tensor], sizes_W: list[int]) -> Arrival:
        """As ``gather``, for flat rows of different sizes, which all ranks know: one flat tensor in rank order."""

    def counts(self, count_L: Tensor) -> list[int]:
        """A whole number of every worker, in rank order; waits."""


@dataclass(slots=True)
class Report:
    """What an exchange told every rank: the same on all of them. Tensors, so that no device is waited for."""

    wanted_W: Tensor  # elements that each worker's rule chose
    kept_W: Tensor  # elements that travelled
    bad: Tensor  # one bool: a worker had a gradient that is not finite
    wrong_W: Tensor  # whose payload is not what was agreed
    bytes: int  # what one worker sent
    complain: Callable[[int], Exception]  # why that rank's payload was refused
    decode: Callable[[Tensor, float], None]  # write the sum over workers, in rank order, over a divisor


class Exchange(Protocol):
    """One way to bring the elements of all workers to all of them."""

    def send(self, rule: Rule, pending: Pending, turn: Turn) -> tuple[Sparse, Arrival]:
        """Sieve and issue the collective: what the workers here sent, and the payload that will arrive."""

    def open(self, payload: Tensor, sent: Sparse, turn: Turn) -> Report:
        """Check what arrived and say what it holds."""

    def fold(self, memory_Ln: Tensor) -> None:
        """Put what the exchange itself holds back into the workers' memory."""


@runtime_checkable
class Learner(Rule, Protocol):
    """A rule that learns from the exchanged gradient, the same on every rank."""

    def state(self, segments: Segments) -> dict[str, Tensor]:
        """What it starts with: one row a segment."""

    def slots_now(self, turn: Turn) -> int:
        """The elements that it keeps in this step, the same on every rank."""

    def observe(self, mean_n: Tensor, segments: Segments, turn: Turn) -> None:
        """Take in the mean gradient of a step."""
