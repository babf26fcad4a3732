"""All-reduce: where all workers choose the same coordinates, their values add up on the way, without positions."""

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.exchange.plan import Plan
from gradsieve.ops.reference import empty
from gradsieve.types import Arrival, Link, Pending, Report, Rule, Sparse, Turn


class Reduce:
    """Only values travel, always in float32: a sum of 16-bit values loses what no memory sees."""

    def __init__(self, plan: Plan, link: Link):
        self.plan, self.link = plan, link

    def send(self, rule: Rule, pending: Pending, turn: Turn) -> tuple[Sparse, Arrival]:
        workers, size = pending.grad_Ln.shape
        assert self.plan.fixed is not None
        pending.into = empty(workers, size, self.plan.fixed, torch.float32, pending.grad_Ln.device)
        sent = rule(pending, turn)
        marked_LK = torch.cat([sent.values_LK, sent.nonfinite_L.unsqueeze(1).float()], dim=1)
        return sent, self.link.sum(marked_LK)

    def fold(self, memory_Ln: Tensor) -> None:
        """Nothing waits here."""

    def open(self, payload: Tensor, sent: Sparse, turn: Turn) -> Report:
        one = slice(0, 1)
        total = Sparse(
            sent.size,
            sent.counts_LB[one],
            sent.offsets_LK[one],
            payload[None, :-1],
            sent.wanted_L[one],
            sent.nonfinite_L[one],
        )

        def decode(out_n: Tensor, divisor: float) -> None:
            ops.of(out_n).decode(total, out_n, divisor)

        count_W = sent.wanted_L[one].expand(self.link.workers)
        return Report(
            wanted_W=count_W,
            kept_W=count_W,
            bad=~(payload[-1] == 0),
            wrong_W=torch.zeros_like(count_W, dtype=torch.bool),
            bytes=2 * (self.link.workers - 1) * 4 * len(payload) // self.link.workers,
            complain=lambda rank: AssertionError(f"values of rank {rank} carry no positions to refuse"),
            decode=decode,
        )
