"""CIFAR-10: with a small convolutional net that a CPU can train, and with the networks that papers train."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from gradsieve.lab.tasks import cifar_data
from gradsieve.lab.tasks.base import Classification, Recipe
from gradsieve.lab.tasks.nets import googlenet, resnet18, senet18
from gradsieve.lab.tasks.sources import folder_of
from gradsieve.ops.ahead import sent_ahead

_MEAN = (0.4914, 0.4822, 0.4465)
_DEVIATION = (0.2470, 0.2435, 0.2616)
_PADDING = 4


def _stage(channels_in: int, channels_out: int) -> list[nn.Module]:
    # Group norm and not batch norm: its statistics do not depend on how examples are dealt to workers.
    convolution = nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False)
    return [convolution, nn.GroupNorm(8, channels_out), nn.ReLU(), nn.MaxPool2d(2)]


def _net(hidden: int = 128) -> nn.Module:
    return nn.Sequential(
        *_stage(3, 32),
        *_stage(32, 64),
        *_stage(64, 128),
        nn.Flatten(),
        nn.Linear(128 * 4 * 4, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )


def _normalise(images: Tensor) -> Tensor:
    mean, deviation = _scale(images.device)
    return (images.float() / 255.0 - mean) / deviation


@cache
def _scale(device: torch.device) -> tuple[Tensor, Tensor]:
    mean, deviation = torch.tensor([_MEAN, _DEVIATION]).view(2, 3, 1, 1).to(device)
    return mean, deviation


def _shift_and_mirror(images: Tensor, generator: torch.Generator) -> Tensor:
    """A random crop of the padded image and a random mirror, for each image on its own; drawn on the host always."""
    (count, _, height, width), device = images.shape, images.device
    padded = nn.functional.pad(images, [_PADDING] * 4)
    down, right = sent_ahead(torch.randint(0, 2 * _PADDING + 1, (2, count, 1), generator=generator), device)
    mirrored = sent_ahead(torch.rand(count, 1, generator=generator) < 0.5, device)
    rows = down + torch.arange(height, device=device)
    across = torch.arange(width, device=device)
    columns = right + torch.where(mirrored, across.flip(0), across)
    picture = torch.arange(count, device=device).view(-1, 1, 1)
    # Two index tensors on either side of a slice put the channel last; it goes back to its place.
    return padded[picture, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


def wide(*, data_dir: Path | None = None, cache_dir: Path | None = None) -> Classification:
    """CIFAR-10 with a hidden layer of 8,192: 17 million parameters, enough gradient for a link to matter."""
    narrow = task(data_dir=data_dir, cache_dir=cache_dir)
    return replace(
        narrow,
        name="cifar-wide",
        description=f"{cifar_data.description(folder_of(data_dir))}, three convolutions, linear layers of 8,192 and 10",
        build=lambda: _net(8192),
        recipe=replace(narrow.recipe, batch_size=8, lr=0.02),
    )


def network(name: str, title: str, build: Callable[[], nn.Module]) -> Callable[..., Classification]:
    """A task of the papers: CIFAR-10 with one of their networks, trained as in Sahu et al. 2021, Table 5.

    There 300 epochs of 8 workers x 256: the rate grows from 0.1 to 1.6 over 5 epochs and falls at 150 and 250.
    """

    def make(*, data_dir: Path | None = None, cache_dir: Path | None = None) -> Classification:
        return replace(
            task(data_dir=data_dir, cache_dir=cache_dir),
            name=name,
            description=f"{cifar_data.description(folder_of(data_dir))}, {title}",
            build=build,
            bfloat16=True,
            recipe=Recipe(
                lr=1.6,
                batch_size=256,
                momentum=0.9,
                nesterov=True,
                weight_decay=1e-4,
                decay_norms=False,
                warmup_epochs=5,
                start=1 / 16,
                decay_at=(150 / 300, 250 / 300),
            ),
        )

    return make


resnet = network("cifar-resnet18", "ResNet-18", resnet18)
senet = network("cifar-senet18", "SENet18", senet18)
inception = network("cifar-googlenet", "GoogLeNet", googlenet)


def task(*, data_dir: Path | None = None, cache_dir: Path | None = None) -> Classification:
    """The CIFAR-10 task; ``data_dir`` defaults to the environment variable GRADSIEVE_DATA."""
    images = cifar_data.load(folder_of(data_dir), cache_dir)
    return Classification(
        name="cifar",
        description=f"{cifar_data.description(folder_of(data_dir))}, three convolutions and two linear layers",
        recipe=Recipe(
            lr=0.05,
            batch_size=32,
            momentum=0.9,
            nesterov=True,
            weight_decay=1e-4,
            warmup=0.1,
            decay_at=(0.5, 0.8),
        ),
        build=_net,
        train_inputs=torch.from_numpy(images["train_images"]),
        train_labels=torch.from_numpy(images["train_labels"]).long(),
        test_inputs=torch.from_numpy(images["test_images"]),
        test_labels=torch.from_numpy(images["test_labels"]).long(),
        prepare=_normalise,
        augment=_shift_and_mirror,
    )
