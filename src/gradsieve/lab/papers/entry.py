"""What a figure or a table of a paper is to ``gradsieve reproduce``, and what it is given to run."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from matplotlib.figure import Figure

from gradsieve.lab.papers.arm import Arm
from gradsieve.lab.papers.checkpoint import Checkpoint
from gradsieve.lab.papers.summary import Row


class Track(Protocol):
    """Who watches a run: told how far one part of it is."""

    def __call__(self, part: str, done: float, total: float, state: str = "") -> None: ...


def unwatched(part: str, done: float, total: float, state: str = "") -> None:
    """A ``Track`` that looks away."""


@dataclass(frozen=True)
class Context:
    """How an entry is run: where its data and its results are, how large, and who watches."""

    out: Path
    data_dir: Path | None = None
    cache_dir: Path | None = None
    trainings: Path | None = None  # where trainings are kept, for all entries; None: in ``out``
    seeds: int = 1
    epochs: int | None = None
    device: str = "cpu"
    quick: bool = False
    resume: bool = False
    jobs: int = 1  # trainings side by side
    compiled: bool = False  # networks are, where they train on a GPU
    track: Track = unwatched
    started: float = field(default_factory=time.perf_counter)

    @property
    def store(self) -> Path:
        """Where trainings are kept."""
        return self.trainings or self.out / "trainings"

    def checkpoint(self, name: str, **about: object) -> Checkpoint:
        """The saved state of one part of the run; ``about`` is what must be the same for it to be continued."""
        return Checkpoint(self.out / f"state-{name}.npz", about, resume=self.resume)


@dataclass(frozen=True)
class Outcome:
    """What a run came to: the figure, our numbers beside the paper's, and the curves behind both."""

    figure: Figure
    rows: Sequence[Row]
    results: Sequence[dict[str, float | int | str]]
    data: str
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Entry:
    """One figure or table. ``seeds`` and ``epochs`` are what a full run takes; None: there are none to choose.

    ``stages`` tells the trainings that it takes, for who wants to make them beforehand: those of a stage may run side
    by side, and are in the store when the next stage is asked for, since that may depend on how they came out.
    """

    key: str
    title: str
    needs: str
    run: Callable[[Context], Outcome]
    check: Callable[[Context], object] = lambda context: None  # missing data are said before anything is written
    seeds: int | None = None
    quick_seeds: int = 1
    epochs: int | None = None
    devices: tuple[str, ...] = ("cpu",)
    stages: Callable[[Context], Iterator[Sequence[Arm]]] | None = None

    @property
    def paper(self) -> str:
        return self.key.partition("/")[0]

    @property
    def name(self) -> str:
        return self.key.partition("/")[2]
