"""All-reduce: where all workers choose the same coordinates, their values add up on the way, without positions."""

from dataclasses import replace

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.exchange.plan import Plan
from gradsieve.ops.reference import empty
from gradsieve.types import Arrival, Link, Pending, Report, Rule, Sparse, Turn
from gradsieve.wire import WireError

STEPS = 1021  # steps are told apart by their remainder, whose sum over ranks a float32 holds exactly


class Reduce:
    """Only values travel, always in float32: a sum of 16-bit values loses what no memory sees."""

    def __init__(self, plan: Plan, link: Link):
        self.plan, self.link = plan, link

    def send(self, rule: Rule, pending: Pending, turn: Turn) -> tuple[Sparse, Arrival]:
        workers, size = pending.grad_Ln.shape
        assert self.plan.fixed is not None
        pending.into = empty(workers, size, self.plan.fixed, torch.float32, pending.grad_Ln.device)
        sent = rule(pending, turn)
        steps_L = torch.full_like(sent.nonfinite_L, turn.step % STEPS)
        marks_LK = torch.stack([sent.nonfinite_L, steps_L], dim=1).float()
        return sent, self.link.sum(torch.cat([sent.values_LK, marks_LK], dim=1))

    def fold(self, memory_Ln: Tensor) -> None:
        """Nothing waits here."""

    def open(self, payload: Tensor, sent: Sparse, turn: Turn) -> Report:
        total = replace(sent.rows(slice(0, 1)), values_LK=payload[None, :-2], error_L=None)

        def decode(out_n: Tensor, divisor: float) -> None:
            ops.of(out_n).decode(total, out_n, divisor)

        count_W = total.wanted_L.expand(self.link.workers)
        apart = payload[-1] != self.link.workers * (turn.step % STEPS)  # each step has coordinates of its own
        return Report(
            wanted_W=count_W,
            kept_W=count_W,
            bad=~(payload[-2] == 0),
            wrong_W=apart.expand(self.link.workers),
            bytes=2 * (self.link.workers - 1) * 4 * len(payload) // self.link.workers,
            complain=lambda rank: WireError(f"the ranks are not all at step {turn.step}: they sent other coordinates"),
            decode=decode,
        )
