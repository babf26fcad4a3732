"""Checkpoints: the memory by parameter name. Tensors and plain values only, so ``weights_only=True`` loads them."""

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from gradsieve.feedback import Memory
from gradsieve.layout import Layout
from gradsieve.step import Channel, Options
from gradsieve.types import Learner

VERSION = 1


class Pieces:
    """Where each parameter's memory is now, and each segment's rule state: views that move from channel to channel."""

    def __init__(self) -> None:
        self.memory: dict[str, dict[str, Tensor]] = {}  # name -> kind -> [L, size]
        self.rule: dict[int, dict[str, Tensor]] = {}  # segment key -> kind -> scalar

    def move_to(self, channel: Channel) -> None:
        """Copy what is known of a channel's parameters into it; from now on it lives there."""
        for name, (start, stop) in zip(channel.layout.names, pairwise(channel.layout.bounds), strict=True):
            known = self.memory.get(name, {})
            self.memory[name] = {}
            for kind, tensor in channel.memory.tensors.items():
                if kind in known:
                    tensor[:, start:stop].copy_(known[kind])
                    channel.memory_is_empty = False
        for row, key in enumerate(channel.segments.keys):
            for kind, value in self.rule.get(key, {}).items():
                if kind in channel.state:  # else it is another rule's
                    channel.state[kind][row] = value
        self._point_at(channel)

    def keep(self, channels: Collection[Channel]) -> None:
        """Let go of other channels: all their parameters have left them."""
        self.rule = {key: row for key, row in self.rule.items() if not isinstance(row, _Row) or row.channel in channels}

    def _point_at(self, channel: Channel) -> None:
        self.memory.update({name: _Window(channel, i) for i, name in enumerate(channel.layout.names)})  # type: ignore[misc]
        self.rule.update({key: _Row(channel, row) for row, key in enumerate(channel.segments.keys)})  # type: ignore[misc]


class _Window(Mapping[str, Tensor]):
    """A parameter's stretch of a channel's memory, whichever tensors that memory holds at the time."""

    def __init__(self, channel: Channel, i: int):
        self.channel, self.span = channel, slice(*channel.layout.bounds[i : i + 2])

    def __getitem__(self, kind: str) -> Tensor:
        self.channel.exchange.fold(self.channel.memory.memory_Ln)
        return self.channel.memory.tensors[kind][:, self.span]

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self.channel.memory.tensors)

    def __len__(self) -> int:
        return len(self.channel.memory.tensors)


class _Row(Mapping[str, Tensor]):
    """A segment's row of a rule's state."""

    def __init__(self, channel: Channel, row: int):
        self.channel, self.row = channel, row

    def __getitem__(self, kind: str) -> Tensor:
        return self.channel.state[kind][self.row]

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self.channel.state)

    def __len__(self) -> int:
        return len(self.channel.state)


def blank(options: Options, layout: Layout, dtypes: Sequence[torch.dtype]) -> Pieces:
    """What one worker remembers before its first step, in the shape of any later one."""
    pieces = Pieces()
    for name, size, dtype in zip(layout.names, layout.sizes, dtypes, strict=True):
        pieces.memory[name] = Memory(options.feedback, 1, size, torch.device("cpu"), dtype).tensors
    if isinstance(options.rule, Learner) and options.scope != "bucket":  # buckets are not known yet
        segments = layout.segments(options.scope)
        state = options.rule.state(segments)
        pieces.rule = {key: {kind: state[kind][row] for kind in state} for row, key in enumerate(segments.keys)}
    return pieces


def save_pieces(
    pieces: Pieces,
    layout: Layout,
    *,
    feedback: str,
    step: int,
    lr: float | None,
    workers: int,
    rank: int | None = None,
    lying: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Any]:
    """What the workers here remember. Tensors are copies: training on does not change a saved state.

    A rank's memory is under a name of its own: ``torch.distributed.checkpoint`` takes equal names for equal values.
    The memory of parameters that are ``lying`` in another order than that of their elements is saved in the latter.
    """
    return {
        "version": VERSION,
        "step": step,
        "lr": lr,
        "workers": workers,
        "feedback": feedback,
        _memory_of(rank): {
            name: {
                kind: _written(tensor.detach().to("cpu", copy=True), lying.get(name))
                for kind, tensor in pieces.memory[name].items()
            }
            for name in layout.names
            if name in pieces.memory
        },
        "rule": {
            str(key): {kind: value.clone() for kind, value in row.items()} for key, row in pieces.rule.items() if row
        },
    }


def _memory_of(rank: int | None) -> str:
    return "memory" if rank is None else f"memory of rank {rank}"


def _written(rows_Ln: Tensor, parameter: Tensor | None) -> Tensor:
    """From the order in which a parameter lies in memory to that of its elements.

    >>> _written(torch.arange(6)[None], torch.empty(3, 2).t())
    tensor([[0, 2, 4, 1, 3, 5]])
    """
    if parameter is None:
        return rows_Ln
    return _seen_as(rows_Ln, parameter).reshape(rows_Ln.shape)


def _laid(rows_Ln: Tensor, parameter: Tensor | None) -> Tensor:
    """The way back.

    >>> like = torch.empty(3, 2).t()
    >>> _laid(_written(torch.arange(6)[None], like), like)
    tensor([[0, 1, 2, 3, 4, 5]])
    """
    if parameter is None:
        return rows_Ln
    laid_Ln = torch.empty_like(rows_Ln, memory_format=torch.contiguous_format)
    _seen_as(laid_Ln, parameter).copy_(rows_Ln.view(-1, *parameter.shape))
    return laid_Ln


def _seen_as(rows_Ln: Tensor, parameter: Tensor) -> Tensor:
    """A view of each row in the parameter's shape, for a row that lies as the parameter does."""
    return rows_Ln.as_strided((len(rows_Ln), *parameter.shape), (rows_Ln.stride(0), *parameter.stride()))


def load_pieces(
    state: Mapping[str, Any],
    layout: Layout,
    feedback: str,
    rank: int | None = None,
    lying: Mapping[str, Tensor] = MappingProxyType({}),
) -> Pieces:
    """A saved state, checked before anything of it is used. A rank takes its own memory, or a resharded one."""
    if not isinstance(state, Mapping) or state.get("version") != VERSION:
        raise ValueError(f"state takes what state_dict() of gradsieve gave, version {VERSION}")
    if missing := {"feedback", "step", "lr", "rule"} - set(state):
        raise ValueError(f"the state lacks {', '.join(sorted(missing))}: state takes what state_dict() gave, whole")
    if state["feedback"] != feedback:
        raise ValueError(f"the state was saved with feedback={state['feedback']!r}, this run has {feedback!r}")
    memory = state.get(_memory_of(rank), state.get("memory"))
    if memory is None:
        held = ", ".join(str(name) for name in state if str(name).startswith("memory")) or "no memory"
        raise ValueError(f"the state holds {held}, this is rank {rank}: every rank saves and loads its own")
    pieces = Pieces()
    sizes = dict(zip(layout.names, layout.sizes, strict=True))
    for name, kinds in memory.items():
        if name not in sizes:
            raise ValueError(f"the state has a memory for {name!r}, which this model has not")
        for kind, tensor in kinds.items():
            if tensor.dim() != 2 or tensor.shape[1] != sizes[name] or (rank is not None and len(tensor) != 1):
                rows = "L" if rank is None else 1
                raise ValueError(
                    f"the state's {kind} of {name!r} holds {tuple(tensor.shape)}, not [{rows}, {sizes[name]}]"
                )
        pieces.memory[name] = {kind: _laid(tensor, lying.get(name)) for kind, tensor in kinds.items()}
    pieces.rule = {int(key): dict(row) for key, row in state["rule"].items()}
    return pieces


def reshard(states: Sequence[Mapping[str, Any]], workers: int) -> dict[str, Any]:
    """The state that each of ``workers`` ranks loads after a run of another size: the mean memory of all old ranks.

    Results are means over workers, so equal shares of the mean deliver exactly what the old ranks still owed.

    >>> import gradsieve as gs
    >>> old = gs.Simulator(2, gs.TopK(0.5), workers=2, exchange="allgather")
    >>> _ = old.step(torch.tensor([[3.0, 1.0], [1.0, 5.0]]))
    >>> reshard([old.state_dict()], 4)["memory"]["0"]["memory"]
    tensor([[0.5000, 0.5000]])
    """
    if not states:
        raise ValueError("states takes the saved states of all old ranks, at least one")
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ValueError(f"workers takes a whole number of at least 1, not {workers!r}")
    memories = [part for state in states for key, part in state.items() if key.startswith("memory")]
    old, ranks = states[0]["workers"], sum("memory" not in state for state in states)  # without a rank it is of all
    if ranks and ranks != old:
        raise ValueError(f"states takes those of all {old} old ranks, not of {ranks}")
    if len({key for state in states for key in state if key.startswith("memory of")}) != ranks:
        raise ValueError("states takes each old rank's once: one is there twice")
    if len(steps := {state["step"] for state in states}) > 1:
        raise ValueError(f"states takes those of one step, not of steps {', '.join(map(str, sorted(steps)))}")
    memory: dict[str, dict[str, Tensor]] = {}
    for name, kinds in memories[0].items():
        for kind in kinds:
            rows = torch.cat([part[name][kind] for part in memories])
            memory.setdefault(name, {})[kind] = rows.mean(0, keepdim=True)
    shared = {key: value for key, value in states[0].items() if not key.startswith("memory")}
    return {**shared, "workers": workers, "memory": memory}
