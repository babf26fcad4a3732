"""The heart: one sparsification step of one channel.

    p      = decay * memory + gain * gradient
    keep   = rule(p)
    send     p[keep], packed
    memory = p - what the receivers decode of it
    result = mean over workers of what was sent

L workers here, W in all, n coordinates. A DDP rank has L = 1; the simulator has L = W and a link that is the identity.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.exchange import strategy
from gradsieve.exchange.owner import Owner
from gradsieve.exchange.plan import Plan
from gradsieve.exchange.told import NOTHING, Late, Told
from gradsieve.feedback import Feedback, Memory, Momentum
from gradsieve.layout import Layout
from gradsieve.meter import Meter
from gradsieve.types import Arrival, Learner, Link, Pending, Report, Rule, Segments, Sparse, Turn


@dataclass(frozen=True)
class Options:
    """What all channels of a run share, and all ranks agree on."""

    rule: Rule
    scope: str = "layer"
    feedback: Feedback = field(default_factory=Feedback)
    exchange: str = "auto"
    values: torch.dtype = torch.float32
    strict: bool = False

    def rule_at(self, step: int) -> Rule:
        """The rule of a step: itself, or denser while a warm-up lasts."""
        if not isinstance(self.feedback, Momentum) or step >= self.feedback.warmup:
            return self.rule
        target: float = self.rule.density  # type: ignore[attr-defined]
        return dataclasses.replace(self.rule, density=self.feedback.density(step, target))  # type: ignore[type-var]


class Channel:
    """A stretch of the gradient that is exchanged in one go: a DDP bucket, or the whole model in the simulator."""

    def __init__(
        self,
        options: Options,
        layout: Layout,
        link: Link,
        meter: Meter,
        device: torch.device,
        dtype: torch.dtype,
        segments: Segments | None = None,
    ):
        self.options, self.layout, self.link, self.meter = options, layout, link, meter
        self.segments = layout.segments(options.scope) if segments is None else segments
        self._parameters = layout.segments("layer")
        self.memory = Memory(options.feedback, len(link.ranks), layout.size, device, dtype)
        self.memory_is_empty = True
        self._learner = options.rule if isinstance(options.rule, Learner) else None
        self._accelerates = isinstance(options.feedback, Momentum)
        self.state = self._learner.state(self.segments) if self._learner else {}
        self.cache: dict[str, Any] = {}
        self.plan = Plan(
            size=layout.size,
            values=options.values,
            workers=link.workers,
            layout=layout.fingerprint,
            fixed=options.rule.slots(self.segments),
            strict=options.strict,
            may_go_dense=options.exchange == "auto",
            width=dtype.itemsize,
            delivers=self._accelerates,
        )
        self._planned = options.rule  # whose elements the plan knows
        self.exchange = strategy(options.exchange, self.plan, link)
        self._late: Late | None = None
        self.bad = torch.zeros((), dtype=torch.bool, device=device)  # the last result is not finite, on all ranks alike
        self._undone = self.bad  # the last step left this memory as it was; never True where bad is not
        self._sent: Sparse | None = None  # what the last step can still take back: elements,
        self._flushed_Ln: Tensor | None = None  # or a whole memory
        self.busy = 0.0  # seconds that the last exchange spent coding and decoding
        self._decay = 1.0  # what brings a memory from the learning rate before to the one of this step
        self._resting: list[tuple[str, slice, Tensor]] = []
        self._may_rest = False  # here, or on another rank

    def step(
        self,
        grad_Ln: Tensor,
        out_n: Tensor,
        step: int,
        *,
        lr: float | None = None,
        lr_ratio: float = 1.0,
        gain: float = 1.0,
        prefer_dense: bool = False,
        at_stake: bool = True,
    ) -> Arrival:
        """Exchange one gradient; ``out_n`` holds the mean, in the gradient's own units, when the arrival is there.

        ``lr_ratio`` is lr_before / lr_now; ``gain`` brings the gradient into the memory's units (1 / loss scale);
        ``prefer_dense`` sends all of it, this time; ``at_stake`` is whether any channel of the step has a memory, which
        it must not lose to a step that is not finite.
        """
        self.catch_up()
        self._sent = self._flushed_Ln = None
        self._decay = lr_ratio if self.options.feedback.kind == "update" else 1.0
        turn = Turn(step, None if self.options.exchange == "allreduce" else self.link.ranks, self.state, lr, gain)
        rule = self._rule(step, turn)
        started = time.perf_counter()
        dense = prefer_dense or self.options.exchange == "dense" or self.plan.dense
        if dense and self.nothing_waits():
            check = self._learner is not None or (at_stake and self.options.exchange != "dense")
            divisor = float(self.link.workers)
            if grad_Ln.dtype == torch.float16:  # a sum may leave its range where the mean does not
                grad_Ln, divisor = grad_Ln / divisor, 1.0
            return self._timed(step, started, *self._all_of(grad_Ln, out_n, turn, divisor, p_Ln=None, check=check))
        pending = self._correct(grad_Ln, gain, lr_ratio)
        if dense:
            p_Ln = pending.memory_Ln * pending.decay + pending.grad_Ln.to(pending.memory_Ln.dtype) * pending.gain
            divisor = self.link.workers * gain
            return self._timed(step, started, *self._all_of(p_Ln, out_n, turn, divisor, p_Ln=p_Ln, check=True))
        self.memory_is_empty = False
        sent, arrival = self.exchange.send(rule, pending, turn)

        def receive(payload: Tensor) -> Tensor:
            return self._receive(self.exchange.open(payload, sent, turn), pending, sent, out_n, turn, gain)

        return self._timed(step, started, arrival, receive)

    def _rule(self, step: int, turn: Turn) -> Rule:
        """The rule of this step; the plan knows how many elements it keeps, where that is fixed."""
        rule = self.options.rule_at(step)
        if self._learner is not None:
            self.plan.fixed = self._learner.slots_now(turn)
        elif rule is not self._planned:
            self.plan.fixed, self._planned = rule.slots(self.segments), rule
        return rule

    def _timed(self, step: int, started: float, arrival: Arrival, receive: Callable[[Tensor], Tensor]) -> Arrival:
        """Receive what arrives, and tell the meter how long each phase took."""
        issued = time.perf_counter()

        def arrived(payload: Tensor) -> Tensor:
            here = time.perf_counter()
            result = receive(payload)
            done = time.perf_counter()
            self.busy = issued - started + done - here
            self.meter.spent(step, coding=issued - started, exchange=here - issued, decoding=done - here)
            return result

        return arrival.then(arrived)

    def rest(self, names: Sequence[str]) -> None:
        """Leave these parameters' memory out of the next step: a result for them may be dropped.

        All ranks call it, each with names of its own.
        """
        self._may_rest = True
        self.plan.delivers |= self.plan.fixed is None  # after one sparse step no memory counts as empty
        if self.nothing_waits():
            return
        if names:
            self.exchange.fold(self.memory.memory_Ln)  # what an owner holds of them rests too
        for i in map(self.layout.names.index, names):
            place = slice(*self.layout.bounds[i : i + 2])
            for kind, tensor in self.memory.tensors.items():
                self._resting.append((kind, place, tensor[:, place].clone()))
                tensor[:, place] = 0

    def _wake(self) -> None:
        """Bring back what rested, in the units that the memory has now."""
        for kind, place, rested in self._resting:
            _worked_on(rested)
            scale = rested.new_ones(()).where(self._undone, self._decay) if kind == "memory" else 1.0
            self.memory.tensors[kind][:, place] += rested * scale
        self._resting.clear()

    def _correct(self, grad_Ln: Tensor, gain: float, lr_ratio: float) -> Pending:
        pending = self.memory.correct(grad_Ln, self.segments, gain=gain, lr_ratio=lr_ratio, workers=self.link.workers)
        pending.values, pending.measure, pending.cache = self.options.values, self.meter.error, self.cache
        return pending

    def nothing_waits(self) -> bool:
        """Whether p is the gradient itself, so that a dense step can send it as it lies."""
        return self.options.feedback.kind == "none" or (self.memory_is_empty and not self._accelerates)

    def _receive(
        self, report: Report, pending: Pending, sent: Sparse, out_n: Tensor, turn: Turn, gain: float
    ) -> Tensor:
        """Decode into ``out_n``, which may be the gradient itself: whatever must be undone is undone before."""
        _worked_on(out_n, pending.grad_Ln)
        now = not out_n.is_cuda or self._learner is not None or self._accelerates
        self._late = Late(turn, report, self._error(sent, turn), sent)
        bad = now and self.catch_up().bad
        if bad or not now:
            ops.of(out_n).undo(pending, sent, report.bad)
        report.decode(out_n, self.link.workers * gain)
        if (bad or not now) and self.layout.size:  # a step that is not finite is so in every parameter, on every rank
            first_P = self._parameters.tensor(out_n.device)[:-1].clamp(max=self.layout.size - 1)
            out_n[first_P] = torch.where(report.bad, torch.nan, out_n[first_P])
        self._sent, self._undone, self.bad = sent, report.bad, report.bad
        if out_n.dtype == torch.float16:  # a finite mean may be too large for it
            self.bad = self.bad | ~out_n.isfinite().all()
        if now and not bad:
            self.memory.settle(sent)
        if self._learner is not None and not bool(self.bad):
            self._learner.observe(out_n, self.segments, turn)
        self._wake()
        return out_n

    def catch_up(self) -> Told:
        """Take in what the last exchange told: at once on a CPU, a step later where a device would be waited for."""
        late, self._late = self._late, None
        if late is None:
            return NOTHING
        told = late.read()
        if told.refused:
            raise late.report.complain(int(late.report.wrong_W.nonzero()[0]))
        self.plan.learn(told.wanted)
        self.meter.record(
            late.turn.step,
            coordinates=self.layout.size,
            kept=told.kept,
            deferred=told.chosen - told.kept,
            bytes=late.report.bytes,
            dense_bytes=self.plan.dense_bytes,
            error=told.error,
        )
        return told

    def forget(self) -> None:
        """Remember nothing, as before the first step."""
        self.exchange.fold(self.memory.memory_Ln)  # what an owner holds goes with the rest
        for tensor in self.memory.tensors.values():
            tensor.zero_()
        self.memory_is_empty = True
        self.state = self._learner.state(self.segments) if self._learner else {}

    def conclude(self, bad: Tensor) -> None:
        """Once all channels of a step have arrived: where one of them was ``bad``, this memory keeps what it sent.

        A memory that was not touched, because the gradient here was not finite, only follows the learning rate.
        """
        memory_Ln = self.memory.memory_Ln
        if self._flushed_Ln is not None and bool(bad):
            self.memory.tensors["memory"] = self._flushed_Ln.mul_(self._decay).add_(memory_Ln)
            self.memory_is_empty = False
        if self._sent is not None and bad is not self._undone:
            again = bad & ~self._undone
            if isinstance(self.exchange, Owner):  # it has what was sent, or passed it on
                self.exchange.take_back(again)
            else:
                again_LB = self._sent.counts_LB * again  # no elements where there is nothing to take back
                ops.of(memory_Ln).give_back(memory_Ln, dataclasses.replace(self._sent, counts_LB=again_LB))
        if self._decay != 1.0:
            memory_Ln.mul_(memory_Ln.new_full((), self._decay).where(self._undone, 1.0))
        self._sent = self._flushed_Ln = None

    def _all_of(
        self, rows_Ln: Tensor, out_n: Tensor, turn: Turn, divisor: float, *, p_Ln: Tensor | None, check: bool
    ) -> tuple[Arrival, Callable[[Tensor], Tensor]]:
        """Send all of the rows, and what to do with their sum."""
        sent = 2 * (self.link.workers - 1) * rows_Ln[0].nbytes // self.link.workers
        receive = partial(self._receive_all, out_n=out_n, turn=turn, divisor=divisor, p_Ln=p_Ln, check=check, sent=sent)
        return self.link.sum(rows_Ln), receive

    def _receive_all(
        self, total_n: Tensor, *, out_n: Tensor, turn: Turn, divisor: float, p_Ln: Tensor | None, check: bool, sent: int
    ) -> Tensor:
        """After a dense exchange: the mean, and a memory that holds nothing, unless the step is not finite."""
        _worked_on(out_n)
        if total_n.data_ptr() == out_n.data_ptr():
            total_n.div_(divisor)
        else:
            ops.of(out_n).mean(total_n.unsqueeze(0), out_n, divisor)
        self.bad = self._undone = ~out_n.isfinite().all() if check else torch.zeros_like(self.bad)
        if p_Ln is not None and not bool(self.bad):
            self._flushed_Ln, self.memory.tensors["memory"] = self.memory.memory_Ln, p_Ln.zero_()
            self.memory.settle(None)
            self.memory_is_empty = not self._may_rest  # the same on all ranks: they send p or they all send gradients
        self._wake()
        if self._learner is not None and not bool(self.bad):
            self._learner.observe(out_n, self.segments, turn)
        self.plan.went_dense()
        size, dense = self.layout.size, self.plan.dense_bytes
        self.meter.record(turn.step, coordinates=size, kept=size, bytes=sent, dense_bytes=dense)
        return out_n

    def _error(self, sent: Sparse, turn: Turn) -> Tensor | None:
        """The memory's squared norm, in update units where the memory follows the learning rate."""
        if sent.error_L is None or self.options.feedback.kind != "update" or turn.lr is None:
            return sent.error_L
        return sent.error_L * turn.lr**2


def _worked_on(*tensors: Tensor) -> None:
    """Arrivals are received on a stream of their own: CUDA must not give this memory away before that is done."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(tensor.device))
