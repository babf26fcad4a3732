"""Ways to exchange gradients that are compared with each other: PyTorch's own, and ours."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

import gradsieve as gs
from gradsieve.lab.bench.phases import Hook
from gradsieve.lab.errors import LabError

PEERS = ("no exchange", "dense", "fp16 hook", "PowerSGD rank 1", "PowerSGD rank 2", "PowerSGD rank 4")

AUTO = "threshold:auto"
VALUES = ("float32", "bfloat16", "float16")
STRICT = "strict"

Install = Callable[[DistributedDataParallel], object]


def check(name: str) -> None:
    """A way that can be taken, or an error that lists what can."""
    text, *options = name.split(" ")
    if name in PEERS:
        return
    known = set(options) <= {*VALUES, STRICT}
    try:
        if text != AUTO:
            gs.parse(text)
    except ValueError:
        known = False
    if not known:
        raise LabError(
            f"way takes {', '.join(PEERS)}, {AUTO}, or a rule such as topk:0.001, "
            f"after it perhaps float32 and strict, not {name!r}"
        )


def peer_of(name: str, *, idle: bool = False) -> tuple[dict[str, Any], Any, Hook]:
    """DDP's own options for one of PyTorch's ways, its hook's state and its hook.

    PowerSGD starts once DDP has made its final buckets, and is dense till then: minutes on a slow link. ``idle``: it
    exchanges nothing in those steps, where nobody needs their result.
    """
    if name.startswith("PowerSGD rank "):
        rank = int(name.rsplit(" ", 1)[1])
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        hook = _idle_at_first if idle else powerSGD_hook.powerSGD_hook
        return {"bucket_cap_mb": 1000}, state, hook  # several buckets crash it over gloo
    hooks: dict[str, Hook] = {
        "no exchange": debugging_hooks.noop_hook,
        "dense": default_hooks.allreduce_hook,  # what DDP does without a hook, where it can be watched
        "fp16 hook": default_hooks.fp16_compress_hook,
    }
    return {}, None, hooks[name]


def _idle_at_first(state: Any, bucket: GradBucket) -> Future[Tensor]:
    if state.iter < state.start_powerSGD_iter:
        state.maybe_increase_iter(bucket)
        return debugging_hooks.noop_hook(None, bucket)
    return powerSGD_hook.powerSGD_hook(state, bucket)


def way_of(name: str, threshold: float | None = None, *, idle: bool = False) -> tuple[dict[str, Any], Install]:
    """DDP's own options for a way, and what to do with the DDP module; ``idle`` as for ``peer_of``.

    Ours are a rule's text, with bfloat16 values unless a precision follows: ``topk:0.001 float32``; ``strict`` after it
    agrees on sizes at every step. ``threshold:auto`` is a threshold that the caller found.
    """
    if name == "dense":
        return {}, lambda ddp: None
    if name in PEERS:
        options, state, hook = peer_of(name, idle=idle)
        return options, lambda ddp: ddp.register_comm_hook(state, hook)
    text, *chosen = name.split(" ")
    rule = gs.HardThreshold(threshold) if text == AUTO and threshold is not None else gs.parse(text)
    values = next((option for option in chosen if option in VALUES), "bfloat16")
    strict = STRICT in chosen
    return {}, lambda ddp: gs.attach(ddp, rule, values=values, strict=strict, meter=gs.Meter(error=False))
