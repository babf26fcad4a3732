"""Parameter shapes of well-known networks, for measuring without them."""

from itertools import accumulate
from math import prod

from gradsieve.types import Segments


def resnet18(classes: int = 10) -> list[tuple[int, ...]]:
    """CIFAR's ResNet-18: 62 tensors, 11,173,962 elements.

    >>> sum(__import__("math").prod(shape) for shape in resnet18())
    11173962
    """
    shapes: list[tuple[int, ...]] = [(64, 3, 3, 3), (64,), (64,)]
    width = 64
    for planes in (64, 128, 256, 512):
        for block in range(2):
            shapes += [(planes, width, 3, 3), (planes,), (planes,), (planes, planes, 3, 3), (planes,), (planes,)]
            if block == 0 and planes != 64:
                shapes += [(planes, width, 1, 1), (planes,), (planes,)]
            width = planes
    return [*shapes, (classes, 512), (classes,)]


def resnet50(classes: int = 1000) -> list[tuple[int, ...]]:
    """ImageNet's ResNet-50: 161 tensors, 25,557,032 elements.

    >>> sum(__import__("math").prod(shape) for shape in resnet50())
    25557032
    """
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    width = 64
    for planes, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            wide = 4 * planes
            for shape in ((planes, width, 1, 1), (planes, planes, 3, 3), (wide, planes, 1, 1)):
                shapes += [shape, (shape[0],), (shape[0],)]
            if block == 0:
                shapes += [(wide, width, 1, 1), (wide,), (wide,)]
            width = wide
    return [*shapes, (classes, 2048), (classes,)]


def gpt2_small() -> list[tuple[int, ...]]:
    """GPT-2 small with tied embeddings: 148 tensors, 124,439,808 elements.

    >>> sum(__import__("math").prod(shape) for shape in gpt2_small())
    124439808
    """
    d = 768
    block: list[tuple[int, ...]] = [(d,), (d,), (d, 3 * d), (3 * d,), (d, d), (d,)]
    block += [(d,), (d,), (d, 4 * d), (4 * d,), (4 * d, d), (d,)]
    return [(50257, d), (1024, d), *(shape for _ in range(12) for shape in block), (d,), (d,)]


NETWORKS = {"ResNet-18": resnet18, "ResNet-50": resnet50, "GPT-2 small": gpt2_small}


def tensors(network: str, size: int | None = None) -> Segments:
    """The tensors of a network, one after another; scaled so that they add up to ``size``, where that is given."""
    bounds = list(accumulate((prod(shape) for shape in NETWORKS[network]()), initial=0))
    size = bounds[-1] if size is None else size
    return Segments(tuple(bound * size // bounds[-1] for bound in bounds), tuple(range(len(bounds) - 1)))
