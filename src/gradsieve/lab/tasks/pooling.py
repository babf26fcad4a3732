# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"
"""Max pooling over 3x3 pixels, channels last, as two Triton kernels.

PyTorch's own write 64-bit positions and scatter by atomics. These keep a byte an element, and the gradient is gathered,
so that it is the same every time.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

ROWS, WIDTH = 16, 64  # pixels and channels of a program


def max_pool(x: Tensor, stride: int) -> Tensor:
    """``max_pool2d(x, 3, stride, padding=1)``, channels last; of equals the first in reading order, as there."""
    out: Tensor = _MaxPool.apply(x, stride)
    return out


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stride: int) -> Tensor:
        count, channels, height, width = x.shape
        above, across = (height - 1) // stride + 1, (width - 1) // stride + 1
        out = torch.empty(
            (count, channels, above, across), dtype=x.dtype, device=x.device, memory_format=torch.channels_last
        )
        place = torch.empty_like(out, dtype=torch.uint8)
        _largest[_grid(out)](x, out, place, channels, height, width, above, across, out.numel() // channels, stride,
                             ROWS=ROWS, WIDTH=WIDTH, enable_fp_fusion=False)  # fmt: skip
        ctx.save_for_backward(place)
        ctx.like, ctx.stride = x.shape, stride
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (place,) = ctx.saved_tensors
        gradient = gradients[0].contiguous(memory_format=torch.channels_last)
        out = torch.empty(ctx.like, dtype=gradient.dtype, device=gradient.device, memory_format=torch.channels_last)
        _, channels, height, width = ctx.like
        _gathered[_grid(out)](gradient, place, out, channels, height, width, *place.shape[2:], out.numel() // channels,
                              ctx.stride, ROWS=ROWS, WIDTH=WIDTH, enable_fp_fusion=False)  # fmt: skip
        return out, None


def _grid(out: Tensor) -> tuple[int, int]:
    channels = out.shape[1]
    return triton.cdiv(out.numel() // channels, ROWS), triton.cdiv(channels, WIDTH)


@triton.jit
def _tile(height, width, channels, pixels, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """This program's pixels (image, row, column) and channels, and which of them are there."""
    pixel = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    there = (pixel < pixels)[:, None] & (channel < channels)[None, :]
    image = (pixel // (height * width)).to(tl.int64)
    at = pixel.to(tl.int64)[:, None] * channels + channel[None, :]
    return image, (pixel // width) % height, pixel % width, channel, at, there


@triton.jit
def _largest(x, out, place, channels, height, width, above, across, pixels, stride,
             ROWS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    image, row, column, channel, at, there = _tile(above, across, channels, pixels, ROWS, WIDTH)
    best = tl.full((ROWS, WIDTH), float("-inf"), tl.float32)
    found = tl.zeros((ROWS, WIDTH), tl.int32)
    for k in tl.static_range(9):
        y, z = row * stride + k // 3 - 1, column * stride + k % 3 - 1
        inside = there & ((y >= 0) & (y < height) & (z >= 0) & (z < width))[:, None]
        source = ((image * height + y) * width + z)[:, None] * channels + channel[None, :]
        value = tl.load(x + source, mask=inside, other=float("-inf")).to(tl.float32)
        larger = (value > best) | (value != value)
        best = tl.where(larger, value, best)
        found = tl.where(larger, k, found)
    tl.store(out + at, best.to(out.dtype.element_ty), mask=there)
    tl.store(place + at, found.to(tl.uint8), mask=there)


@triton.jit
def _gathered(gradient, place, out, channels, height, width, above, across, pixels, stride,
              ROWS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    image, row, column, channel, at, there = _tile(height, width, channels, pixels, ROWS, WIDTH)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for k in tl.static_range(9):
        y, z = row + 1 - k // 3, column + 1 - k % 3  # where a window would begin, times the stride
        whole = (y >= 0) & (z >= 0) & (y % stride == 0) & (z % stride == 0)
        y, z = y // stride, z // stride
        inside = there & (whole & (y < above) & (z < across))[:, None]
        source = ((image * above + y) * across + z)[:, None] * channels + channel[None, :]
        chosen = tl.load(place + source, mask=inside, other=255).to(tl.int32) == k
        total += tl.load(gradient + source, mask=chosen, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=there)
