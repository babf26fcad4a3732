"""All-gather: every worker's own elements travel to all. The way of rules whose workers choose differently."""

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.exchange.exact import Exact
from gradsieve.exchange.plan import Plan
from gradsieve.types import Arrival, Link, Pending, Report, Rule, Sparse, Turn
from gradsieve.wire import Frame


class Gather:
    """One packed collective a step, of a size that all ranks know before they sieve; exact sizes where they do not."""

    def __init__(self, plan: Plan, link: Link):
        self.plan, self.link = plan, link
        self._exact = Exact(plan, link)
        self._frame: Frame | None = None
        self._arrived: Frame | None = None

    def send(self, rule: Rule, pending: Pending, turn: Turn) -> tuple[Sparse, Arrival]:
        slots = self.plan.slots
        self._arrived = None if slots is None else self._arrived
        if slots is None:
            return self._exact.send(rule, pending, turn)
        frame = self._frame_of(slots, len(pending.grad_Ln), pending.grad_Ln.device)
        pending.into = frame.sparse
        sent = rule(pending, turn)
        return sent, self.link.gather(frame.pack(turn.step), self._arrival(frame).buffer_LN)

    def fold(self, memory_Ln: Tensor) -> None:
        """Nothing waits here."""

    def open(self, payload: Tensor, sent: Sparse, turn: Turn) -> Report:
        if self._arrived is None:
            return self._exact.open(payload, sent, turn)
        frame = self._arrived
        arrived, wrong_W = frame.unpack(turn.step)

        def decode(out_n: Tensor, divisor: float) -> None:
            ops.of(out_n).decode(arrived, out_n, divisor)

        return Report(
            wanted_W=arrived.wanted_L,
            kept_W=arrived.counts_LB.sum(1),
            bad=arrived.nonfinite_L.any(),
            wrong_W=wrong_W,
            bytes=self.plan.gather_bytes(frame.form),
            complain=lambda rank: frame.complaint(turn.step, rank),
            decode=decode,
        )

    def _frame_of(self, slots: int, workers: int, device: torch.device) -> Frame:
        """The payload's buffer, used again while the slots stay the same."""
        if self._frame is None or self._frame.form.slots != slots or len(self._frame.buffer_LN) != workers:
            self._frame = Frame.empty(self.plan.format(slots), workers, device)
        return self._frame

    def _arrival(self, frame: Frame) -> Frame:
        """Where the rows of all workers land: the frame itself if they are all here, else one of W rows."""
        if len(frame.buffer_LN) == self.link.workers:
            self._arrived = frame
        elif self._arrived is None or self._arrived.form != frame.form:
            self._arrived = Frame.empty(frame.form, self.link.workers, frame.buffer_LN.device)
        return self._arrived
