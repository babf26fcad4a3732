"""Checkpoints: the memory by parameter name. Tensors and plain values only, so ``weights_only=True`` loads them."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gradsieve.step import Channel

VERSION = 1


def save_channels(channels: Sequence[Channel], *, step: int, lr: float | None) -> dict[str, Any]:
    """What the workers here remember. Tensors are copies: training on does not change a saved state."""
    memory: dict[str, dict[str, Tensor]] = {}
    rule: dict[str, dict[str, Tensor]] = {}
    for channel in channels:
        for name, start, stop in spans(channel):
            memory[name] = {
                kind: tensor[:, start:stop].detach().to("cpu", copy=True)
                for kind, tensor in channel.memory.tensors.items()
            }
        for row, key in enumerate(channel.segments.keys):
            rule[str(key)] = {kind: tensor[row].clone() for kind, tensor in channel.state.items()}
    return {
        "version": VERSION,
        "step": step,
        "lr": lr,
        "feedback": channels[0].options.feedback.kind if channels else "gradient",
        "memory": memory,
        "rule": rule,
    }


def load_channels(channels: Sequence[Channel], state: Mapping[str, Any]) -> tuple[int, float | None]:
    """Put a saved state back; returns its step and learning rate. Nothing changes unless all of it fits."""
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        raise ValueError(f"not a gradsieve state of version {VERSION}")
    kind = channels[0].options.feedback.kind if channels else "gradient"
    if state["feedback"] != kind:
        raise ValueError(f'the state was saved with feedback={state["feedback"]!r}, this run has {kind!r}')
    for channel in channels:
        for name, start, stop in spans(channel):
            if name not in state["memory"]:
                raise ValueError(f"the state has no memory for parameter {name!r}")
            for part, tensor in channel.memory.tensors.items():
                shape = (len(tensor), stop - start)
                saved = state["memory"][name].get(part)
                if saved is None or tuple(saved.shape) != shape:
                    raise ValueError(f"the state's {part} of {name!r} has not the shape {shape} of this run")
    for channel in channels:
        for name, start, stop in spans(channel):
            for part, tensor in channel.memory.tensors.items():
                tensor[:, start:stop].copy_(state["memory"][name][part])
        channel.memory_is_empty = not any(bool(t.any()) for t in channel.memory.tensors.values())
        for row, key in enumerate(channel.segments.keys):
            for part, saved in state["rule"].get(str(key), {}).items():
                channel.state[part][row] = torch.as_tensor(saved)
    return int(state["step"]), state["lr"]


def spans(channel: Channel) -> list[tuple[str, int, int]]:
    """Name, start and stop of each parameter of a channel."""
    places = pairwise(channel.layout.bounds)
    return [(name, start, stop) for name, (start, stop) in zip(channel.layout.names, places, strict=True)]
