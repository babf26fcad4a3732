"""All-gather of exact sizes: ranks tell each other their counts first, and each sends just what it has.

The way of ``strict=True``, and of the first exchange of a rule whose count varies.
"""

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.exchange.plan import COUNT_BYTES, Plan
from gradsieve.ops.reference import empty
from gradsieve.types import BY_SLOT, BY_WORKER, Arrival, Link, Pending, Report, Rule, Sparse, Turn
from gradsieve.wire import Format, Frame


class Exact:
    """Two collectives a step: counts, then payloads of different sizes. Nothing is padded; what exceeds dense waits."""

    def __init__(self, plan: Plan, link: Link):
        self.plan, self.link = plan, link
        self._forms: list[Format] = []

    def send(self, rule: Rule, pending: Pending, turn: Turn) -> tuple[Sparse, Arrival]:
        workers, size = pending.grad_Ln.shape
        device = pending.grad_Ln.device
        if self.plan.may_go_dense:  # what would exceed a dense exchange waits
            pending.into = empty(workers, size, max(self.plan.most, 0), pending.values, device)
        sent = rule(pending, turn)
        kept_W = self.link.counts(sent.counts_LB.sum(1))
        self._forms = [self.plan.format(kept) for kept in kept_W]
        rows = []
        for row, rank in enumerate(self.link.ranks):
            frame = Frame.empty(self._forms[rank], 1, device)
            copy_rows(sent.rows(slice(row, row + 1)), frame.sparse, kept_W[rank])
            rows.append(frame.pack(turn.step).view(-1))
        return sent, self.link.gather_varying(rows, [form.bytes for form in self._forms])

    def open(self, payload: Tensor, sent: Sparse, turn: Turn) -> Report:
        sizes = [form.bytes for form in self._forms]
        parts = torch.split(payload, sizes)
        frames = [Frame(form, part.view(1, -1)) for form, part in zip(self._forms, parts, strict=True)]
        slots = max(form.slots for form in self._forms)
        merged = empty(len(frames), self.plan.size, slots, self.plan.values, payload.device)
        wrong = []
        for rank, frame in enumerate(frames):
            arrived, wrong_1 = frame.unpack(turn.step)
            copy_rows(arrived, merged.rows(slice(rank, rank + 1)), frame.form.slots)
            wrong.append(wrong_1)

        def decode(out_n: Tensor, divisor: float) -> None:
            ops.of(out_n).decode(merged, out_n, divisor)

        return Report(
            wanted_W=merged.wanted_L,
            kept_W=merged.counts_LB.sum(1),
            bad=merged.nonfinite_L.any(),
            wrong_W=torch.cat(wrong),
            bytes=(self.link.workers - 1) * (sum(sizes) // len(sizes) + COUNT_BYTES),
            complain=lambda rank: frames[rank].complaint(turn.step, 0, rank),
            decode=decode,
        )

    def fold(self, memory_Ln: Tensor) -> None:
        """Nothing waits here."""


def copy_rows(source: Sparse, target: Sparse, slots: int) -> None:
    """Copy elements from one ``Sparse`` into another with as many workers and room for ``slots``."""
    for part in BY_SLOT:
        getattr(target, part)[:, :slots].copy_(getattr(source, part)[:, :slots])
    for part in BY_WORKER:
        getattr(target, part).copy_(getattr(source, part))
