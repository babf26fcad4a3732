"""W virtual workers in one process: the production step with a link that is the identity."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradsieve.exchange.local import LocalLink
from gradsieve.layout import layout_of
from gradsieve.meter import Meter, Stats
from gradsieve.options import options_of
from gradsieve.state import load_channels, save_channels
from gradsieve.step import Channel
from gradsieve.types import Rule


class Simulator:
    """What W workers would send, keep and receive.

    ``params`` is a module, a list of tensors, or a number of coordinates. Gradients come as ``[W, n]`` in the order
    of the parameters; ``step`` returns their mean after the exchange, ``[n]``.

    >>> import gradsieve as gs
    >>> sim = gs.Simulator(4, gs.TopK(0.25), workers=2)
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
        self._steps = 0
        self._lr: float | None = None

    def step(self, grads_Wn: Tensor, lr: float | None = None) -> Tensor:
        """Exchange one gradient a worker; the mean over workers of what was sent, ``[n]``."""
        expected = (self.workers, self.layout.size)
        if tuple(grads_Wn.shape) != expected:
            raise ValueError(f"grads_Wn takes a tensor of shape {expected}, not {tuple(grads_Wn.shape)}")
        if self.options.feedback.kind == "update" and (lr is None or not lr > 0):
            raise ValueError(f'feedback="update" follows the learning rate: lr takes a number above 0, not {lr!r}')
        mean_n = torch.empty(self.layout.size, dtype=grads_Wn.dtype, device=grads_Wn.device)
        ratio = self._lr / lr if self._lr is not None and lr is not None else 1.0
        self.channel.step(grads_Wn, mean_n, self._steps, lr=lr, lr_ratio=ratio).wait()
        self._steps += 1
        self._lr = lr
        return mean_n

    def stats(self) -> Stats:
        return self.meter.stats()

    def state_dict(self) -> dict[str, Any]:
        """The memory by parameter name and what the rule remembers: tensors and plain values only."""
        return save_channels([self.channel], step=self._steps, lr=self._lr)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps, self._lr = load_channels([self.channel], state)
