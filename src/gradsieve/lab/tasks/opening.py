"""The first batch of an epoch, marked: what a task draws and remembers begins anew there.

A training that goes on at the end of an epoch then draws what it would have drawn had it never stopped.
"""

from collections.abc import Iterable, Iterator

import torch

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
