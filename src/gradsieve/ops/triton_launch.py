"""Launches that remember the compiled version: to look for it anew takes most of a launch's time on the host."""

from typing import Any

import torch
import triton

DIRECT = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 4)  # how older ones call is unknown
_compiled: dict[tuple[Any, ...], Any] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """``kernel[grid](*arguments, **options)``, for kernels whose constants come last."""
    device = torch.cuda.current_device() if torch.cuda.is_available() else None
    key = id(kernel), device, *map(_kind, arguments), *options.items()
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = kernel[grid](*arguments, **options)
        if DIRECT and compiled is not None:  # the interpreter compiles nothing
            _compiled[key] = compiled
    else:
        constants = (options[name] for name in kernel.arg_names[len(arguments) :])
        compiled[(*grid, 1, 1)[:3]](*arguments, *constants)


def _kind(argument: Any) -> Any:
    """What a version is compiled for: a tensor's type and alignment, a number's class."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, -(2**31) <= argument < 2**31
    return type(argument)
