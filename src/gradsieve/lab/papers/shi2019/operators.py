"""The operators of Figure 4 as their authors run them, and ours: with the memory's update, on one vector.

Theirs after the authors' code, without the copy of the vector that it makes. n coordinates, K kept.
"""

from collections.abc import Callable
from functools import partial
from statistics import NormalDist

import torch
from torch import Tensor

from gradsieve.lab.bench.contenders import Bench, Contender
from gradsieve.types import Sparse

YARDSTICK = "add"
PUBLISHED = ("top-k", "DGC-k", "Gaussian-k")
OURS = ("our top-k", "our sampled top-k", "our Gaussian-k")
COLD = ", no hint"
"""Ours remember the last step's threshold; without it they are as in a first step."""
_LOOPS = 3
_SAMPLE = 0.01
_STRIDE, _START = 100, 7  # of our sample: 1% too

Select = Callable[[Tensor, int], Tensor]


def gaussian(u_n: Tensor, k: int) -> Tensor:
    """Coordinates above a Gaussian's quantile, which is halved or grown by half while too few or too many are."""
    z = NormalDist().inv_cdf(1 - k / len(u_n) / 2)
    threshold = float(u_n.mean()) + z * float(u_n.std())
    magnitude_n = u_n.abs()
    for _ in range(_LOOPS):
        index_K = (magnitude_n > threshold).nonzero().view(-1)
        if len(index_K) < 2 * k / 3:
            threshold *= 0.5
        elif len(index_K) > 4 * k / 3:
            threshold *= 1.5
        else:
            break
    return index_K


def sampled(u_n: Tensor, k: int) -> Tensor:
    """Coordinates above the k-th of a random sample of 1%, the largest k of them where they are too many.

    The k-th of the sample, and not the one at the sample's own k: far more than k survive, and are sorted after all.
    """
    magnitude_n = u_n.abs()
    sample = magnitude_n[torch.randperm(len(u_n), device=u_n.device)[: max(1, int(_SAMPLE * len(u_n)))]]
    threshold = sample.topk(min(k, len(sample))).values[-1]
    index_K = (magnitude_n > threshold).nonzero().view(-1)
    if len(index_K) > 4 * k / 3:
        index_K = index_K[magnitude_n[index_K].topk(k).indices]
    return index_K


def send(memory_n: Tensor, grad_n: Tensor, k: int, select: Select) -> Tensor:
    """What is sent of memory + gradient; the memory keeps the rest."""
    memory_n.add_(grad_n)
    index_K = select(memory_n, k)
    values_K = memory_n[index_K]
    memory_n[index_K] = 0.0
    return values_K


def contenders(bench: Bench) -> dict[str, Contender]:
    """All that is timed at one size, by name."""
    memory_n, grad_n, k = bench.memory_Ln[0], bench.grad_Ln[0], (bench.k,)
    theirs: dict[str, Callable[[], object]] = {
        "top-k": bench.plain_topk,
        "DGC-k": partial(send, memory_n, grad_n, bench.k, sampled),
        "Gaussian-k": partial(send, memory_n, grad_n, bench.k, gaussian),
    }
    ours: dict[str, tuple[str, tuple[object, ...]]] = {
        "our top-k": ("topk", (k,)),
        "our sampled top-k": ("sampledk", (k, _STRIDE, _START)),
        "our Gaussian-k": ("gaussiank", (k,)),
    }
    found = {YARDSTICK: Contender(lambda: memory_n.add_(grad_n), bench.restore)}
    found |= {name: Contender(run, bench.restore) for name, run in theirs.items()}
    for name, (op, arguments) in ours.items():
        found[name] = bench.op(op, *arguments)
        found[name + COLD] = bench.op(op, *arguments, cold=True)
    return found


def kept(contender: Contender) -> int:
    """How many elements one call sends."""
    contender.prepare()
    sent = contender.run()
    return int(sent.counts_LB.sum()) if isinstance(sent, Sparse) else len(sent)  # type: ignore[arg-type]
