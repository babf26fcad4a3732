"""Time to accuracy over a link: one rank of a training that stops when the model is good enough.

Started as ``python -m gradsieve.lab.bench.accuracy JSON``; rank 0 prints one JSON line.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from gradsieve.lab import tasks
from gradsieve.lab.bench.ways import way_of
from gradsieve.lab.group import in_group
from gradsieve.lab.runner import Options, optimizer_of
from gradsieve.lab.tasks.base import Classification


@in_group()
def main(job: dict[str, Any]) -> None:
    """Train one way until ``target`` is reached or ``seconds`` are over; the clock stands still for evaluations."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    folder = Path(job["data_dir"]) if job["data_dir"] else None
    task = tasks.get(job["task"], data_dir=folder)
    assert isinstance(task, Classification)
    if job["judged_by"]:
        part = slice(None, None, max(1, len(task.test_labels) // job["judged_by"]))  # it may be sorted by class
        task = replace(task, test_inputs=task.test_inputs[part], test_labels=task.test_labels[part])
    options = Options(workers=workers, epochs=job["epochs"], seed=job["seed"])
    recipe = options.recipe(task)
    per_epoch = task.steps_per_epoch(workers, recipe.batch_size)
    model = task.model(options.seed)
    ddp_options, install = way_of(job["way"], job.get("threshold"))
    ddp = DistributedDataParallel(model, **ddp_options)
    install(ddp)
    optimizer = optimizer_of(model, recipe)
    spent, step, curve, done = 0.0, 0, [], False
    for epoch in range(job["epochs"]):
        for inputs_WB, labels_WB in task.batches(
            epoch, workers=workers, batch_size=recipe.batch_size, seed=options.seed
        ):
            for group in optimizer.param_groups:
                group["lr"] = recipe.lr_at(step / (per_epoch * job["epochs"]))
            started = time.perf_counter()
            optimizer.zero_grad()
            outputs = ddp(inputs_WB[rank])
            functional.cross_entropy(outputs, labels_WB[rank], label_smoothing=recipe.smoothing).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            spent += time.perf_counter() - started
            step += 1
            if step % job["every"] == 0:
                accuracy = task.evaluate(model).accuracy if rank == 0 else 0.0
                verdict = torch.tensor([accuracy, spent], dtype=torch.float64)
                dist.broadcast(verdict, 0)
                curve.append([spent, verdict[0].item()])
                done = bool(verdict[0] >= job["target"]) or bool(verdict[1] > job["seconds"])
            if done:
                break
        if done:
            break
    _check_replicas(model, job["way"])
    if rank == 0:
        reached = bool(curve) and curve[-1][1] >= job["target"]
        print(json.dumps({"seconds": spent if reached else None, "steps": step, "curve": curve}), flush=True)


def _check_replicas(model: nn.Module, way: str) -> None:
    """A way that lets the ranks drift apart has no time to tell."""
    own = torch.stack([parameter.detach().double().sum() for parameter in model.parameters()])
    first = own.clone()
    dist.broadcast(first, 0)
    apart = torch.tensor([float(not torch.equal(own, first))])
    dist.all_reduce(apart)
    if apart:
        raise RuntimeError(f"the ranks' parameters differ under {way}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
