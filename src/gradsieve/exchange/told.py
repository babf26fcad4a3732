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


NOTHING = Told(refused=False, bad=False, wanted=0, chosen=0.0, kept=0.0, error=0.0)


def tell(report: Report, error_L: Tensor | None) -> Told:
    """Of a report that lies on the host."""
    wanted_W, kept_W = report.wanted_W.tolist(), report.kept_W.tolist()
    return Told(
        refused=any(report.wrong_W.tolist()),
        bad=bool(report.bad),
        wanted=max(wanted_W),
        chosen=sum(wanted_W) / len(wanted_W),
        kept=sum(kept_W) / len(kept_W),
        error=0.0 if error_L is None else sum(error_L.tolist()) / len(error_L),
    )


class Late:
    """A report on its way to the host: copied without waiting, read when it is needed."""

    def __init__(self, turn: Turn, report: Report, error_L: Tensor | None, sent: Sparse):
        self.turn, self.report, self.sent = turn, report, sent
        self._told: Told | None = None
        if not report.bad.is_cuda:
            self._told = tell(report, error_L)
            return
        wanted_W = report.wanted_W.double()
        figures = [
            report.wrong_W.any(),
            report.bad,
            wanted_W.max(),
            wanted_W.mean(),
            report.kept_W.double().mean(),
            wanted_W.new_zeros(()) if error_L is None else error_L.mean(),
        ]
        here = torch.stack([figure.double() for figure in figures])
        self._figures = torch.empty(len(figures), dtype=torch.float64, device="cpu", pin_memory=True).copy_(
            here, non_blocking=True
        )
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(torch.cuda.current_stream(here.device))

    def read(self) -> Told:
        if self._told is None:
            self._event.synchronize()
            refused, bad, wanted, chosen, kept, error = self._figures.tolist()
            self._told = Told(bool(refused), bool(bad), int(wanted), chosen, kept, error)
        return self._told
