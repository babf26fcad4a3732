"""``gradsieve bench step``: what one DDP step costs under every way to exchange gradients, over links of any speed."""

import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from subprocess import TimeoutExpired

import torch

from gradsieve import ops
from gradsieve.lab.bench.hosts import NET, hosts, start, why_not
from gradsieve.lab.bench.machine import machine
from gradsieve.lab.bench.rank import draws_of
from gradsieve.lab.bench.shapes import resnet18
from gradsieve.lab.errors import LabError
from gradsieve.types import Pending, Segments

PEERS = ("no exchange", "dense", "fp16 hook", "PowerSGD rank 1", "PowerSGD rank 2", "PowerSGD rank 4")
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
    density: float | None
    over_dense: float
    over_nothing: float
    phases: dict[str, float]


def measure(
    workers: int, link: str, ways: Sequence[str], *, rounds: int = 8, seconds: float = 20.0, density: float = 0.001
) -> list[Row]:
    """Start ``workers`` ranks on hosts joined by ``link`` and time all ways in random order."""
    job = {"ways": list(ways), "rounds": rounds, "seconds": seconds, "threshold": steady_threshold(density)}
    shaped = link != "loopback"
    rate = None if link in ("loopback", "unshaped") else link
    with hosts(workers, rate) if shaped else nullcontext([None] * workers) as names:
        master = f"{NET}.1" if shaped else "127.0.0.1"
        command = [sys.executable, "-W", "ignore", "-m", "gradsieve.lab.bench.rank", json.dumps(job)]
        common = {"WORLD_SIZE": str(workers), "MASTER_ADDR": master, "MASTER_PORT": "29533", "OMP_NUM_THREADS": "1"}
        # peers make large temporaries: keep their pages, so that page faults are not what is compared
        common |= {"MALLOC_MMAP_THRESHOLD_": "4294967295", "MALLOC_TRIM_THRESHOLD_": "8589934592"}
        if shaped:
            common["GLOO_SOCKET_IFNAME"] = "eth0"
        ranks = [start(name, command, {**common, "RANK": str(i)}) for i, name in enumerate(names)]
        try:
            outputs = [rank.communicate(timeout=LIMIT) for rank in ranks]
        except TimeoutExpired as error:
            raise LabError(f"the ranks took longer than {LIMIT:.0f} s over {link}") from error
        finally:
            for rank in ranks:
                rank.kill()
    if any(rank.returncode for rank in ranks):
        worst = next(error for rank, (_, error) in zip(ranks, outputs, strict=True) if rank.returncode)
        raise LabError(f"a rank failed: {worst.strip().splitlines()[-1]}")
    return _rows(json.loads(outputs[0][0].splitlines()[-1]), workers, link)


def steady_threshold(density: float) -> float:
    """A threshold that keeps about ``density`` of the benchmark's gradients once the memory has filled."""
    size = sum(torch.Size(shape).numel() for shape in resnet18()) // 16
    draws, memory_Ln = draws_of(0, 3, size), torch.zeros(1, size)
    t = 0.02
    for step in range(120):
        pending = Pending(draws[step % 3].unsqueeze(0), memory_Ln, Segments((0, size), (0,)))
        kept = int(ops.of(memory_Ln).threshold(pending, t).wanted_L)
        t *= (max(kept, 1) / (density * size)) ** 0.1
    return t


def _rows(result: dict[str, dict[str, list[float]]], workers: int, link: str) -> list[Row]:
    quartiles = {way: statistics.quantiles(times, n=4) for way, times in result["samples"].items()}
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
                density=result["densities"].get(way),  # type: ignore[arg-type]
                over_dense=middle / quartiles["dense"][1] if "dense" in quartiles else float("nan"),
                over_nothing=middle / quartiles["no exchange"][1] if "no exchange" in quartiles else float("nan"),
                phases={p: 1e3 * s for p, s in result["phases"].get(way, {}).items()},  # type: ignore[attr-defined]
            )
        )
    return rows


def append(rows: Sequence[Row], path: Path) -> None:
    """Results are appended, never overwritten: machine and date stand in each row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(asdict(row)) + "\n")


def links(wanted: Sequence[str]) -> tuple[list[str], str | None]:
    """The links that can be measured here, and why not others."""
    reason = why_not()
    return (["loopback"], reason) if reason else (list(wanted), None)
