"""Networks for 32x32 images: ResNet-18, SENet18 and GoogLeNet, narrow at the stem and without its pooling.

Sizes as in the experiments that sparsification papers report, kuangliu/pytorch-cifar's; written anew.
"""

from importlib.util import find_spec
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

_WIDTHS = (64, 128, 256, 512)
_REDUCTION = 16


def _convolution(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, kernel, stride, padding=kernel // 2, bias=False)


class _Residual(nn.Module):
    """Two 3x3 convolutions around a shortcut (He et al. 2016a)."""

    def __init__(self, channels_in: int, channels_out: int, stride: int):
        super().__init__()
        self.conv1 = _convolution(channels_in, channels_out, 3, stride)
        self.norm1 = nn.BatchNorm2d(channels_out)
        self.conv2 = _convolution(channels_out, channels_out, 3)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels_out:
            self.shortcut.append(_convolution(channels_in, channels_out, 1, stride))
            self.shortcut.append(nn.BatchNorm2d(channels_out))

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.norm1(self.conv1(x)), inplace=True)
        return functional.relu(self.norm2(self.conv2(out)) + self.shortcut(x), inplace=True)


class _SqueezeExcite(nn.Module):
    """Normalise first (He et al. 2016b), and weigh the channels by what all of the image says (Hu et al. 2018)."""

    def __init__(self, channels_in: int, channels_out: int, stride: int):
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels_in)
        self.conv1 = _convolution(channels_in, channels_out, 3, stride)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.conv2 = _convolution(channels_out, channels_out, 3)
        changes = stride != 1 or channels_in != channels_out
        self.shortcut = _convolution(channels_in, channels_out, 1, stride) if changes else None
        self.squeeze = nn.Conv2d(channels_out, channels_out // _REDUCTION, 1)
        self.excite = nn.Conv2d(channels_out // _REDUCTION, channels_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = functional.relu(self.norm1(x), inplace=True)
        beside: Tensor = x if self.shortcut is None else self.shortcut(first)
        out: Tensor = self.conv2(functional.relu(self.norm2(self.conv1(first)), inplace=True))
        weight: Tensor = self.excite(functional.relu(self.squeeze(out.mean((2, 3), keepdim=True))))
        return out * weight.sigmoid() + beside


def _stages(block: type[nn.Module], classes: int, *last: nn.Module) -> nn.Sequential:
    """A stem, four stages of two blocks each, the mean over what is left of the image, a linear layer."""
    layers: list[nn.Module] = [_convolution(3, _WIDTHS[0], 3), nn.BatchNorm2d(_WIDTHS[0]), nn.ReLU(inplace=True)]
    for number, (before, width) in enumerate(pairwise((_WIDTHS[0], *_WIDTHS))):
        layers += [block(before, width, 1 if number == 0 else 2), block(width, width, 1)]
    return nn.Sequential(*layers, *last, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(_WIDTHS[-1], classes))


def resnet18(classes: int = 10) -> nn.Module:
    """ResNet-18: 62 tensors.

    >>> sum(parameter.numel() for parameter in resnet18().parameters())
    11173962
    """
    return _stages(_Residual, classes)


def senet18(classes: int = 10) -> nn.Module:
    """SENet18: ResNet-18's plan with squeeze-and-excitation blocks that normalise first, so that a norm comes last.

    >>> sum(parameter.numel() for parameter in senet18().parameters())
    11261378
    """
    return _stages(_SqueezeExcite, classes, nn.BatchNorm2d(_WIDTHS[-1]), nn.ReLU(inplace=True))


def _normed(channels_in: int, channels_out: int, kernel: int = 1) -> list[nn.Module]:
    # The bias before a batch norm is without effect; it is there because published sizes count it.
    convolution = nn.Conv2d(channels_in, channels_out, kernel, padding=kernel // 2)
    return [convolution, nn.BatchNorm2d(channels_out), nn.ReLU(inplace=True)]


class _MaxPool(nn.Module):
    """Over 3x3 pixels; with kernels of our own where images lie channels last on a GPU."""

    def __init__(self, stride: int):
        super().__init__()
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        ours = x.is_cuda and x.is_contiguous(memory_format=torch.channels_last) and not torch.compiler.is_compiling()
        if not ours or find_spec("triton") is None:
            return functional.max_pool2d(x, 3, self.stride, padding=1)
        from gradsieve.lab.tasks.pooling import max_pool

        return max_pool(x, self.stride)


class _Inception(nn.Module):
    """Four views of one input side by side (Szegedy et al. 2015); 5x5 as two times 3x3."""

    def __init__(self, channels: int, direct: int, narrow3: int, wide3: int, narrow5: int, wide5: int, pooled: int):
        super().__init__()
        self.direct = nn.Sequential(*_normed(channels, direct))
        self.three = nn.Sequential(*_normed(channels, narrow3), *_normed(narrow3, wide3, 3))
        self.five = nn.Sequential(*_normed(channels, narrow5), *_normed(narrow5, wide5, 3), *_normed(wide5, wide5, 3))
        self.pooled = nn.Sequential(_MaxPool(1), *_normed(channels, pooled))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.direct(x), self.three(x), self.five(x), self.pooled(x)], 1)


def googlenet(classes: int = 10) -> nn.Module:
    """GoogLeNet with batch norm.

    >>> sum(parameter.numel() for parameter in googlenet().parameters())
    6166250
    """
    return nn.Sequential(
        *_normed(3, 192, 3),
        _Inception(192, 64, 96, 128, 16, 32, 32),
        _Inception(256, 128, 128, 192, 32, 96, 64),
        _MaxPool(2),
        _Inception(480, 192, 96, 208, 16, 48, 64),
        _Inception(512, 160, 112, 224, 24, 64, 64),
        _Inception(512, 128, 128, 256, 24, 64, 64),
        _Inception(512, 112, 144, 288, 32, 64, 64),
        _Inception(528, 256, 160, 320, 32, 128, 128),
        _MaxPool(2),
        _Inception(832, 256, 160, 320, 32, 128, 128),
        _Inception(832, 384, 192, 384, 48, 128, 128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(1024, classes),
    )
