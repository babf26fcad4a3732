"""What the terminal shows: a bar a rule while it trains, then one table."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from gradsieve.lab.progress import Bars
from gradsieve.lab.records import EndRow, EpochRow, Run, RunRow, StepRow
from gradsieve.lab.summary import Line, number, percent, seconds, size, summarise, times


class Watch:
    """A ``View`` with a progress bar a rule."""

    def __init__(self, bars: Bars, epochs: int) -> None:
        self._bars, self._epochs = bars, epochs

    def calibrating(self, name: str, trial: int) -> None:
        self._bars(name, 0, self._epochs, f"calibrating, run {trial}")

    def row(self, row: RunRow | StepRow | EpochRow | EndRow) -> None:
        if isinstance(row, RunRow):
            self._bars.restart(row.run)
        elif isinstance(row, StepRow):
            self._bars(row.run, row.epoch, self._epochs)
        elif isinstance(row, EpochRow):
            state = f"epoch {row.epoch}/{self._epochs}  accuracy {percent(row.accuracy)}"
            self._bars(row.run, row.epoch, self._epochs, state)


def table(runs: Sequence[Run]) -> Table:
    """The comparison in one table, narrow enough for 80 columns."""
    about = runs[0].about
    shown = Table(
        title=Text(f"{about.task}, {about.workers} workers, {about.epochs} epochs, seed {about.seed}"),
        box=SIMPLE_HEAD,
        title_style="bold",
        padding=(0, 1),
    )
    shown.add_column("rule", overflow="fold", min_width=14)
    for heading in ("accuracy", "density", "bytes a\nworker", "less than\ndense", "total\nerror", "seconds"):
        shown.add_column(heading, justify="right")
    lines = summarise(runs)
    for line in lines:
        shown.add_row(*_cells(line))
    return shown


def _cells(line: Line) -> list[Text]:
    unfinished = "" if line.finished else " *"
    return [
        Text(line.name + unfinished),
        Text(percent(line.accuracy)),
        Text(percent(line.density, 2)),
        Text(size(line.bytes)),
        Text(times(line.times_less)),
        Text(number(line.error)),
        Text(seconds(line.seconds)),
    ]


def notes(runs: Sequence[Run]) -> list[str]:
    """What the table needs said under it."""
    lines = summarise(runs)
    said = [f"{line.name}: {line.note}" for line in lines if line.note]
    return said + [f"* {line.name}: interrupted after {line.epochs} epochs" for line in lines if not line.finished]
