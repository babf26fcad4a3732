"""How far long work has come: bars on a terminal, and a line now and then in a log."""

from collections.abc import Iterable
from time import monotonic
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

PAUSE = 30.0
"""Seconds between two lines of a log."""


class Bars:
    """A bar for each part of the work, on the error stream so that what is printed in the end can be piped.

    The bars show with the first event and go where an error ends the run, which then is all there is to read.
    """

    def __init__(self, waiting: Iterable[str] = (), title: str = "") -> None:
        """``title`` is what a line of a log begins with."""
        self._title = title
        self._console = Console(stderr=True, soft_wrap=True)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[state]}", markup=False),
            TimeElapsedColumn(),
            TimeRemainingColumn(compact=True),
            console=self._console,
            refresh_per_second=4,
            disable=not self._console.is_interactive,
        )
        self._tasks: dict[str, TaskID] = {}
        for part in waiting:
            self._add(part, 1, "waiting", start=False)
        self._due = monotonic() + PAUSE

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress.live.is_started:
            self._progress.live.transient = kind is not None
            self._progress.stop()

    def __call__(self, part: str, done: float, total: float, state: str | None = None) -> None:
        """``state`` stays what it was where none is given."""
        self._progress.start()
        if part not in self._tasks:
            self._add(part, total, "")
        task = self._progress.tasks[self._tasks[part]]
        self._progress.start_task(task.id)
        said = task.fields["state"] if state is None else state
        self._progress.update(task.id, completed=done, total=total, state=said)
        if self._progress.disable and monotonic() >= self._due:
            self._due = monotonic() + PAUSE
            facts = [self._title, f"{part}: {done / total:.0%}", said, f"{clock(task.elapsed or 0)} so far"]
            if task.time_remaining is not None:
                facts.append(f"{clock(task.time_remaining)} left")
            self._console.print(", ".join(filter(None, facts)), markup=False, highlight=False)

    def restart(self, part: str) -> None:
        """What was done so far was preparation."""
        self._progress.reset(self._tasks[part], state="")

    def _add(self, part: str, total: float, state: str, start: bool = True) -> None:
        self._tasks[part] = self._progress.add_task(part, start=start, total=total, state=state)


def clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> clock(3725.4), clock(59)
    ('1:02:05', '0:00:59')
    """
    minutes, second = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}"
