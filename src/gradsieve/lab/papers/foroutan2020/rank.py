"""One rank of Table 2: training steps under every configuration, in random order, each step's time by part.

Started by ``breakdown`` as ``python -m gradsieve.lab.papers.foroutan2020.rank JSON``; rank 0 prints one JSON line.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve as gs
from gradsieve.exchange.group import GroupLink
from gradsieve.lab.bench.phases import Watch
from gradsieve.lab.bench.ways import peer_of
from gradsieve.lab.group import in_group
from gradsieve.lab.papers.foroutan2020.configurations import ALL, SGD, Configuration
from gradsieve.lab.tasks.nets import resnet18

ALONE = "no exchange"
PARTS = ("forward", "backward", "coding", "waiting", "exchange", "decoding")
WARM = 3  # steps before the first that is timed: buckets are arranged anew, payloads are made
_WARM_BATCH = 2  # what they prepare does not hang on the examples


def small() -> nn.Module:
    """For quick runs."""
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 64), nn.ReLU(), nn.Linear(64, 10))


NETS: dict[str, Callable[[], nn.Module]] = {"ResNet-18": resnet18, "a small net": small}


class Stepper:
    """A network under one configuration. One bucket for all: as in the paper, nothing overlaps the backward pass.

    Ranks that share cores end their backward passes at different times. They meet before coding starts, so that
    waiting is not taken for exchange.
    """

    def __init__(self, net: nn.Module, install: Callable[[DistributedDataParallel], gs.Meter | None]) -> None:
        self.ddp = DistributedDataParallel(net, bucket_cap_mb=1000)
        self.link = GroupLink(self.ddp.process_group)
        self.meter = install(self.ddp)
        self.watched: Callable[[], AbstractContextManager[None]] = nullcontext
        self._waited = 0.0
        # The first layer's gradient is the last to be computed.
        next(net.parameters()).register_hook(self._meet)  # type: ignore[no-untyped-call]

    def step(self, images: Tensor, labels: Tensor) -> dict[str, float]:
        """Seconds by part on this rank."""
        before = self._spent()
        self.ddp.zero_grad()
        with self.watched():
            started = time.perf_counter()
            loss = nn.functional.cross_entropy(self.ddp(images), labels)
            forward = time.perf_counter()
            loss.backward()  # type: ignore[no-untyped-call]
            ended = time.perf_counter()
        after = self._spent()
        away = {part: after.get(part, 0.0) - before.get(part, 0.0) for part in ("coding", "exchange", "decoding")}
        away["waiting"] = self._waited
        return {"forward": forward - started, "backward": ended - forward - sum(away.values()), **away}

    def _spent(self) -> dict[str, float]:
        return self.meter.stats().total.seconds if self.meter else {}

    def _meet(self, gradient: Tensor) -> None:
        started = time.perf_counter()
        meet(self.link)
        self._waited = time.perf_counter() - started


def meet(link: GroupLink) -> None:
    """Returns when all ranks are here."""
    link.counts(torch.zeros(1))


def stepper(net: nn.Module, kind: Configuration | None) -> Stepper:
    """Of a configuration; of None: without any exchange."""
    if kind is not None and kind != SGD:
        return Stepper(net, lambda ddp: _attach(ddp, kind))
    _, state, hook = peer_of("dense" if kind == SGD else ALONE)
    if kind is None:
        return Stepper(net, lambda ddp: ddp.register_comm_hook(state, hook))
    watch = Watch(hook, gs.Meter())

    def install(ddp: DistributedDataParallel) -> gs.Meter:
        ddp.register_comm_hook(state, watch.watched)
        return watch.meter

    made = Stepper(net, install)
    made.watched = watch.collectives
    return made


def _attach(ddp: DistributedDataParallel, kind: Configuration) -> gs.Meter:
    meter = gs.Meter(error=False)
    gs.attach(ddp, gs.parse(kind.rule), scope="layer", exchange=kind.exchange, meter=meter)
    return meter


@in_group()
def main(job: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    images = torch.randn(job["batch"], 3, 32, 32, generator=generator)
    labels = torch.randint(10, (job["batch"],), generator=generator)
    net = NETS[job["net"]]
    steppers = {ALONE: stepper(net(), None)} | {kind.key: stepper(net(), kind) for kind in ALL}
    for one in steppers.values():
        for _ in range(WARM):
            one.step(images[:_WARM_BATCH], labels[:_WARM_BATCH])
    samples: dict[str, list[list[float]]] = {name: [] for name in steppers}
    order, link = random.Random(0), steppers[ALONE].link
    for _ in range(job["rounds"]):
        for name in order.sample(list(steppers), len(steppers)):
            meet(link)
            spent = steppers[name].step(images, labels)
            spent_LP = torch.tensor([[spent[part] for part in PARTS]], dtype=torch.float64)
            samples[name].append(link.gather(spent_LP).wait().mean(0).tolist())
    if dist.get_rank() == 0:
        print(json.dumps(samples), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
