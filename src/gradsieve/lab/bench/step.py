"""What one DDP step costs under every way to exchange gradients, over one link."""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradsieve import ops
from gradsieve.lab.bench.machine import machine
from gradsieve.lab.bench.rank import STEPS, WARM, Draws
from gradsieve.lab.bench.shapes import resnet18
from gradsieve.lab.bench.start import run_ranks
from gradsieve.types import Pending, Segments

OURS = (
    "threshold:auto",
    "topk:0.001",
    "gaussiank:0.001",
    "sampledtopk:0.001",
    "randomk:0.001",
    "blockrandomk:0.001",
)
LIMIT = 1500.0  # seconds for one link: a rank that hangs is an error, not a wait


@dataclass(frozen=True)
class Row:
    """One way over one link: milliseconds a step (quartiles), bytes a rank really sent, ratios of this very run."""

    date: str
    machine: str
    torch: str
    workers: int
    link: str
    way: str
    ms: float
    low: float
    high: float
    sent: int
    density: float | None  # of the timed steps
    over_dense: float | None  # None where that way was not in the run
    over_nothing: float | None
    phases: dict[str, float]
    bucket_view: bool = False  # what rows have that were written before it could be chosen

    @property
    def setting(self) -> str:
        """What one run measures its ways under; only within it do they compare."""
        return f"{self.workers} workers, {self.link}{', gradients as bucket views' if self.bucket_view else ''}"


def measure(
    workers: int,
    link: str,
    ways: Sequence[str],
    *,
    rounds: int = 8,
    seconds: float = 20.0,
    density: float = 0.001,
    bucket_view: bool = False,
) -> list[Row]:
    """Start ``workers`` ranks on hosts joined by ``link`` and time all ways in random order."""
    job = {
        "ways": list(ways),
        "rounds": rounds,
        "seconds": seconds,
        "threshold": threshold_for(density, after=WARM + (STEPS + 1) * rounds // 2),
        "bucket_view": bucket_view,
    }
    return _rows(run_ranks("gradsieve.lab.bench.rank", job, workers, link, limit=LIMIT), workers, link)


def threshold_for(density: float, after: int) -> float:
    """A threshold that keeps about ``density`` of the benchmark's gradients ``after`` steps, by bisection.

    What it keeps grows with the memory: halfway through the timed steps it is to be right.
    """
    size = sum(torch.Size(shape).numel() for shape in resnet18()) // 16
    draws = Draws(0, size)
    low, high = 1e-4, 1.0
    for _ in range(12):
        t = (low * high) ** 0.5
        memory_Ln = torch.zeros(1, size)
        for step in range(after):
            pending = Pending(draws(step).unsqueeze(0), memory_Ln, Segments((0, size), (0,)))
            kept = int(ops.of(memory_Ln).threshold(pending, t).wanted_L)
        low, high = (t, high) if kept > density * size else (low, t)
    return float(t)


def _rows(result: dict[str, Any], workers: int, link: str) -> list[Row]:
    quartiles = {way: statistics.quantiles(times, n=4) for way, times in result["samples"].items()}
    dense, alone = (quartiles[way][1] if way in quartiles else None for way in ("dense", "no exchange"))
    rows = []
    for way, (low, middle, high) in quartiles.items():
        rows.append(
            Row(
                date=time.strftime("%Y-%m-%d"),
                machine=machine(),
                torch=torch.__version__,
                workers=workers,
                link=link,
                way=way,
                ms=1e3 * middle,
                low=1e3 * low,
                high=1e3 * high,
                sent=int(statistics.median(result["sent"][way])),
                density=result["densities"].get(way),
                over_dense=middle / dense if dense else None,
                over_nothing=middle / alone if alone else None,
                phases={p: 1e3 * s for p, s in result["phases"].get(way, {}).items()},
                bucket_view=result["bucket_view"],
            )
        )
    return rows
