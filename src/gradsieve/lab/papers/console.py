"""What the terminal shows of a reproduction: a bar with the time left, then the paper's numbers beside ours."""

from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from gradsieve.lab.papers.entry import Entry
from gradsieve.lab.papers.summary import Row


class Bars:
    """A ``Track`` with a bar for each part of a run, on the error stream."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[state]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            console=Console(stderr=True),
            refresh_per_second=4,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._tasks:  # else nothing was shown, and stopping would print an empty line
            self._progress.live.transient = kind is not None
            self._progress.stop()

    def __call__(self, part: str, done: float, total: float, state: str = "") -> None:
        self._progress.start()
        if part not in self._tasks:
            self._tasks[part] = self._progress.add_task(part, total=total, state=state)
        self._progress.update(self._tasks[part], completed=done, total=total, state=state)


def listing(entries: Iterable[Entry]) -> Table:
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1))
    shown.add_column("entry", no_wrap=True)  # to be copied
    for heading in ("what", "needs"):
        shown.add_column(heading, overflow="fold")
    for entry in entries:
        shown.add_row(Text(entry.key), Text(entry.title), Text(entry.needs or "nothing"))
    return shown


def table(title: str, rows: Sequence[Row]) -> Table:
    shown = Table(title=Text(title), box=SIMPLE_HEAD, title_style="bold", padding=(0, 1))
    shown.add_column("what", overflow="fold")
    for heading in ("published", "ours", "gap"):
        shown.add_column(heading, justify="right")
    for row in rows:
        gap = "" if row.gap is None else f"{100 * row.gap:+.2g}%"
        digits = 10 if row.gap is not None and abs(row.gap) < 1e-3 else 4  # more only where they are compared
        shown.add_row(Text(row.what), Text(number(row.published, digits)), Text(number(row.ours, digits)), Text(gap))
    return shown


def number(value: float | None, digits: int = 4) -> str:
    """A figure of any magnitude.

    >>> number(29790805.64933511, 10), number(14896.89), number(5e-12), number(None)
    ('29,790,805.65', '14,897', '5e-12', '')
    """
    if value is None:
        return ""
    return f"{value:,.0f}" if digits == 4 and 1e3 <= abs(value) < 1e7 else f"{value:,.{digits}g}"
