"""Accordion: top-k that sends more while the gradient changes quickly."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.compressors.base import check_density, check_integer, check_number, k_of
from gradsieve.types import Pending, Segments, Sparse, Turn


@dataclass(frozen=True)
class Accordion:
    """Top-k with density ``high`` in a critical regime, else ``low`` (Agarwal et al. 2021), each segment on its own.

    Every ``interval`` steps: critical where ``abs(norm_then - norm_now) / norm_then >= change``, or where the
    learning rate fell. The norms are of the exchanged mean gradient, which is the same on all ranks, so all agree
    without a message. Training starts critical.

    >>> Accordion(0.001, 0.1, interval=100)
    Accordion(low=0.001, high=0.1, interval=100, change=0.5)
    """

    low: float
    high: float
    interval: int = 1000
    change: float = 0.5

    def __post_init__(self) -> None:
        check_density(self.low, "low")
        check_density(self.high, "high")
        if self.low > self.high:
            raise ValueError(f"low takes a density of at most high ({self.high!r}), not {self.low!r}")
        check_integer("interval", self.interval, 1)
        check_number("change", self.change, 0.0, float("inf"), "a number of at least 0")

    def slots(self, segments: Segments) -> int:
        return sum(k_of(self.high, size) for size in segments.sizes)

    def state(self, segments: Segments) -> dict[str, Tensor]:
        size_S = torch.tensor(segments.sizes, dtype=torch.float64, device="cpu")
        return {
            "size": size_S,
            "critical": torch.ones_like(size_S),
            "then": torch.full_like(size_S, torch.nan),
            "squares": torch.zeros_like(size_S),
            "steps": torch.zeros_like(size_S),
            "lr": torch.full_like(size_S, torch.nan),
        }

    def slots_now(self, turn: Turn) -> int:
        return sum(self._k(turn))

    def __call__(self, pending: Pending, turn: Turn) -> Sparse:
        return ops.of(pending.grad_Ln).topk(pending, self._k(turn))

    def _k(self, turn: Turn) -> tuple[int, ...]:
        critical_S, size_S = turn.state["critical"].tolist(), turn.state["size"].tolist()
        densities = (self.high if critical else self.low for critical in critical_S)
        return tuple(k_of(density, int(size)) for density, size in zip(densities, size_S, strict=True))

    def observe(self, mean_n: Tensor, segments: Segments, turn: Turn) -> None:
        """Take in the exchanged mean gradient; at the end of an interval, decide the regime of the next."""
        state = turn.state
        if not segments.sizes:
            return
        parts = torch.split(mean_n, list(segments.sizes))  # a square of a 16-bit value may not fit in 16 bits
        norm_S = torch.stack([torch.linalg.vector_norm(part_n, dtype=torch.float64) for part_n in parts])
        state["squares"] += (norm_S * turn.gain).square().cpu()
        state["steps"] += 1
        over_S = state["steps"] >= self.interval  # not all at once, where one's bucket was not finite at a step
        if not bool(over_S.any()):
            return
        norm, then = (state["squares"] / state["steps"]).sqrt(), state["then"]
        changed = ~((then - norm).abs() < self.change * then)  # the first interval has no past: critical
        lr = torch.full_like(norm, torch.nan if turn.lr is None else turn.lr)
        fell, none = lr < state["lr"], torch.zeros_like(norm)
        decided = {"critical": (changed | fell).double(), "then": norm, "lr": lr, "squares": none, "steps": none}
        for name, value_S in decided.items():
            state[name].copy_(torch.where(over_S, value_S, state[name]))
