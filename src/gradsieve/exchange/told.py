"""What an exchange told, brought to the host without making a device wait."""

from typing import NamedTuple

import torch
from torch import Tensor

from gradsieve.types import Report, Sparse, Turn


class Told(NamedTuple):
    """The figures of one exchange, on the host."""

    refused: bool
    bad: bool
    wanted: int
    chosen: float
    kept: float
    error: float


class Late:
    """A report on its way to the host: copied without waiting, read when it is needed."""

    def __init__(self, turn: Turn, report: Report, error_L: Tensor | None, sent: Sparse):
        self.turn, self.report, self.sent = turn, report, sent
        wanted_W = report.wanted_W.double()
        figures = [
            report.wrong_W.any(),
            report.bad,
            wanted_W.max(),
            wanted_W.mean(),
            report.kept_W.double().mean(),
            wanted_W.new_zeros(()) if error_L is None else error_L.mean(),
        ]
        self._figures = torch.stack([figure.double() for figure in figures])
        self._event: torch.cuda.Event | None = None
        if self._figures.is_cuda:
            self._figures = torch.empty(len(figures), dtype=torch.float64, pin_memory=True).copy_(
                self._figures, non_blocking=True
            )
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def read(self) -> Told:
        if self._event is not None:
            self._event.synchronize()
        refused, bad, wanted, chosen, kept, error = self._figures.tolist()
        return Told(bool(refused), bool(bad), int(wanted), chosen, kept, error)
