"""Gradients of W workers that share their weights, told apart by autograd.

Shape suffixes: W workers in all, n coordinates of the flat gradient.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def gradients_apart(
    model: nn.Module, workers: int, losses: Callable[[dict[str, Tensor]], Tensor]
) -> tuple[Tensor, Tensor]:
    """Each worker's loss [W] and flat gradient [W, n] from ``losses``, a function of weights ``[W, ...]`` by name.

    All workers' weights are views of the same memory, and autograd takes them for W different ones.
    """
    own = {
        name: parameter.detach().expand(workers, *parameter.shape).requires_grad_()
        for name, parameter in model.named_parameters()
    }
    losses_W = losses(own)
    gradients = torch.autograd.grad(losses_W.sum(), list(own.values()))
    return losses_W.detach(), torch.cat([gradient.flatten(1) for gradient in gradients], dim=1)
