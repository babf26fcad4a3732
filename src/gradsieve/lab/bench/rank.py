"""One rank of a step benchmark: all ways to exchange the same gradients, in random order, again and again.

Started by ``bench.step`` as ``python -m gradsieve.lab.bench.rank JSON``; rank 0 prints one JSON line of samples.
"""

import json
import os
import random
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve as gs
from gradsieve.lab.bench.hosts import bytes_sent
from gradsieve.lab.bench.phases import Watch
from gradsieve.lab.bench.shapes import resnet18
from gradsieve.lab.bench.ways import PEERS, peer_of, way_of
from gradsieve.lab.group import in_group

WARM = 18  # steps before the first that is timed, while the memory fills and `auto` tries; what has none needs 3
STEPS = 3  # timed steps in a row of one way, after one that is not timed
SLOW = 5.0  # seconds a step: then one is enough, and what it needs before is lost in it


class Backward(nn.Module):
    """Parameters of a network's shapes whose gradients are drawn ahead: a backward pass that costs little."""

    def __init__(self, shapes: list[tuple[int, ...]], draws: "Draws"):
        super().__init__()
        # ones: they are written. Fresh zeros are one page, which every read would find in the cache
        self.parts = nn.ParameterList(torch.ones(shape) for shape in shapes)
        self.draws = draws
        self.step = 0

    def forward(self) -> Tensor:
        sizes = [p.numel() for p in self.parts]
        gradients = torch.split(self.draws(self.step), sizes)
        self.step += 1
        return torch.stack([p.view(-1).dot(g) for p, g in zip(self.parts, gradients, strict=True)]).sum()


class Draws:
    """Gradients with the heavy tail of real ones; each step's is another stretch of one long draw, without a copy."""

    def __init__(self, seed: int, size: int):
        self.size = size
        self.spare = 1 << 20
        generator = torch.Generator().manual_seed(1_000 + seed)
        scale_n = torch.randn(size + self.spare, generator=generator).exp_()
        self.long_n = torch.randn(size + self.spare, generator=generator).mul_(scale_n).mul_(1e-3)

    def __call__(self, step: int) -> Tensor:
        start = random.Random(step).randrange(0, self.spare, 16)
        return self.long_n[start : start + self.size]


def _backward(model: DistributedDataParallel) -> None:
    model.zero_grad()
    model().backward()


def _slowest(seconds: float) -> float:
    """The same on all ranks, which decide by it how often to go on."""
    worst = torch.tensor([seconds])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def _warm(model: DistributedDataParallel, steps: int) -> bool:
    """Whether this way is slow; as many steps as it needs ahead, unless it is."""
    for _ in range(steps):
        started = time.perf_counter()
        _backward(model)
        if _slowest(time.perf_counter() - started) > SLOW:
            return True
    return False


def _totals(sieve: object) -> tuple[float, float]:
    """What was kept so far, of how many coordinates."""
    if not isinstance(sieve, gs.Sieve):
        return 0.0, 0.0
    total = sieve.stats().total
    return total.kept, total.coordinates


def _density(before: tuple[float, float], after: tuple[float, float]) -> float | None:
    kept, coordinates = (late - early for early, late in zip(before, after, strict=True))
    return kept / coordinates if coordinates else None


def _watch(way: str, module: Backward, common: dict[str, Any], slow: bool) -> gs.Meter:
    """The phases of one of PyTorch's hooks. Apart from the timed steps: being watched costs it a little."""
    options, state, hook = peer_of(way, idle=True)
    watch = Watch(hook, gs.Meter())
    model = DistributedDataParallel(module, **common, **options)
    model.register_comm_hook(state, watch.watched)
    with watch.collectives():
        for _ in range(0 if slow else 3):
            _backward(model)
        watch.meter = gs.Meter()
        for _ in range(1 if slow else 5):
            _backward(model)
    return watch.meter


@in_group()
def main(job: dict[str, Any]) -> None:
    rank = dist.get_rank()
    shapes = resnet18()
    size = sum(torch.Size(shape).numel() for shape in shapes)
    draws = Draws(rank, size)
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    ways: list[str] = job["ways"]
    common = {"init_sync": False, "gradient_as_bucket_view": job["bucket_view"]}
    models: dict[str, DistributedDataParallel] = {}
    sieves: dict[str, object] = {}
    slow: dict[str, bool] = {}
    for way in ways:
        options, install = way_of(way, float(job["threshold"]), idle=True)
        models[way] = DistributedDataParallel(Backward(shapes, draws), **common, **options)
        sieves[way] = install(models[way])
        slow[way] = _warm(models[way], 3 if way in PEERS else WARM)
    before_them = {way: _totals(sieve) for way, sieve in sieves.items()}
    samples: dict[str, list[float]] = {way: [] for way in ways}
    sent: dict[str, list[int]] = {way: [] for way in ways}
    spent = dict.fromkeys(ways, 0.0)
    order = random.Random(0)
    for round_ in range(int(job["rounds"])):
        for way in order.sample(ways, len(ways)):
            if spent[way] > float(job["seconds"]) and round_ >= 2:
                continue
            steps = 1 if slow[way] else STEPS
            model = models[way]
            if not slow[way]:
                _backward(model)
            dist.barrier()
            before = bytes_sent(interface)
            for _ in range(steps):
                started = time.perf_counter()
                _backward(model)
                samples[way].append(time.perf_counter() - started)
            sent[way].append((bytes_sent(interface) - before) // steps)
            spent[way] = _slowest(sum(samples[way]))
    meters = {way: sieve.meter for way, sieve in sieves.items() if isinstance(sieve, gs.Sieve)}
    for way in ways:
        if way in PEERS and way != "no exchange":
            meters[way] = _watch(way, Backward(shapes, draws), common, slow[way])
    if rank == 0:
        totals = {way: meter.stats().total for way, meter in meters.items()}
        phases = {way: {p: s / total.steps for p, s in total.seconds.items()} for way, total in totals.items()}
        densities = {way: _density(before_them[way], _totals(sieve)) for way, sieve in sieves.items()}
        views = all(model.gradient_as_bucket_view for model in models.values())
        told = {"samples": samples, "sent": sent, "phases": phases, "densities": densities, "bucket_view": views}
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
