"""The handle of a sparse exchange: what happens to DDP's buckets, with a memory that belongs to parameters."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.amp import GradScaler
from torch.futures import Future
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from gradsieve.exchange.group import Coming, GroupLink
from gradsieve.feedback import Momentum
from gradsieve.handshake import agree
from gradsieve.landing import Landing
from gradsieve.layout import Layout
from gradsieve.meter import Meter, Stats
from gradsieve.options import options_of
from gradsieve.pace import Pace
from gradsieve.state import Pieces, blank, load_pieces, save_pieces
from gradsieve.step import Channel, Options
from gradsieve.types import Rule


class Sieve:
    """The handle of a sparse exchange: its figures, its memory, and the way to end it."""

    def __init__(
        self,
        module: nn.Module,
        compressor: Rule,
        *,
        scope: str = "layer",
        feedback: object = "gradient",
        exchange: str = "auto",
        values: str = "float32",
        strict: bool = False,
        optimizer: Optimizer | None = None,
        scaler: GradScaler | None = None,
        meter: Meter | None = None,
        group: dist.ProcessGroup | None = None,
    ):
        """``group`` is the one that DDP was given, for a sieve that meets it at the first bucket (``gs.hook``)."""
        self.options = options_of(compressor, scope, feedback, exchange, values, strict)
        ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))  # DDP's own name for them
        _check_module(module, ignored)
        _check_companions(self.options, optimizer, scaler)
        self.meter = Meter() if meter is None else meter
        self.step = 0
        self._met = 0  # steps of this sieve, whatever state it went on from
        self._names: dict[Tensor, str] = {p: name for name, p in module.named_parameters() if name not in ignored}
        # those that DDP exchanges, unless some were frozen or thawed since it was made
        self._trained = {p: name for p, name in self._names.items() if p.requires_grad}
        self._group = group
        self.joining: Callable[[], bool] = lambda: False  # whether ranks may have run out of batches
        self.alive = True  # this one has not
        self._optimizer, self._scaler = optimizer, scaler
        self._link: GroupLink | None = None
        self.on_detach: Callable[[], None] | None = None  # gives DDP's hook back
        self._channels: dict[int, Channel] = {}  # by bucket; -1 holds the whole model in global scope
        self._filled: dict[int, tuple[int, ...]] = {}  # by bucket: its parameters, told apart without asking them
        self._landings: dict[int, Landing] = {}  # by bucket
        self._rearranged = False  # DDP has made its buckets anew in this step
        self._pieces = Pieces()
        self._lr: float | None = None
        self._lr_ratio = 1.0
        self._gain = 1.0
        self._pace: Pace | None = None
        self._crowded = False
        self._coming: list[tuple[int, Coming, Future[Tensor]]] = []  # in this step, by bucket
        self._dense, self._at_stake = False, True  # this step
        self._sent: list[Channel] = []  # in this step
        self._waiting: list[tuple[GradBucket, Future[Tensor]]] = []
        self._broken: str | None = None
        self._used: set[str] | None = set()  # in this step
        self._watches: dict[str, RemovableHandle] = {}
        self._watch(self._used)

    def bind(self, group: dist.ProcessGroup, *, watch_use: bool = True) -> None:
        """Meet the other ranks and compare notes with them. Done by ``attach``, or at the first bucket.

        Where DDP may drop results, because it looks for parameters that no rank used, the sieve has to look too.
        """
        if not watch_use:
            self._unwatch()
        link = GroupLink(group)
        agree(link, self.options, _layout_of(self._trained), link.device)
        on_cpu = all(p.is_cpu for p in self._trained)  # a device codes while the host goes on: no clock here sees it
        self._pace = Pace(link) if self.options.exchange == "auto" and on_cpu else None
        self._crowded = on_cpu and link.crowded()
        self._link = link

    def stats(self) -> Stats:
        """Density, bytes sent and saved, total error, time by phase; for the last step and in all."""
        for channel in self._channels.values():
            channel.catch_up()
        return self.meter.stats()

    def state_dict(self) -> dict[str, Any]:
        """This rank's memory by parameter name: tensors and plain values only. Save one on every rank."""
        self.refuse_if_broken()
        self._settle()
        rank, workers = (self._link.ranks.start, self._link.workers) if self._link else _place(self._group)
        new = not self._pieces.memory
        return save_pieces(
            blank(self.options, _layout_of(self._trained), [p.dtype for p in self._trained]) if new else self._pieces,
            _layout_of(self._names),
            feedback=self.options.feedback.kind,
            step=self.step,
            lr=self._lr,
            workers=workers,
            rank=rank,
            lying=self._lying(),
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put this rank's memory back. For a run of another size, pass it through ``gs.reshard`` first."""
        self.refuse_if_broken()
        rank = self._link.ranks.start if self._link else _place(self._group)[0]
        self._pieces = load_pieces(
            state, _layout_of(self._names), self.options.feedback.kind, rank, lying=self._lying()
        )
        for channel in self._channels.values():
            channel.catch_up()
        self._channels.clear()
        self._sent.clear()
        self.meter.rewind()
        self.step, self._lr = int(state["step"]), state["lr"]

    def _lying(self) -> dict[str, Tensor]:
        """Parameters that DDP puts into its buckets as they lie in memory, such as channels-last ones."""
        return {name: p for p, name in self._names.items() if not p.is_contiguous() and _dense(p)}

    def detach(self) -> None:
        """Back to DDP's dense mean from the next step on. The memory stays here: ``state_dict`` still has it."""
        self._unwatch()
        if self.on_detach is not None:
            self.on_detach()
            self.on_detach = None

    def _watch(self, used: set[str]) -> None:
        """Note who gets a gradient; a parameter that was thawed since is watched from now on."""
        for p, name in self._names.items():
            if p.requires_grad and name not in self._watches:
                self._watches[name] = p.register_post_accumulate_grad_hook(partial(_note, used, name))  # type: ignore[no-untyped-call]

    def _unwatch(self) -> None:
        for watch in self._watches.values():
            watch.remove()
        self._watches.clear()
        self._used = None

    def exchange(self, bucket: GradBucket) -> Future[Tensor]:
        """The hook: one bucket in, a future of its mean out. Collectives are issued here, in program order."""
        self.refuse_if_broken()
        try:
            if self._link is None:
                group, self._group = self._group, None  # callbacks hold this sieve: see GroupLink
                self.bind(group or dist.distributed_c10d._get_default_group())
            if bucket.index() == 0:
                self._begin()
            if bucket.buffer().is_sparse:
                raise ValueError("a sparse gradient arrived: use nn.Embedding(sparse=False)")
            if self._takes_all_at_once():
                return self._collect(bucket)
            channel = self._channel_of(bucket)
            buffer_n = bucket.buffer()
            if self._used is not None:  # DDP may leave some gradients as they are
                arrival = self._send(channel, buffer_n.unsqueeze(0), buffer_n)
            else:
                landing = self._landings[bucket.index()]
                arrival = self._send(channel, buffer_n.unsqueeze(0), landing.room(buffer_n)).then(landing.move_in)
            if self._crowded:
                return self._receive_together(bucket, arrival)
            done = arrival.future(partial(self._break, self.step, bucket.index()))
            if bucket.is_last():
                self._end()
            return done
        except Exception as error:
            if self._broken is not None:
                raise
            raise self._break(self.step, bucket.index(), error) from error

    def _begin(self) -> None:
        """Once a step: what the learning rate and the loss scale are now, and whether all of it travels."""
        self._settle()
        if self._used is not None:
            self._watch(self._used)
        if self._pace is not None:
            self._dense = self._pace.next_step(self._channels.values())
            channels = self._channels.values()
            settled = self._met > 1  # DDP makes its buckets anew after the first step
            dense = self._dense or (settled and all(c.plan.dense for c in channels))
            self._at_stake = not (channels and dense and all(c.nothing_waits() for c in channels))
        if self._scaler is not None and self._scaler.is_enabled():
            self._gain = 1.0 / self._scaler.get_scale()
        lr = float("nan") if self._optimizer is None else float(self._optimizer.param_groups[0]["lr"])
        if self.joining():
            self._gain, lr = self._of_one_who_trains(self._gain, lr)
        if self._optimizer is not None:
            if self.options.feedback.kind == "update" and not lr > 0:
                raise ValueError(f'feedback="update" divides by the learning rate, which is {lr!r} at step {self.step}')
            self._lr_ratio = self._lr / lr if self._lr else 1.0
            self._lr = lr

    def _of_one_who_trains(self, *figures: float) -> list[float]:
        """Those of the first rank that still has batches: on the others schedulers and loss scales stand still."""
        assert self._link is not None
        mine = torch.tensor([[float(self.alive), *figures]], dtype=torch.float64, device=self._link.device)
        rows = self._link.gather(mine).wait().tolist()
        return next((row[1:] for row in rows if row[0]), list(figures))

    def _end(self) -> None:
        self.step += 1
        self._met += 1
        self.alive = False  # until the next forward pass
        if self._used is not None:
            self._used.clear()
        for index, channel in list(self._channels.items()):
            if channel not in self._sent:  # DDP has fewer buckets now
                self._channels.pop(index).catch_up()
                self._landings.pop(index, None)
                self._rearranged = True
        if self._rearranged:
            self._pieces.keep(self._channels.values())
            self._rearranged = False

    def _settle(self) -> None:
        """Once a step has arrived whole: where a bucket was not finite, the other ones keep what they sent."""
        channels, self._sent = self._sent, []
        if any(channel.bad.is_cuda or bool(channel.bad) for channel in channels):  # a device is not waited for
            bad = torch.stack([channel.bad.to(channels[0].bad.device) for channel in channels]).any()
            for channel in channels:
                with torch.cuda.device_of(channel.bad):  # type: ignore[no-untyped-call]  # kernels go there
                    channel.conclude(bad.to(channel.bad.device))

    def _send(self, channel: Channel, grad_Ln: Tensor, out_n: Tensor) -> Coming:
        self._sent.append(channel)
        if self._used is not None:
            channel.rest([name for name in channel.layout.names if name not in self._used])
        arrival = channel.step(
            grad_Ln,
            out_n,
            self.step,
            lr=self._lr,
            lr_ratio=self._lr_ratio,
            gain=self._gain,
            prefer_dense=self._dense,
            at_stake=self._at_stake,
        )
        assert isinstance(arrival, Coming)
        return arrival

    def _receive_together(self, bucket: GradBucket, arrival: Coming) -> Future[Tensor]:
        """Hold arrivals until the last bucket is on its way, then receive them here.

        Where every core is busy with the backward pass, decoding beside it gains nothing, and a callback that waits for
        a core with the interpreter in its hands stops it.
        """
        waiting: Future[Tensor] = Future()
        self._coming.append((bucket.index(), arrival, waiting))
        if bucket.is_last():
            coming, self._coming = self._coming, []
            for index, arrival, result in coming:
                try:
                    result.set_result(arrival.wait())
                except Exception as error:
                    raise self._break(self.step, index, error) from error
            self._end()
        return waiting

    def _takes_all_at_once(self) -> bool:
        """A rule that ranks the whole gradient must wait for all of it, and so must whoever clips its norm; a rule that
        looks at single elements need not."""
        clips = isinstance(self.options.feedback, Momentum) and self.options.feedback.clip is not None
        return self.options.scope == "global" and (clips or not getattr(self.options.rule, "elementwise", False))

    def _collect(self, bucket: GradBucket) -> Future[Tensor]:
        """Global scope: hold the buckets until the last, then exchange the whole gradient as one."""
        devices: list[int | str | torch.device] | None = [bucket.buffer().device] if bucket.buffer().is_cuda else None
        waiting: Future[Tensor] = Future(devices=devices)
        self._waiting.append((bucket, waiting))
        if not bucket.is_last():
            return waiting.then(lambda future: future.value())  # an error that is set there is raised here
        buckets, self._waiting = self._waiting, []
        gradients = {p: g for b, _ in buckets for p, g in zip(b.parameters(), b.gradients(), strict=True)}
        names = {p: name for p, name in self._names.items() if p in gradients}
        dtype = torch.float64 if any(p.dtype == torch.float64 for p in names) else torch.float32
        flat_n = torch.cat([gradients[p].reshape(-1).to(dtype) for p in names])
        channel = self._channels.get(-1)
        if channel is None:
            channel = self._channels[-1] = self._new_channel(_layout_of(names), flat_n)

        def spread(result: Tensor) -> Tensor:
            for p, part_n in zip(names, torch.split(result, list(channel.layout.sizes)), strict=True):
                gradients[p].copy_(part_n.view_as(gradients[p]))
                if gradients[p].dtype == torch.float16:  # a finite mean may be too large for it
                    channel.bad = channel.bad | ~gradients[p].isfinite().all()
            for b, f in buckets[:-1]:
                f.set_result(b.buffer())
            return bucket.buffer()

        def fail(step: int, error: Exception) -> Exception:
            told = self._break(step, bucket.index(), error)
            for _, f in buckets[:-1]:
                f.set_exception(told)  # type: ignore[arg-type]
            return told

        arrival = self._send(channel, flat_n.unsqueeze(0), flat_n)
        done = arrival.then(spread).future(partial(fail, self.step))
        self._end()
        return done

    def _channel_of(self, bucket: GradBucket) -> Channel:
        """The bucket's channel. DDP rebuilds its buckets after the first step; the memory moves by parameter."""
        parameters = bucket.parameters()
        index, identities = bucket.index(), tuple(map(id, parameters))
        if self._filled.get(index) != identities or index not in self._channels:
            if index in self._channels:
                self._channels[index].catch_up()
                self._rearranged = True
            layout = _layout_of({p: self._names[p] for p in parameters})
            assert layout.size == bucket.buffer().numel()  # kernels rely on it
            self._channels[index] = self._new_channel(layout, bucket.buffer())
            self._filled[index] = identities
            self._landings[index] = Landing(parameters)
        return self._channels[index]

    def _new_channel(self, layout: Layout, like: Tensor) -> Channel:
        assert self._link is not None
        scope = "layer" if self.options.scope == "layer" else "global"
        channel = Channel(self.options, layout, self._link, self.meter, like.device, like.dtype, layout.segments(scope))
        self._pieces.move_to(channel)
        return channel

    def _break(self, step: int, bucket: int, error: Exception) -> RuntimeError:
        """DDP does not recover from an error in its hook, so neither does the sieve; the first cause is kept."""
        where = f"step {step}, bucket {bucket}: {type(error).__name__}: {error}"
        if self._broken is None:
            self._broken = where
        return RuntimeError(where)

    def refuse_if_broken(self) -> None:
        """After an error in the hook every call names it."""
        if self._broken is not None:
            raise RuntimeError(f"this sieve stopped at {self._broken}; make a new DDP module and attach again")


def _layout_of(names: Mapping[Tensor, str]) -> Layout:
    return Layout(tuple(names.values()), tuple(p.numel() for p in names))


def _dense(p: Tensor) -> bool:
    """Whether its elements are neighbours in memory, in whatever order: DDP's condition."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
    return reach == p.numel()


def _note(used: set[str], name: str, parameter: Tensor) -> None:
    used.add(name)


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Rank and number of workers of a sieve that has not met the others yet."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def _check_module(module: nn.Module, ignored: set[str]) -> None:
    exchanged = {name: p for name, p in module.named_parameters() if p.requires_grad and name not in ignored}
    for name, p in exchanged.items():
        if p.is_complex():
            raise ValueError(f"{name} is complex, which no rule takes: keep it as torch.view_as_real of it")
    for name, part in module.named_modules():
        sparse = isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse
        if sparse and exchanged.keys() & {f"{name}.{own}".lstrip(".") for own, _ in part.named_parameters()}:
            raise ValueError(f"{name or 'the module'} gives sparse gradients: use nn.Embedding(sparse=False)")


def _check_companions(options: Options, optimizer: object, scaler: object) -> None:
    if options.feedback.kind == "update" and optimizer is None:
        raise ValueError('feedback="update" follows the learning rate: it needs optimizer=...')
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer takes a torch.optim.Optimizer, not {type(optimizer).__name__}")
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise TypeError(f"scaler takes a torch.amp.GradScaler, not {type(scaler).__name__}")
    if isinstance(options.feedback, Momentum) and options.feedback.clip is not None and options.scope != "global":
        raise ValueError('clip bounds the norm of the whole gradient: over DDP\'s buckets it needs scope="global"')
