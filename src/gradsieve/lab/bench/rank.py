"""One rank of a step benchmark: all ways to exchange the same gradients, in random order, again and again.

Started by ``bench.step`` as ``python -m gradsieve.lab.bench.rank JSON``; rank 0 prints one JSON line of samples.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gradsieve as gs
from gradsieve.lab.bench.hosts import bytes_sent
from gradsieve.lab.bench.shapes import resnet18

STEPS = 3  # timed steps in a row of one way, after one that is not timed


class Backward(nn.Module):
    """Parameters of a network's shapes whose gradients are drawn ahead: a backward pass that costs little."""

    def __init__(self, shapes: list[tuple[int, ...]], draws: list[Tensor]):
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self.draws = draws

    def forward(self, step: int) -> Tensor:
        draw_n = self.draws[step % len(self.draws)]
        sizes = [p.numel() for p in self.parts]
        terms = [(p.view(-1) * g).sum() for p, g in zip(self.parts, torch.split(draw_n, sizes), strict=True)]
        return torch.stack(terms).sum()


def draws_of(seed: int, count: int, size: int) -> list[Tensor]:
    """Gradients with the heavy tail of real ones: Gaussian, with a scale of its own for every coordinate."""
    generator = torch.Generator().manual_seed(1_000 + seed)
    scale_n = torch.randn(size, generator=torch.Generator().manual_seed(7)).exp_()
    return [torch.randn(size, generator=generator) * scale_n * 1e-3 for _ in range(count)]


def exchange_of(way: str, threshold: float) -> tuple[dict[str, object], Callable[[DistributedDataParallel], object]]:
    """DDP's own options for a way, and how to install it."""
    if way == "no exchange":
        return {}, lambda ddp: ddp.register_comm_hook(None, debugging_hooks.noop_hook)
    if way == "dense":
        return {}, lambda ddp: None
    if way == "fp16 hook":
        return {}, lambda ddp: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if way.startswith("PowerSGD rank "):
        state = powerSGD_hook.PowerSGDState(
            process_group=None, matrix_approximation_rank=int(way.rsplit(" ", 1)[1]), start_powerSGD_iter=2
        )
        # several buckets crash PowerSGD over gloo: give it one
        return {"bucket_cap_mb": 100}, lambda ddp: ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    name, _, values = way.partition(" ")
    rule = gs.HardThreshold(threshold) if name == "threshold:auto" else gs.parse(name)
    return {}, lambda ddp: gs.attach(ddp, rule, values=values or "bfloat16", meter=gs.Meter(error=False))


def main(job: dict[str, object]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    shapes = resnet18()
    size = sum(torch.Size(shape).numel() for shape in shapes)
    draws = draws_of(rank, 3, size)
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    ways: list[str] = job["ways"]  # type: ignore[assignment]
    models: dict[str, DistributedDataParallel] = {}
    sieves: dict[str, object] = {}
    for way in ways:
        options, install = exchange_of(way, float(job["threshold"]))  # type: ignore[arg-type]
        models[way] = DistributedDataParallel(Backward(shapes, draws), **options)  # type: ignore[arg-type]
        sieves[way] = install(models[way])
        for step in range(4):
            models[way](step).backward()
    samples: dict[str, list[float]] = {way: [] for way in ways}
    sent: dict[str, list[int]] = {way: [] for way in ways}
    spent = dict.fromkeys(ways, 0.0)
    order = random.Random(0)
    for round_ in range(int(job["rounds"])):  # type: ignore[call-overload]
        for way in order.sample(ways, len(ways)):
            if spent[way] > float(job["seconds"]) and round_ >= 2:  # type: ignore[arg-type]
                continue
            steps = STEPS if spent[way] < 20 else 1
            model = models[way]
            if spent[way] < 20:
                model(0).backward()
            dist.barrier()
            before = bytes_sent(interface)
            for step in range(steps):
                started = time.perf_counter()
                model(step).backward()
                samples[way].append(time.perf_counter() - started)
            sent[way].append((bytes_sent(interface) - before) // steps)
            worst = torch.tensor([sum(samples[way])])
            dist.all_reduce(worst, op=dist.ReduceOp.MAX)
            spent[way] = float(worst)
    if rank == 0:
        phases = {
            way: {p: s / sieve.stats().total.steps for p, s in sieve.stats().total.seconds.items()}
            for way, sieve in sieves.items()
            if isinstance(sieve, gs.Sieve)
        }
        densities = {w: s.stats().total.density for w, s in sieves.items() if isinstance(s, gs.Sieve)}
        print(json.dumps({"samples": samples, "sent": sent, "phases": phases, "densities": densities}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
