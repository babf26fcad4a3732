"""The four curves of a comparison, once as a PNG and once as SVG that takes its colours from the page.

In the SVG every colour is a stand-in that is exchanged for a CSS variable, so that one drawing serves the light
and the dark page.
"""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from gradsieve.lab.records import Run
from gradsieve.lab.style import COLOURS, GRID, INK, LOOK
from gradsieve.lab.summary import size

_MAX_POINTS = 400
_STYLES = ("-", "--", "-.", ":")

Points = tuple[list[float], list[float]]


@dataclass(frozen=True)
class Chart:
    """One set of axes: what it shows, and how it gets its points from a run."""

    key: str
    title: str
    about: str
    x_label: str
    points: Callable[[Run], Points]
    percent: bool = False
    log_x: bool = False
    log_y: bool = False
    accuracy: bool = False


def _accuracy_by_epoch(run: Run) -> Points:
    return [row.epoch for row in run.epochs], [row.accuracy for row in run.epochs]


def _accuracy_by_bytes(run: Run) -> Points:
    return [row.bytes for row in run.epochs], [row.accuracy for row in run.epochs]


def _error_by_epoch(run: Run) -> Points:
    return [row.epoch for row in run.steps], [math.sqrt(row.error) if row.error >= 0 else math.nan for row in run.steps]


def _density_by_epoch(run: Run) -> Points:
    return [row.epoch for row in run.steps], [row.density for row in run.steps]


CHARTS = (
    Chart(
        "accuracy",
        "Test accuracy by epoch",
        "How well each rule learns: the closer to dense, the less the sieve costs.",
        "epoch",
        _accuracy_by_epoch,
        percent=True,
        accuracy=True,
    ),
    Chart(
        "bytes",
        "Test accuracy by bytes sent",
        "What one worker sends to get there, headers included. Further left is cheaper.",
        "bytes sent by one worker",
        _accuracy_by_bytes,
        percent=True,
        log_x=True,
        accuracy=True,
    ),
    Chart(
        "error",
        "Error norm",
        "The norm of what waits in a worker's memory after each step; dense has none.",
        "epoch",
        _error_by_epoch,
        log_y=True,
    ),
    Chart(
        "density",
        "Density",
        "The share of coordinates sent at each step. Top-k spends the same each step; a threshold spends when it pays.",
        "epoch",
        _density_by_epoch,
        percent=True,
        log_y=True,
    ),
)


def colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def dash(index: int) -> str:
    """Solid for the first eight runs, then dashed and so on, so that a repeated colour is not a repeated line."""
    return _STYLES[index // len(COLOURS) % len(_STYLES)]


def picture(runs: Sequence[Run]) -> bytes:
    """All four charts and a legend as a PNG."""
    with matplotlib.rc_context(_rc()):
        figure = Figure(figsize=(11, 7.4), layout="constrained", facecolor="white")
        grid = figure.subplots(2, 2)
        for axes, chart in zip(grid.flat, CHARTS, strict=True):
            _draw(axes, chart, runs)
            axes.set_title(chart.title, loc="left", fontweight="bold", fontsize=11)
        handles, labels = grid.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=min(4, max(1, len(labels))), frameon=False)
        about = runs[0].about
        figure.supxlabel(
            f"{about.description}; {about.workers} workers, {about.epochs} epochs, seed {about.seed}",
            fontsize=9,
            color="#616e7c",
        )
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=130)
    return buffer.getvalue()


def drawing(chart: Chart, runs: Sequence[Run]) -> str:
    """One chart as an ``<svg>`` element without a legend or a run's name in it."""
    with matplotlib.rc_context(_rc() | {"svg.hashsalt": chart.key}):
        figure = Figure(figsize=(5.6, 3.5), layout="constrained")
        figure.patch.set_alpha(0.0)
        _draw(figure.subplots(), chart, runs)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    for stand_in, variable in {INK: "var(--ink)", GRID: "var(--rule)"}.items():
        svg = svg.replace(stand_in, variable)
    for index, stand_in in enumerate(COLOURS):
        svg = svg.replace(stand_in, f"var(--series-{index})")
    return svg.replace("<svg ", f'<svg role="img" aria-label="{chart.title}" ', 1)


def _rc() -> dict[Any, Any]:
    return {
        **LOOK,
        "text.parse_math": False,  # a run may be called $x$
        "axes.facecolor": "none",
        "lines.linewidth": 1.8,
    }


def _draw(axes: Axes, chart: Chart, runs: Sequence[Run]) -> None:
    lowest = 1.0
    positive = False
    for index, run in enumerate(runs):
        xs, ys = _thin(*chart.points(run))
        if chart.log_y:
            ys = [y if y > 0 else math.nan for y in ys]  # dense has no error: no line, rather than a broken axis
        shown = [y for y in ys if math.isfinite(y)]
        positive = positive or bool(shown)
        lowest = min([lowest, *shown[len(shown) // 4 :]])
        # A name that starts with an underscore is one that matplotlib would leave out of its legend.
        label = run.about.run if not run.about.run.startswith("_") else f" {run.about.run}"
        marker = "o" if len(xs) == 1 else None
        axes.plot(xs, ys, dash(index), color=colour(index), label=label, marker=marker, markersize=4)
    axes.set_xlabel(chart.x_label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    if chart.log_x and any(run.epochs for run in runs):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(numticks=6))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    if chart.log_y and positive:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    if chart.percent:
        axes.yaxis.set_major_formatter(
            FuncFormatter(lambda value, _: f"{100 * value:g}%") if chart.log_y else PercentFormatter(1.0, decimals=0)
        )
    if chart.accuracy and positive:
        # The first quarter of a run climbs from chance; the differences worth seeing are above it.
        bottom = max(0.0, math.floor(20 * (lowest - 0.02)) / 20)
        axes.set_ylim(bottom, 1.0 + 0.02 * (1.0 - bottom))


def _thin(xs: list[float], ys: list[float]) -> Points:
    stride = math.ceil(len(xs) / _MAX_POINTS) or 1
    return xs[::stride], ys[::stride]
