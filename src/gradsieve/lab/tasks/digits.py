"""Handwritten digits: 1,797 real 8x8 images from scikit-learn's own wheel, and a two-hidden-layer net."""

from dataclasses import replace
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from gradsieve.lab.tasks.base import Classification, Recipe

_SPLIT_SEED = 0
_TEST_EXAMPLES = 450


def _net(wide: int = 256, narrow: int = 128) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, wide),
        nn.ReLU(),
        nn.Linear(wide, narrow),
        nn.ReLU(),
        nn.Linear(narrow, 10),
    )


def wide(*, data_dir: Path | None = None, cache_dir: Path | None = None) -> Classification:
    """Digits with a net of 4.3 million parameters: enough gradient for a link to matter."""
    return replace(
        task(),
        name="digits-wide",
        description="scikit-learn digits (1,797 8x8 images), MLP 64-2048-2048-10",
        build=lambda: _net(2048, 2048),
    )


def task(*, data_dir: Path | None = None, cache_dir: Path | None = None) -> Classification:
    """The digits task; both directories are unused, since the data comes with scikit-learn."""
    images, labels = load_digits(return_X_y=True)
    train_images, test_images, train_labels, test_labels = train_test_split(
        images, labels, test_size=_TEST_EXAMPLES, random_state=_SPLIT_SEED, stratify=labels
    )
    mean, deviation = train_images.mean(), train_images.std()
    return Classification(
        name="digits",
        description="scikit-learn digits (1,797 8x8 images), MLP 64-256-128-10",
        recipe=Recipe(
            lr=0.1,
            batch_size=16,
            momentum=0.9,
            weight_decay=1e-4,
            smoothing=0.1,
            warmup=0.1,
            decay_at=(0.5, 0.8),
        ),
        build=_net,
        train_inputs=torch.from_numpy((train_images - mean) / deviation).float(),
        train_labels=torch.from_numpy(train_labels).long(),
        test_inputs=torch.from_numpy((test_images - mean) / deviation).float(),
        test_labels=torch.from_numpy(test_labels).long(),
    )
