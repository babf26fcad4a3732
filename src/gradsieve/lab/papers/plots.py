"""One look for all reproduced figures: the paper's axes side by side, a legend above, what was run below."""

import io
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation, LogLocator, MaxNLocator

from gradsieve.lab.records import write_file
from gradsieve.lab.style import COLOURS, LOOK

__all__ = ["BASELINE", "COLOURS", "curve", "finish", "logarithmic", "panels", "save", "style"]

BASELINE = "#52606d"
_QUIET = "#616e7c"
_POINTS = 500
_CHARACTERS = 14  # of a note, an inch
_RC = {
    **LOOK,
    "svg.hashsalt": "gradsieve",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.formatter.limits": (-3, 4),
    "axes.formatter.use_mathtext": True,
}


@contextmanager
def style() -> Iterator[None]:
    """Draw and save inside this."""
    with matplotlib.rc_context(_RC):
        yield


def panels(count: int, note: str, *, columns: int = 3, height: float = 3.6) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` axes; ``note`` says under it what was run."""
    rows = -(-count // columns)
    across = min(count, columns)
    figure = Figure(figsize=(max(6.4, 4.0 * across), height * rows), layout="constrained", facecolor="white")
    grid = figure.subplots(rows, across, squeeze=False)
    for axes in list(grid.flat)[count:]:
        axes.remove()
    lines = [textwrap.fill(line, int(_CHARACTERS * figure.get_figwidth())) for line in note.splitlines()]
    figure.supxlabel("\n".join(lines), fontsize=8.5, color=_QUIET)
    return figure, list(grid.flat)[:count]


def curve(axes: Axes, x_P: Any, y_PS: Any, label: str, colour: str, *, dash: str = "-", shade: bool = True) -> None:
    """The mean over seeds as a line, and the range over seeds as a shade."""
    stride = max(1, len(y_PS) // _POINTS)
    x_P, y_PS = np.asarray(x_P)[::stride], np.asarray(y_PS)[::stride]
    axes.plot(x_P, y_PS.mean(-1), dash, color=colour, label=label)
    if shade and y_PS.shape[-1] > 1:
        axes.fill_between(x_P, y_PS.min(-1), y_PS.max(-1), color=colour, alpha=0.15, linewidth=0)


def logarithmic(axes: Axes) -> None:
    """A log y axis with decades that can be read, and what lies between where there are less than two."""
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(numticks=8))
    axes.yaxis.set_minor_formatter(LogFormatterSciNotation(labelOnlyBase=False, minor_thresholds=(2, 0.5)))


def finish(figure: Figure, axes: Sequence[Axes]) -> Figure:
    """A legend for all panels above them, each name once."""
    named: dict[str, Any] = {}
    for part in axes:
        if part.get_xscale() == "linear":
            part.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
        for handle, label in zip(*part.get_legend_handles_labels(), strict=True):
            named.setdefault(label, handle)
    columns = min(len(named), int(figure.get_figwidth() // 2.6))
    if named:
        figure.legend(named.values(), named.keys(), loc="outside upper center", ncols=columns, frameon=False)
    return figure


def save(figure: Figure, path: Path) -> None:
    """``path`` with .png and with .svg."""
    for suffix in (".png", ".svg"):
        buffer = io.BytesIO()
        about = {"Date": None, "Creator": None} if suffix == ".svg" else {"Software": None}
        figure.savefig(buffer, format=suffix[1:], dpi=100, metadata=about)
        write_file(path.with_suffix(suffix), buffer.getvalue())
