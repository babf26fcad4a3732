"""TopK-SGD on a small real task, and the compensated gradient u = memory + gradient of its first worker.

W workers, n coordinates, U iterations at which u is kept.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import gradsieve as gs
from gradsieve.lab import tasks
from gradsieve.lab.papers.entry import Context
from gradsieve.lab.tasks import Batch, Task, cifar_data

WORKERS = 16
DENSITY = 0.001
_MOMENTUM = 0.9


def iterations(context: Context) -> list[int]:
    """When u is looked at: every 200 iterations from 200 to 1,600."""
    return [10, 20, 30, 40] if context.quick else list(range(200, 1601, 200))


def available(context: Context) -> list[str]:
    """digits, and cifar where its data are; a quick run stays with digits."""
    if context.quick or context.data_dir is None:
        return ["digits"]
    return ["digits", "cifar"] if cifar_data.found(context.data_dir) else ["digits"]


def described(context: Context) -> str:
    """The data of the trainings."""
    return "; ".join(_task(name, context).description for name in available(context))


def _task(name: str, context: Context) -> Task:
    return tasks.get(name, data_dir=context.data_dir, cache_dir=context.cache_dir)


def compensated(name: str, context: Context) -> Tensor:
    """u of worker 0 at each of ``iterations``, [U, n], from a training with top-k over the whole gradient."""
    task = _task(name, context)
    seen = iterations(context)
    batch_size = max(1, 64 // WORKERS)
    per_epoch = task.steps_per_epoch(WORKERS, batch_size)
    model = task.model(0)
    x_n = parameters_to_vector(model.parameters()).detach()
    simulator = gs.Simulator(
        len(x_n), gs.TopK(DENSITY), workers=WORKERS, scope="global", exchange="allgather", strict=True
    )
    checkpoint = context.checkpoint(name, seen=seen, size=len(x_n), data=task.description)
    state = checkpoint.load() or {
        "step": torch.zeros((), dtype=torch.int64),
        "x": x_n,
        "velocity": torch.zeros_like(x_n),
        "memory": torch.zeros(WORKERS, len(x_n)),
        "u": torch.zeros(len(seen), len(x_n)),
    }
    simulator.load_state_dict(_with_memory(simulator, state["memory"]))
    for step, batch in _batches(task, batch_size, per_epoch, int(state["step"]), seen[-1]):
        vector_to_parameters(state["x"], model.parameters())
        grads_Wn = task.batch_gradients(model, batch)[1].detach()
        if step + 1 in seen:
            memory_n = simulator.state_dict()["memory"]["0"]["memory"][0]
            state["u"][seen.index(step + 1)] = memory_n + grads_Wn[0]
        state["velocity"].mul_(_MOMENTUM).add_(simulator.step(grads_Wn))
        state["x"].sub_(state["velocity"], alpha=task.recipe.lr)
        state["step"].fill_(step + 1)
        if checkpoint.due() or step + 1 == seen[-1]:
            state["memory"] = simulator.state_dict()["memory"]["0"]["memory"]
            checkpoint.save(state)
        context.track(name, step + 1, seen[-1], f"{step + 1:,} of {seen[-1]:,}")
    return state["u"]


def _with_memory(simulator: gs.Simulator, memory_Wn: Tensor) -> dict[str, object]:
    return {**simulator.state_dict(), "memory": {"0": {"memory": memory_Wn}}}


def _batches(task: Task, batch_size: int, per_epoch: int, done: int, steps: int) -> Iterator[tuple[int, Batch]]:
    """(step, batch) from step ``done`` on: the order depends on the seed and the epoch alone, so a run can go on."""
    for epoch in range(done // per_epoch, -(-steps // per_epoch)):
        batches = task.batches(epoch, workers=WORKERS, batch_size=batch_size, seed=0)
        for step, batch in enumerate(batches, start=epoch * per_epoch):
            if done <= step < steps:
                yield step, batch


def left_out(u_n: Tensor, ks: Sequence[int]) -> Tensor:
    """|u - top-k(u)|^2 / |u|^2 for each k."""
    squared_n = u_n.double().abs().sort(descending=True).values.square()
    gone_n = squared_n.flip(0).cumsum(0).flip(0)  # from coordinate i on: what top-i leaves out
    whole = torch.cat([gone_n, gone_n.new_zeros(1)])
    return whole[list(ks)] / gone_n[0]


def shape(u_n: Tensor) -> Tensor:
    """pi^2: the squared magnitudes in falling order over the largest."""
    magnitude_n = u_n.double().abs().sort(descending=True).values
    return (magnitude_n / magnitude_n[0]).square()


def below_line(u_n: Tensor) -> float:
    """The share of coordinates at which pi^2_(i) is at most 1 - i/d (i from 0)."""
    pi_n = shape(u_n)
    line_n = 1 - torch.arange(len(pi_n), dtype=torch.float64) / len(pi_n)
    return (pi_n <= line_n).double().mean().item()
