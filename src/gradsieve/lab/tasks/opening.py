"""The first batch of an epoch, marked: what a task draws and remembers begins anew there.

A training that goes on at the end of an epoch then draws what it would have drawn had it never stopped.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from gradsieve.lab.tasks.base import Batch


class Opening(Batch):
    """The first batch of ``epoch``."""

    epoch = 0


def opened(batches: Iterable[Batch], epoch: int) -> Iterator[Batch]:
    """The batches of an epoch, the first one as an ``Opening``."""
    for i, batch in enumerate(batches):
        if i == 0:
            batch = Opening(*batch)
            batch.epoch = epoch
        yield batch


class Draws:
    """A source of random numbers for what is drawn beside the batches, such as dropout: by seed and epoch."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._seed = seed
        self.generator = torch.Generator(device).manual_seed(seed)

    def follow(self, batch: Batch) -> None:
        """Begin anew where the batch opens an epoch."""
        if isinstance(batch, Opening):
            self.generator.manual_seed(self._seed * 1_000_003 + batch.epoch)


def dropout_mask(shape: Sequence[int], dropped: float, draws: torch.Generator) -> Tensor:
    """0 for the share ``dropped`` of all, 1 / (1 - dropped) for the others.

    A CPU draws uniform numbers several times as fast as ``bernoulli_``.

    >>> dropout_mask((3, 4), 0.5, torch.Generator().manual_seed(0)).unique().tolist()
    [0.0, 2.0]
    """
    kept = 1 - dropped
    return torch.empty(*shape, device=draws.device).uniform_(generator=draws).lt_(kept).div_(kept)
