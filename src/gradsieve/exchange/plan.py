"""How the next exchange of one channel will look. Every rank computes the same plan from the same counts."""

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property

import torch

from gradsieve.wire import Format, form_of

SPARE = 1.07  # slots above the last step's count: counts move by a few percent from step to step
SLACK = 1.2  # more than this above what was needed, and the slots shrink again
BURST = 1.5  # counts that grow by more than this in a step are no ground to plan on
COUNT_BYTES = 8  # a rank's count, where the ranks agree on sizes first
LONGEST_REST = 64  # dense steps before a sparse one is tried again


@dataclass
class Plan:
    """Slots and form for a channel of ``size`` coordinates.

    A rule of fixed size knows its slots. For any other the first two exchanges agree on sizes, and each later one
    takes its slots from the counts that all ranks saw in the one before; what exceeds them is deferred. While counts
    leap, as in the first steps of a training, sizes are agreed on again: deferred, a burst would come a step late.
    """

    size: int
    values: torch.dtype
    workers: int
    layout: int
    fixed: int | None  # the rule's own bound on its elements
    strict: bool = False  # agree on sizes at every step
    may_go_dense: bool = True
    width: int = 4  # bytes of a gradient's element
    delivers: bool = False  # dense steps have a memory to deliver, whatever came before
    known: int | None = None  # slots taken from the last counts
    last: int | None = None  # the last largest count
    rest: int = 0  # dense steps still to go
    next_rest: int = 1

    @property
    def slots(self) -> int | None:
        """Slots of the next exchange; None where the ranks must agree on them first."""
        return self.fixed if self.fixed is not None else None if self.strict else self.known

    @property
    def expected(self) -> int:
        """Elements of the next exchange, as far as is known."""
        return self.fixed if self.fixed is not None else self.known or 0

    @property
    def dense(self) -> bool:
        """Whether the next exchange goes dense: the cheaper of the two, in bytes that a rank sends."""
        if not self.may_go_dense:
            return False
        return self.rest > 0 or self.most < (self.fixed or 0)

    @property
    def most(self) -> int:
        """The most slots with which a gather sends no more bytes than a dense step; -1 where none does."""
        if not self.may_go_dense:
            return self.size
        affordable = self.dense_step_bytes - (self.workers - 1) * COUNT_BYTES
        if affordable not in self._most:
            slots = range(self.size + 1)
            self._most[affordable] = (
                bisect_right(slots, affordable, key=lambda k: self.gather_bytes(self.format(k))) - 1
            )
        return self._most[affordable]

    @cached_property
    def _most(self) -> dict[int, int]:
        return {}

    def format(self, slots: int) -> Format:
        return Format(self.size, slots, self.values, self.layout, form_of(self.size, slots))

    def gather_bytes(self, form: Format) -> int:
        """What a rank sends in a ring all-gather."""
        return (self.workers - 1) * form.bytes

    @property
    def dense_bytes(self) -> int:
        """What a rank sends in a ring all-reduce of the gradient."""
        return self._reduced(self.width)

    @property
    def dense_step_bytes(self) -> int:
        """What a dense step is taken to cost here: it sends a memory as float32. It is exact, where values may not be,
        so float64 counts as no more."""
        return self._reduced(4 if self.delivers else min(self.width, 4))

    def _reduced(self, width: int) -> int:
        return 2 * (self.workers - 1) * width * self.size // self.workers

    def learn(self, wanted: int) -> None:
        """Take in the largest count of the exchange that just ended."""
        if self.fixed is not None:
            return
        last, self.last = self.last, wanted
        if wanted > self.most:
            self.rest, self.next_rest = self.next_rest, min(2 * self.next_rest, LONGEST_REST)
            self.known = self.most
            return
        self.next_rest = 1
        if last is None or wanted > max(BURST * last, 64):
            self.known = None
        elif self.known is None or wanted > self.known or self.known > max(SLACK * wanted, 64):
            self.known = min(self.most, -(-int(SPARE * wanted + 16) // 16) * 16)

    def went_dense(self) -> None:
        self.rest = max(0, self.rest - 1)
