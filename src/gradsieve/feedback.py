"""The memory: what was not sent, kept until it is. L workers, n coordinates.

gradient   p = memory + g                               the memory in gradient units
update     p = (lr_before / lr_now) memory + g          Algorithm 1 of Sahu et al. 2021, exactly
momentum   u = beta u + g;  p = memory + u              Algorithm 3 there; Deep Gradient Compression's scheme
none       p = g                                        what is not sent is dropped
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.compressors.base import check_integer, check_number
from gradsieve.types import Pending, Segments, Sparse

KINDS = ("gradient", "update", "momentum", "none")


@dataclass(frozen=True)
class Feedback:
    """What the memory does between two steps; ``feedback="gradient"`` is the short form of ``Feedback("gradient")``."""

    kind: str = "gradient"

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.kind == "momentum":
            raise ValueError(f"feedback takes one of {', '.join(KINDS)} or a Momentum, not {self.kind!r}")


@dataclass(frozen=True)
class Momentum(Feedback):
    """Local momentum before the memory (Lin et al. 2018); the optimizer outside is then plain SGD.

    ``masking`` clears the momentum of what was sent, ``clip`` bounds the norm of each worker's gradient by
    ``clip / sqrt(W)``, and over the first ``warmup`` steps a density falls 25%, 6.25%, 1.56%, 0.4%, target.

    >>> Momentum(beta=0.9, nesterov=True)
    Momentum(kind='momentum', beta=0.9, nesterov=True, masking=True, clip=None, warmup=0)
    """

    kind: str = field(default="momentum", init=False)
    beta: float = 0.9
    nesterov: bool = False
    masking: bool = True
    clip: float | None = None
    warmup: int = 0

    def __post_init__(self) -> None:
        check_number("beta", self.beta, 0.0, 1.0, "a number from 0 to 1")
        if self.clip is not None:
            check_number("clip", self.clip, 0.0, math.inf, "a number of at least 0, or None")
        check_integer("warmup", self.warmup, 0)
        for name in ("nesterov", "masking"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} takes True or False, not {getattr(self, name)!r}")

    def density(self, step: int, target: float) -> float:
        """The density of a step: five equal stretches of the warm-up, four times less in each, never below target."""
        if step >= self.warmup:
            return target
        stage = 5 * step // self.warmup
        return target if stage == 4 else max(target, 0.25 ** (stage + 1))


def feedback_of(option: object) -> Feedback:
    """The feedback that an option names."""
    if isinstance(option, Feedback):
        return option
    return Momentum() if option == "momentum" else Feedback(option)  # type: ignore[arg-type]


class Memory:
    """The memory of L workers over one stretch of the gradient, as flat tensors that move by parameter."""

    def __init__(self, feedback: Feedback, workers: int, size: int, device: torch.device, dtype: torch.dtype):
        self.feedback = feedback
        dtype = torch.promote_types(dtype, torch.float32)
        self.tensors: dict[str, Tensor] = {"memory": torch.zeros(workers, size, dtype=dtype, device=device)}
        if isinstance(feedback, Momentum):
            self.tensors["velocity"] = torch.zeros_like(self.tensors["memory"])
        self._next_velocity: Tensor | None = None

    @property
    def memory_Ln(self) -> Tensor:
        return self.tensors["memory"]

    def correct(self, grad_Ln: Tensor, segments: Segments, *, gain: float, lr_ratio: float, workers: int) -> Pending:
        """The step's ``Pending``: how this memory joins this gradient. ``lr_ratio`` is lr_before / lr_now."""
        decay = {"update": lr_ratio, "none": 0.0}.get(self.feedback.kind, 1.0)
        if isinstance(self.feedback, Momentum):
            grad_Ln, gain = self._accelerate(self.feedback, grad_Ln, gain, workers), 1.0
        return Pending(grad_Ln, self.memory_Ln, segments, decay, gain)

    def settle(self, sparse: Sparse | None) -> None:
        """After an exchange that counts: keep the new momentum, masked by what was sent (None: nothing waits)."""
        if self._next_velocity is None:
            return
        velocity_Ln, self._next_velocity = self._next_velocity, None
        if isinstance(self.feedback, Momentum) and self.feedback.masking and sparse is not None:
            ops.of(velocity_Ln).clear(velocity_Ln, sparse)
        self.tensors["velocity"] = velocity_Ln

    def _accelerate(self, momentum: Momentum, grad_Ln: Tensor, gain: float, workers: int) -> Tensor:
        velocity_Ln = self.tensors["velocity"]
        grad_Ln = grad_Ln.to(velocity_Ln.dtype) * gain
        if momentum.clip is not None:
            norm_L1 = torch.linalg.vector_norm(grad_Ln, dim=1, keepdim=True, dtype=torch.float64)
            share_L1 = (momentum.clip / math.sqrt(workers) / norm_L1.clamp(min=1e-30)).clamp(max=1.0)
            grad_Ln = grad_Ln * share_L1.to(grad_Ln.dtype)
        if momentum.nesterov:
            self._next_velocity = (velocity_Ln + grad_Ln) * momentum.beta
            return self._next_velocity + grad_Ln
        self._next_velocity = velocity_Ln * momentum.beta + grad_Ln
        return self._next_velocity
