"""A rule over a real training with feedback: what a user pays on average, hints from another step and all."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from gradsieve.lab.bench.clock import Clock
from gradsieve.lab.bench.contenders import Contender, agree
from gradsieve.ops import Ops, reference
from gradsieve.types import Pending, Segments

UNTIMED = {"cpu": 0, "cuda": 3}  # steps in which kernels are compiled


def training(size: int, device: torch.device, seed: int = 0) -> Iterator[tuple[Tensor, Callable[[Tensor], None]]]:
    """Real gradients of about ``size`` coordinates: a network with two hidden layers learns digits, without end.

    Yields a flat gradient and the function that takes the update to make of it.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32, device=device) / 16
    y = torch.tensor(digits.target, device=device)
    width = max(1, int(((77**2 + 4 * size) ** 0.5 - 77) / 2))
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
        torch.nn.Linear(width, 10),
    ).to(device)  # fmt: skip
    parameters = list(model.parameters())

    def update(step_n: Tensor) -> None:
        for parameter, part in zip(parameters, torch.split(step_n, [p.numel() for p in parameters]), strict=True):
            parameter.data.sub_(part.view_as(parameter), alpha=0.1)

    while True:
        batch = torch.randint(len(x), (32,), device=device)
        loss = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
        yield torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]), update


def sequence(
    name: str, extra: tuple[int, ...], module: Ops, size: int, density: float, device: torch.device, steps: int,
    clock: Clock,
) -> dict[str, Contender]:  # fmt: skip
    """A rule over a training with feedback: its average is what a user pays, hints from another step and all.

    Empty if it disagrees with ``reference``.
    """
    gradients = training(size, device)
    size = len(next(gradients)[0])
    segments, k = Segments((0, size), (0,)), max(1, round(size * density))
    memory_Ln, e_Ln = torch.zeros(1, size, device=device), torch.zeros(1, size, device=device)
    pending = Pending(e_Ln, memory_Ln, segments, into=reference.empty(1, size, 8 * k, torch.float32, device))
    mean_n = torch.empty(size, device=device)
    add = Contender(lambda: e_Ln.add_(pending.grad_Ln))
    rule = Contender(lambda: getattr(module, name)(pending, (k,), *extra))
    for step, (grad_n, update) in zip(range(steps), gradients, strict=False):
        pending.grad_Ln = grad_n[None]
        remembered = {key: t.clone() for key, t in pending.cache.items() if isinstance(t, Tensor)}
        copy = replace(pending, memory_Ln=memory_Ln.clone(), cache=remembered)
        if step == steps // 2 and not agree(name, copy, module, ((k,), *extra)):
            return {}
        for contender in (add, rule):
            clock(contender)
        assert pending.into is not None
        update(module.decode(pending.into, mean_n, 1.0))
    for contender in (add, rule):
        del contender.times[: UNTIMED[device.type]], contender.host[: UNTIMED[device.type]]
    return {"add": add, f"{name} sequence": rule}
