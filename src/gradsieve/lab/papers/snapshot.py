"""A training at the end of an epoch, on disk: all that it must have to end as if it had never stopped."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import gradsieve as gs
from gradsieve.lab.papers import checkpoint
from gradsieve.lab.runner import Training
from gradsieve.meter import Tally

GPU_SECONDS = 60.0
"""Between two saves where epochs take a second: a state is some hundreds of megabytes."""

_PLAIN = "plain"


class Snapshot:
    """The file of one training's state, tensors by name and the rest as one JSON text, and when to write it again."""

    def __init__(self, path: Path, training: str, data: str, *, device: str, resume: bool) -> None:
        self._file = checkpoint.Checkpoint(path, {"training": training, "data": data, "device": device}, resume=resume)
        self._seconds = checkpoint.SECONDS if device == "cpu" else GPU_SECONDS
        self._saved = time.monotonic()

    def due(self) -> bool:
        return time.monotonic() - self._saved > self._seconds

    def save(self, training: Training, rows: Sequence[str]) -> None:
        tensors, plain = _state(training)
        text = json.dumps({**plain, "rows": list(rows)}).encode()
        self._file.save({**tensors, _PLAIN: torch.frombuffer(bytearray(text), dtype=torch.uint8)})
        self._saved = time.monotonic()

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What ``restore`` takes, tensors and the rest; None to start afresh."""
        tensors = self._file.load()
        return None if tensors is None else (tensors, json.loads(bytes(tensors.pop(_PLAIN).numpy())))

    def drop(self) -> None:
        self._file.path.unlink(missing_ok=True)


def _state(training: Training) -> tuple[dict[str, Tensor], dict[str, Any]]:
    sieve, optimizer = _parts(training)
    exchanged = sieve.state_dict()
    nested = {
        "model": training.model.state_dict(),
        "optimizer": optimizer.state_dict()["state"],
        "memory": exchanged.pop("memory"),
        "rule": exchanged.pop("rule"),
    }
    plan = sieve.channel.plan
    plain = {
        "step": training.step,
        "epoch": training.epoch,
        "sieve": exchanged,
        "plan": {name: getattr(plan, name) for name in ("known", "last", "rest", "next_rest")},
        "empty": sieve.channel.memory_is_empty,
        "total": asdict(sieve.stats().total),
        "gradient_seconds": training.gradient_seconds,
        "device_seconds": training.device_seconds,
    }
    return dict(_flat(nested)), plain


def restore(training: Training, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
    """Put a saved state into a training that has not begun."""
    sieve, optimizer = _parts(training)
    nested = _nested(tensors)
    training.model.load_state_dict(nested["model"])
    _restore_optimizer(optimizer, nested.get("optimizer", {}))
    sieve.load_state_dict({**plain["sieve"], "memory": nested["memory"], "rule": nested.get("rule", {})})
    for name, value in plain["plan"].items():
        setattr(sieve.channel.plan, name, value)
    sieve.channel.memory_is_empty = plain["empty"]
    sieve.meter.go_on(Tally(**plain["total"]))
    training.step, training.epoch = plain["step"], plain["epoch"]
    training.gradient_seconds = plain["gradient_seconds"]
    training.device_seconds = dict(plain["device_seconds"])


def _restore_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": {int(key): value for key, value in state.items()}, "param_groups": groups})
    for parameter, kinds in optimizer.state.items():
        for kind, tensor in kinds.items():
            if tensor.shape == parameter.shape:  # laid out as a fused optimizer made it
                kinds[kind] = torch.empty_like(parameter).copy_(tensor)


def _flat(nested: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors of a nested mapping, by their paths."""
    for name, value in nested.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{name}/")
        elif isinstance(value, Tensor):
            yield f"{path}{name}", value.detach().cpu()


def _nested(flat: Mapping[str, Tensor]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for path, tensor in flat.items():
        *parents, name = path.split("/")
        place = nested
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = tensor
    return nested


def _parts(training: Training) -> tuple[gs.Simulator, torch.optim.Optimizer]:
    assert isinstance(training.sieve, gs.Simulator)
    assert training.optimizer is not None
    return training.sieve, training.optimizer
