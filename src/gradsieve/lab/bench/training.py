"""``gradsieve bench accuracy``: seconds to a given accuracy over a slow link, for every way to exchange gradients."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter, LogLocator, NullFormatter
from rich.table import Table

from gradsieve.lab import tasks
from gradsieve.lab.bench.machine import machine
from gradsieve.lab.bench.start import links, run_ranks
from gradsieve.lab.bench.ways import AUTO, check
from gradsieve.lab.errors import LabError
from gradsieve.lab.style import LOOK
from gradsieve.lab.tasks.base import Classification

WAYS = ("dense", "PowerSGD rank 1", "PowerSGD rank 2", "PowerSGD rank 4", "topk:0.01", "threshold:0.02")
LIMIT = 3600.0
WORDS = ("task", "link", "way")
HEADINGS = ("task", "workers", "link", "way", "seconds", "steps", "accuracy", "x our best")


@dataclass(frozen=True)
class Arrival:
    """One training: seconds of training (evaluations not counted) until the target, or None where it was given up."""

    date: str
    machine: str
    torch: str
    task: str
    workers: int
    link: str
    way: str
    seed: int
    target: float
    seconds: float | None
    given_up_after: float
    steps: int
    curve: list[list[float]]


def run(
    task: str,
    wanted: Sequence[str],
    out: Path,
    tell: Callable[[str], None],
    *,
    workers: int = 2,
    ways: Sequence[str] = WAYS,
    target: float = 0.95,
    epochs: int = 20,
    every: int = 10,
    patience: float = 25.0,
    seed: int = 0,
    data_dir: Path | None = None,
    judged_by: int | None = None,
) -> list[Arrival]:
    """Train every way, ours first; a peer is given up after ``patience`` times our best: the ratio is told then."""
    possible, reason = links(wanted)
    for way in ways:
        check(way)
        if way.split(" ")[0] == AUTO:
            raise LabError(f"way takes a threshold of its own here, such as threshold:0.02, not {AUTO}")
        if way == "no exchange":
            raise LabError("way takes what exchanges gradients here: without that, ranks train models of their own")
    if not isinstance(tasks.get(task, data_dir=data_dir), Classification):
        raise LabError(f"{task} has no labels to be judged by: choose another --task")
    if reason:
        tell(f"no shaped links here ({reason}); measuring loopback")
    arrivals: list[Arrival] = []
    for link in possible:
        best = float("inf")
        for way in sorted(ways, key=lambda way: (way == "dense", way.startswith("PowerSGD"))):
            limit = min(LIMIT, patience * best)
            job = {
                "task": task,
                "data_dir": str(data_dir) if data_dir else None,
                "way": way,
                "seed": seed,
                "target": target,
                "epochs": epochs,
                "every": every,
                "seconds": limit,
                "judged_by": judged_by,
            }
            tell(f"{task}, {workers} workers, {link}: {way}")
            result = run_ranks("gradsieve.lab.bench.accuracy", job, workers, link, limit=limit + 600)
            best = min(best, result["seconds"] or best)
            arrivals.append(
                Arrival(
                    date=time.strftime("%Y-%m-%d"),
                    machine=machine(),
                    torch=torch.__version__,
                    task=task,
                    workers=workers,
                    link=link,
                    way=way,
                    seed=seed,
                    target=target,
                    given_up_after=limit,
                    **result,
                )
            )
            out.parent.mkdir(parents=True, exist_ok=True)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(arrivals[-1])) + "\n")
    return arrivals


def read(path: Path) -> list[Arrival]:
    """The newest training of each way, where it is one of its kind."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise LabError(f"cannot read {path}: {error.strerror}") from error
    rows = [Arrival(**json.loads(line)) for line in lines]
    return list({(kind(row), row.way): row for row in rows}.values())


def kind(row: Arrival) -> tuple[str, int, str, int, float]:
    """What trainings must share to be compared."""
    return row.task, row.workers, row.link, row.seed, row.target


def table(arrivals: Sequence[Arrival]) -> Table:
    """Seconds to the target, and how many times longer than ours the others take."""
    shown = Table(title="time to accuracy", title_justify="left")
    for heading in HEADINGS:
        shown.add_column(heading, justify="left" if heading in WORDS else "right")
    for row in arrivals:
        shown.add_row(*cells(row, arrivals))
    return shown


def markdown(arrivals: Sequence[Arrival]) -> str:
    """The same as Markdown, for a document."""
    marks = ("---" if heading in WORDS else "---:" for heading in HEADINGS)
    lines = [f"| {' | '.join(parts)} |" for parts in (HEADINGS, marks)]
    return "\n".join(lines + ["| " + " | ".join(cells(row, arrivals)) + " |" for row in arrivals])


def cells(row: Arrival, arrivals: Sequence[Arrival]) -> list[str]:
    best = min(
        (other.seconds for other in arrivals if kind(other) == kind(row) and ":" in other.way and other.seconds),
        default=float("nan"),
    )
    spent = row.curve[-1][0] if row.curve else float("nan")
    seconds = f"{row.seconds:.1f}" if row.seconds else f"not in {spent:.0f}"
    ratio = f"{row.seconds / best:.1f}" if row.seconds else f"over {spent / best:.0f}"
    accuracy = f"{row.curve[-1][1]:.1%}" if row.curve else ""
    return [row.task, str(row.workers), row.link, row.way, seconds, str(row.steps), accuracy, ratio]


@rc_context(LOOK)
def plot(arrivals: Sequence[Arrival], path: Path) -> None:
    """Accuracy over seconds of training, a panel for each kind of training."""
    panels = list(dict.fromkeys(map(kind, arrivals)))
    colours = {way: f"C{i % 10}" for i, way in enumerate(dict.fromkeys(row.way for row in arrivals))}
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(5.5 * columns, 4.0 * lines), layout="constrained")
    for number, panel in enumerate(panels):
        task, workers, link, _, target = panel
        axes = figure.add_subplot(lines, columns, number + 1)
        for row in arrivals:
            if kind(row) == panel and row.curve:
                seconds, accuracy = zip(*row.curve, strict=True)
                style = "-" if ":" in row.way else "--"
                points = [100 * a for a in accuracy]
                axes.plot(seconds, points, style, color=colours[row.way], marker=".", label=row.way)
        axes.axhline(100 * target, color="grey", linewidth=0.8, label="target")
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("seconds of training")
        axes.set_ylabel("test accuracy, %")
        axes.set_title(f"{task}, {workers} workers, {link}")
        axes.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
