"""attach(): sparse exchange as DDP's one communication hook."""

import weakref

import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.amp import GradScaler
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradsieve.exchange.group import GroupLink
from gradsieve.meter import Meter
from gradsieve.sieve import Sieve
from gradsieve.types import Rule

_SLOT = "_gradsieve_slot"


def attach(
    ddp: DistributedDataParallel,
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
) -> Sieve:
    """Make a DDP module's gradient exchange sparse, from the next backward pass on.

    Call it on every rank with the same arguments: they are compared, and a difference is an error on all ranks.
    ``optimizer`` is needed by ``feedback="update"``, ``scaler`` where a GradScaler scales the loss.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise TypeError(f"ddp takes a DistributedDataParallel module, not {type(ddp).__name__}")
    sieve = Sieve(
        ddp.module,
        compressor,
        scope=scope,
        feedback=feedback,
        exchange=exchange,
        values=values,
        strict=strict,
        optimizer=optimizer,
        scaler=scaler,
        meter=meter,
    )
    try:
        slot = _room_of(ddp)
        sieve.bind(ddp.process_group, watch_use=ddp.find_unused_parameters or ddp.static_graph)
    except BaseException:
        sieve.detach()
        raise
    if slot is None:
        slot = _Slot(ddp.process_group)
        setattr(ddp, _SLOT, slot)
        ddp.register_comm_hook(None, slot.hook)
        ddp.register_forward_pre_hook(slot.check)
    slot.sieve, sieve.on_detach = sieve, slot.empty
    module = weakref.ref(ddp)
    sieve.joining = lambda: (here := module()) is not None and here._join_config.enable
    return sieve


def hook(state: Sieve, bucket: GradBucket) -> Future[Tensor]:
    """For trainers that register a hook before a process group exists: pass a ``Sieve`` as the hook's state."""
    return state.exchange(bucket)


class _Slot:
    """DDP takes one hook for good; this one passes buckets to the sieve that is attached now, or averages them."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.link = None if group is None else GroupLink(group)  # None: no DDP module has this hook
        self.sieve: Sieve | None = None

    def __reduce__(self) -> tuple[type["_Slot"], tuple[()]]:
        """A copy of a DDP module comes without its hook, whatever else of it was copied or saved."""
        return _Slot, ()

    def empty(self) -> None:
        self.sieve = None

    def hook(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        if self.sieve is not None:
            return self.sieve.exchange(bucket)
        assert self.link is not None
        buffer_n = bucket.buffer().div_(self.link.workers)
        return self.link.sum(buffer_n.unsqueeze(0)).then(lambda _: buffer_n).future()

    def check(self, module: nn.Module, inputs: object) -> None:
        """Before each forward pass: after an error in the hook, DDP's own message would hide the cause."""
        if self.sieve is not None:
            self.sieve.refuse_if_broken()
            self.sieve.alive = True


def _room_of(ddp: DistributedDataParallel) -> _Slot | None:
    """Our hook where DDP has it already, None where it has room for one; else an error."""
    slot: _Slot | None = getattr(ddp, _SLOT, None)
    if getattr(ddp, "mixed_precision", None) is not None:
        raise ValueError("DDP(mixed_precision=...) takes the one hook that DDP has: use torch.autocast instead")
    if slot is not None and slot.sieve is not None:
        raise ValueError("this DDP module has a sieve already: sieve.detach() it first")
    if slot is not None and slot.link is not None:
        return slot
    theirs = [hook for hook, _ in ddp._comm_hooks if not isinstance(getattr(hook, "__self__", None), _Slot)]
    if theirs:
        name = getattr(theirs[0], "__qualname__", "another hook")
        raise ValueError(f"this DDP module has a communication hook already ({name}), and DDP takes only one")
    return None
