"""What the terminal shows: a bar a rule while it trains, then one table."""

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from gradsieve.lab.records import EndRow, EpochRow, Run, RunRow, StepRow
from gradsieve.lab.summary import Line, number, percent, seconds, size, summarise, times


class Bars:
    """A ``View`` with a progress bar a rule, on the error stream so that the table can be piped.

    The bars show with the first event and go where an error ends the run, which then is all there is to read.
    """

    def __init__(self, rules: Sequence[str], epochs: int) -> None:
        self._epochs = epochs
        self._progress = Progress(
            TextColumn("{task.fields[name]}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[state]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
        )
        self._tasks: dict[str, TaskID] = {
            rule: self._progress.add_task("", start=False, total=epochs, name=rule, state="waiting") for rule in rules
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.live.transient = kind is not None
        self._progress.stop()

    def calibrating(self, name: str, trial: int) -> None:
        self._progress.start()
        self._progress.start_task(self._tasks[name])
        self._progress.update(self._tasks[name], state=f"calibrating, run {trial}")

    def row(self, row: RunRow | StepRow | EpochRow | EndRow) -> None:
        self._progress.start()
        task = self._tasks[row.run]
        if isinstance(row, RunRow):
            self._progress.reset(task, total=self._epochs)
        elif isinstance(row, StepRow):
            self._progress.update(task, completed=row.epoch)
        elif isinstance(row, EpochRow):
            state = f"epoch {row.epoch}/{self._epochs}  accuracy {percent(row.accuracy)}"
            self._progress.update(task, completed=row.epoch, state=state)


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
