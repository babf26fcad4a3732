"""Sparse all-reduce: every coordinate has an owner that sums what all workers send of it, and passes on the largest.

Each worker's elements go to their owners (all-to-all); an owner adds them up in rank order, keeps the largest of its
range, and its choice goes to all (all-gather). What it does not pass on waits in a memory of the owner's. That memory
is in a worker's units: when ranges move, or a state is saved, it simply joins the memory of the worker beside it, and
nothing is lost. A rank sends about 3 k elements, however many workers there are, where an all-gather sends (W - 1) k.
"""

import dataclasses

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.exchange.plan import Plan
from gradsieve.ops.reference import positions, to_int16
from gradsieve.types import BLOCK, Arrival, Link, Pending, Report, Rule, Segments, Sparse, Turn
from gradsieve.wire import NONFINITE, WANTED, Format, Frame

PASSED_ON = 2  # owners pass on so many times the elements of one worker, all owners together
UNEVEN = 1.25  # the busiest owner over the mean, above which ranges move
SETTLE = 16  # steps between two moves
ASKED = 11  # a spare header field: all that was addressed to an owner, what found no room included


class Owner:
    """Two collectives a step, each of a size that all ranks know from the step before."""

    def __init__(self, plan: Plan, link: Link):
        self.plan, self.link = plan, link
        workers = link.workers
        self.bounds = [plan.size * w // workers for w in range(workers + 1)]
        self._next_bounds: list[int] | None = None
        self._moved = 0
        self._rest_Lr: Tensor | None = None  # the owner's memory
        self._slots: tuple[int, int] | None = None  # a part's, and what an owner passes on

    def send(self, rule: Rule, pending: Pending, turn: Turn) -> tuple[Sparse, Arrival]:
        rescaled = pending.decay not in (0.0, 1.0)  # to another learning rate: what owners hold must be so too
        if self._next_bounds is not None or rescaled:
            self.fold(pending.memory_Ln)
        if self._next_bounds is not None:
            self.bounds, self._next_bounds, self._moved = self._next_bounds, None, turn.step
        found = rule(pending, turn)
        parts, sent = self._address(found, pending, turn)
        arrived_LWN = self.link.scatter(parts.buffer_LN.view(len(self.link.ranks), self.link.workers, -1)).wait()
        return sent, self.link.gather(self._reduce(Frame(parts.form, arrived_LWN.flatten(0, 1)), pending, turn))

    def open(self, payload: Tensor, sent: Sparse, turn: Turn) -> Report:
        """What all owners passed on, and what that means for the next step, alike on every rank."""
        frame = Frame(self._passed_on.form, payload)
        arrived, wrong_W = frame.unpack(turn.step)
        bounds, header_WH = self.bounds, frame.header_LH
        if not bool(wrong_W.any()):
            self._plan_next(header_WH[:, ASKED].tolist(), turn.step)

        def decode(out_n: Tensor, divisor: float) -> None:
            part_r = torch.empty(arrived.size, dtype=out_n.dtype, device=out_n.device)
            for owner in range(self.link.workers):
                start, stop = bounds[owner], bounds[owner + 1]
                ops.of(out_n).decode(arrived.rows(slice(owner, owner + 1)), part_r, divisor)
                out_n[start:stop] = part_r[: stop - start]

        return Report(
            wanted_W=header_WH[:, ASKED],
            kept_W=header_WH[:, WANTED],
            bad=header_WH[:, NONFINITE].any(),
            wrong_W=wrong_W,
            bytes=(self.link.workers - 1) * (self._part_bytes + frame.form.bytes),
            complain=lambda rank: frame.complaint(turn.step, rank),
            decode=decode,
        )

    def fold(self, memory_Ln: Tensor) -> None:
        """What the owners here hold joins the memory of the workers here: both are delivered through one mean."""
        if self._rest_Lr is None:
            return
        for row, rank in enumerate(self.link.ranks):
            start, stop = self.bounds[rank], self.bounds[rank + 1]
            memory_Ln[row, start:stop] += self._rest_Lr[row, : stop - start]
        self._rest_Lr = None

    def take_back(self, again: Tensor) -> None:
        """Where ``again``, what the owners here passed on waits with them again: the step it was for is not taken."""
        if self._rest_Lr is not None:
            passed_on = self._passed_on.sparse
            again_LB = passed_on.counts_LB * again
            ops.of(self._rest_Lr).give_back(self._rest_Lr, dataclasses.replace(passed_on, counts_LB=again_LB))

    def _address(self, found: Sparse, pending: Pending, turn: Turn) -> tuple[Frame, Sparse]:
        """Sort each worker's elements by owner into parts of one size; what exceeds a part goes back to the memory."""
        workers, here = self.link.workers, len(self.link.ranks)
        index_LK, valid_LK = positions(found)
        order_LK = torch.where(valid_LK, index_LK, found.size).argsort(1)
        index_LK, valid_LK = index_LK.gather(1, order_LK), valid_LK.gather(1, order_LK)
        values_LK = found.values_LK.gather(1, order_LK)
        starts = torch.tensor(self.bounds, device=index_LK.device)
        owner_LK = torch.searchsorted(starts[1:-1].contiguous(), index_LK, right=True)
        row_LK = owner_LK + torch.arange(here, device=index_LK.device).unsqueeze(1) * workers
        count_R = torch.bincount(row_LK[valid_LK], minlength=here * workers)
        if self._slots is None or self.plan.strict:
            most = max(self.link.counts(count_R.view(here, workers).amax(1)))
            self._slots = self._sizes(most * workers, max(self.link.counts(valid_LK.sum(1))))
        slots = self._slots[0]

        first_LW = count_R.view(here, workers).cumsum(1) - count_R.view(here, workers)
        place_LK = torch.arange(index_LK.shape[1], device=index_LK.device) - first_LW.gather(1, owner_LK)
        fits_LK = valid_LK & (place_LK < slots)
        undone_L1 = found.nonfinite_L.unsqueeze(1) > 0  # all of it is taken back, when the step has arrived
        sent = _keep_back(found, pending.memory_Ln, order_LK, index_LK, valid_LK & ~fits_LK & ~undone_L1)

        form = Format(self._widest(), slots, pending.values, self.plan.layout)
        frame = Frame.empty(form, here * workers, index_LK.device)
        row, place = row_LK[fits_LK], place_LK[fits_LK]
        local = index_LK[fits_LK] - starts[owner_LK[fits_LK]]
        blocks = torch.bincount(row * form.blocks + local // BLOCK, minlength=here * workers * form.blocks)
        frame.counts_LB.copy_(blocks.view(here * workers, form.blocks))
        frame.offsets_LK[row, place] = to_int16(local % BLOCK)
        frame.values_LK[row, place] = values_LK[fits_LK]
        frame.header_LH[:, WANTED] = count_R.int()
        frame.header_LH[:, NONFINITE] = found.nonfinite_L.repeat_interleave(workers)
        frame.pack(turn.step)
        self._part_bytes = form.bytes
        return frame, sent

    def _reduce(self, parts: Frame, pending: Pending, turn: Turn) -> Tensor:
        """As owner: sum the parts in rank order, choose the largest, and leave the rest in the memory here."""
        arrived, wrong_R = parts.unpack(turn.step)
        workers, here = self.link.workers, len(self.link.ranks)
        if bool(wrong_R.any()):
            raise parts.complaint(turn.step, int(wrong_R.nonzero()[0]) % workers)
        assert self._slots is not None
        size, slots = self._widest(), min(self._slots[1], self._widest())
        passed_on = Frame.empty(Format(size, slots, pending.values, self.plan.layout), here, parts.buffer_LN.device)
        header_LWH = parts.header_LH.view(here, workers, -1)
        bad = bool(header_LWH[:, :, NONFINITE].any())
        if not bad:
            sums_Lr = pending.memory_Ln.new_empty(here, size)
            for owner in range(here):
                rows = slice(owner * workers, (owner + 1) * workers)
                ops.of(sums_Lr).decode(arrived.rows(rows), sums_Lr[owner], 1.0)
            if self._rest_Lr is None:
                self._rest_Lr = torch.zeros_like(sums_Lr)
            chosen = Pending(sums_Lr, self._rest_Lr, Segments((0, size), (0,)), values=pending.values)
            chosen.into = passed_on.sparse
            ops.of(sums_Lr).topk(chosen, (slots,))
        kept_LW = parts.counts_LB.view(here, workers, -1).sum(2)
        passed_on.header_LH[:, NONFINITE] = int(bad)
        passed_on.header_LH[:, WANTED] = kept_LW.sum(1).int()
        passed_on.header_LH[:, ASKED] = header_LWH[:, :, WANTED].sum(1).int()
        self._passed_on = passed_on
        return passed_on.pack(turn.step)

    def _plan_next(self, load_W: list[int], step: int) -> None:
        """Ranges and sizes of the next step, from what each owner was asked for in this one."""
        self._rebalance(load_W, step)
        self._slots = self._sizes(max(load_W), sum(load_W) / self.link.workers)

    def _sizes(self, busiest: float, k: float) -> tuple[int, int]:
        """Slots of a part (the busiest owner's mean part and two deviations), and of what an owner passes on."""
        part = busiest / self.link.workers
        return int(part + 2 * part**0.5) + 2, max(1, -(-int(PASSED_ON * k) // self.link.workers))

    def _widest(self) -> int:
        return max(stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False))

    def _rebalance(self, load_W: list[int], step: int) -> None:
        """Move the ranges towards equal loads, taking each range's load as spread evenly over it."""
        mean = sum(load_W) / self.link.workers
        if max(load_W) <= UNEVEN * mean + 8 or step - self._moved < SETTLE:
            return
        cuts, owner, before = [0], 0, 0.0
        for goal in (mean * w for w in range(1, self.link.workers)):
            while before + load_W[owner] < goal:
                before += load_W[owner]
                owner += 1
            width = self.bounds[owner + 1] - self.bounds[owner]
            cuts.append(self.bounds[owner] + int(width * (goal - before) / max(load_W[owner], 1)))
        self._next_bounds = [*cuts, self.plan.size]


def _keep_back(found: Sparse, memory_Ln: Tensor, order_LK: Tensor, index_LK: Tensor, late_LK: Tensor) -> Sparse:
    """Put elements that found no room back into the memory: what was sent is the others."""
    if not bool(late_LK.any()):
        return found
    rows, columns = late_LK.nonzero(as_tuple=True)
    slots, index = order_LK[rows, columns], index_LK[rows, columns]
    memory_Ln[rows, index] += found.values_LK[rows, slots].to(memory_Ln.dtype)
    counts_LB = found.counts_LB.clone()
    counts_LB.index_put_((rows, index // BLOCK), counts_LB.new_tensor(-1), accumulate=True)
    late_LK = torch.zeros_like(late_LK).index_put_((rows, slots), late_LK.new_tensor(True))
    first_LK = late_LK.int().argsort(dim=1, stable=True)  # the others move together, in their order
    return dataclasses.replace(
        found,
        counts_LB=counts_LB,
        offsets_LK=found.offsets_LK.gather(1, first_LK),
        values_LK=found.values_LK.gather(1, first_LK),
        error_L=None if found.error_L is None else memory_Ln.double().square().sum(1),
    )
