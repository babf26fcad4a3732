"""W virtual workers in one process: the production step with a link that is the identity."""

import math
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from gradsieve.exchange.local import LocalLink
from gradsieve.layout import layout_of
from gradsieve.meter import Meter, Stats
from gradsieve.options import options_of
from gradsieve.state import Pieces, load_pieces, save_pieces
from gradsieve.step import Channel
from gradsieve.types import Rule


class Simulator:
    """What W workers would send, keep and receive.

    ``params`` is a module, a list of tensors, or a number of coordinates. Gradients come as ``[W, n]`` in the order
    of the parameters; ``step`` returns their mean after the exchange, ``[n]``.

    >>> import gradsieve as gs
    >>> sim = gs.Simulator(4, gs.TopK(0.25), workers=2, exchange="allgather")
    >>> sim.step(torch.tensor([[4.0, 1.0, 0.0, 0.0], [0.0, 1.0, 0.0, 2.0]]))
    tensor([2., 0., 0., 1.])
    >>> sim.step(torch.zeros(2, 4))  # what was kept back arrives now
    tensor([0., 1., 0., 0.])
    """

    def __init__(
        self,
        params: nn.Module | Iterable[Tensor] | int,
        compressor: Rule,
        *,
        workers: int,
        scope: str = "layer",
        feedback: object = "gradient",
        exchange: str = "auto",
        values: str = "float32",
        strict: bool = False,
        meter: Meter | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
            raise ValueError(f"workers takes a whole number of at least 1, not {workers!r}")
        self.options = options_of(compressor, scope, feedback, exchange, values, strict)
        self.layout = layout_of(params)
        self.workers = workers
        self.meter = Meter() if meter is None else meter
        self.device = torch.device(device)
        self.channel = Channel(self.options, self.layout, LocalLink(workers), self.meter, self.device, dtype)
        self._pieces = Pieces()
        self._pieces.move_to(self.channel)
        self._steps = 0
        self._lr: float | None = None

    @torch.no_grad()
    def step(self, grads_Wn: Tensor, lr: float | None = None) -> Tensor:
        """Exchange one gradient a worker; the mean over workers of what was sent, ``[n]``."""
        expected = (self.workers, self.layout.size)
        if not isinstance(grads_Wn, torch.Tensor) or not grads_Wn.is_floating_point():
            kind = grads_Wn.dtype if isinstance(grads_Wn, torch.Tensor) else type(grads_Wn).__name__
            raise TypeError(f"grads_Wn takes a tensor of floating-point numbers of shape {expected}, not {kind}")
        if tuple(grads_Wn.shape) != expected:
            raise ValueError(f"grads_Wn takes a tensor of shape {expected}, not {tuple(grads_Wn.shape)}")
        ratio = self._lr_ratio(lr)
        mean_n = torch.empty(self.layout.size, dtype=grads_Wn.dtype, device=grads_Wn.device)
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():  # kernels go there
            self.channel.step(grads_Wn, mean_n, self._steps, lr=lr, lr_ratio=ratio).wait()
            bad = self.channel.bad
            if bad.is_cuda or bool(bad):  # a device is not waited for
                self.channel.conclude(bad)
        self._steps += 1
        self._lr = lr
        return mean_n

    def _lr_ratio(self, lr: float | None) -> float:
        """lr_before / lr_now, where the memory follows the learning rate."""
        if self.options.feedback.kind != "update":
            return 1.0
        if not isinstance(lr, Real) or not 0 < lr < math.inf:
            raise ValueError(f'feedback="update" follows the learning rate: lr takes a number above 0, not {lr!r}')
        return 1.0 if self._lr is None else self._lr / lr

    def stats(self) -> Stats:
        """Density, bytes sent and saved, total error, time by phase; for the last step and in all."""
        self.channel.catch_up()
        return self.meter.stats()

    def state_dict(self) -> dict[str, Any]:
        """The memory by parameter name and what the rule remembers: tensors and plain values only."""
        return save_pieces(
            self._pieces,
            self.layout,
            feedback=self.options.feedback.kind,
            step=self._steps,
            lr=self._lr,
            workers=self.workers,
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put a saved memory back: of as many workers, or of one row that every worker takes (``gs.reshard``)."""
        pieces = load_pieces(state, self.layout, self.options.feedback.kind)
        rows = {len(tensor) for kinds in pieces.memory.values() for tensor in kinds.values()}
        if rows - {1, self.workers}:
            raise ValueError(f"the state holds {max(rows)} workers, this simulator {self.workers}: use gs.reshard")
        self.channel.forget()
        pieces.move_to(self.channel)
        self._pieces = pieces
        self.channel.catch_up()
        self.meter.rewind()
        self._steps, self._lr = int(state["step"]), state["lr"]
