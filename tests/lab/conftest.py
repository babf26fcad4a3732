"""A task small enough that a whole comparison takes a second."""

import pytest
import torch
from torch import nn

from gradsieve.lab import tasks
from gradsieve.lab.tasks.base import Classification, Recipe


@pytest.fixture(scope="session")
def digits() -> Classification:
    return tasks.get("digits")


@pytest.fixture(scope="session")
def blobs() -> Classification:
    """Three well separated clouds of points."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(240) % 3
    inputs = 3.0 * nn.functional.one_hot(labels, 8).float() + torch.randn(240, 8, generator=generator)
    return Classification(
        name="blobs",
        description="three clouds",
        recipe=Recipe(lr=0.1, batch_size=8, decay_at=(0.5,)),
        build=lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3)),
        train_inputs=inputs[:180],
        train_labels=labels[:180],
        test_inputs=inputs[180:],
        test_labels=labels[180:],
    )
