"""What the ranks of these tests train: a module whose gradient is what the test says, and a small network.

T steps, W workers, n coordinates.
"""

import hashlib

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SHAPES = ((40, 7), (40,), (13, 5), (1,), (200,))

RULES = (
    "dense",
    "threshold:2",
    "topk:0.1",
    "randomk:0.1",
    "blockrandomk:0.1",
    "gaussiank:0.1",
    "sampledtopk:0.1,sample=0.2",
    "accordion:0.1,0.4,interval=5",
)


class Given(nn.Module):
    """Its gradient is the flat tensor that it is called with."""

    def __init__(self, shapes=SHAPES, dtypes=None):
        super().__init__()
        dtypes = [torch.float32] * len(shapes) if dtypes is None else dtypes
        self.parts = nn.ParameterList(torch.zeros(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True))

    def forward(self, grad_n: Tensor) -> Tensor:
        pieces = torch.split(grad_n, [p.numel() for p in self.parts])
        return sum((p * piece.view_as(p).to(p.dtype)).sum() for p, piece in zip(self.parts, pieces, strict=True))


def numbers(steps: int, workers: int, size: int, seed: int = 1) -> Tensor:
    """Gradients ``[T, W, n]``, the same wherever they are asked for."""
    return torch.randn(steps, workers, size, generator=torch.Generator().manual_seed(seed))


def size_of(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def flat_gradient(module: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1).float() for p in module.parameters()])


def drive(ddp: DistributedDataParallel, grads_Tn: Tensor) -> Tensor:
    """One backward pass a row; the gradients that DDP leaves, ``[T, n]``."""
    means = []
    for grad_n in grads_Tn:
        ddp.zero_grad()
        ddp(grad_n).backward()
        means.append(flat_gradient(ddp))
    return torch.stack(means)


def memory_of(sieve) -> Tensor:
    """A rank's memory in the order of the parameters, ``[n]``."""
    state = sieve.state_dict()
    (memory,) = (part for key, part in state.items() if key.startswith("memory"))
    return torch.cat([kinds["memory"][0] for kinds in memory.values()])


def network(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def batches(rank: int, count: int, size: int = 8, seed: int = 5) -> list[tuple[Tensor, Tensor]]:
    """A rank's own inputs and targets."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return [
        (torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator))
        for _ in range(count)
    ]


def train(
    ddp: nn.Module, data: list[tuple[Tensor, Tensor]], optimizer: torch.optim.Optimizer | None = None
) -> torch.optim.Optimizer:
    """Plain SGD on cross-entropy, one step a batch."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1) if optimizer is None else optimizer
    for x, y in data:
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), y).backward()
        optimizer.step()
    return optimizer


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1).float() for p in module.parameters()])


def fingerprint(module: nn.Module) -> str:
    """A hash of all parameters' bits."""
    digest = hashlib.sha256()
    for p in module.parameters():
        digest.update(p.detach().contiguous().view(torch.uint8 if p.dim() else p.dtype).numpy().tobytes())
    return digest.hexdigest()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
