"""Trainings side by side, each in a process of its own: for CPUs, which a small network does not fill."""

import multiprocessing
import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing.context import SpawnProcess
from multiprocessing.queues import Queue
from typing import Any

import torch

from gradsieve.lab.errors import LabError
from gradsieve.lab.papers.arm import Arm
from gradsieve.lab.papers.entry import Context, unwatched

Make = Callable[[Context, Arm], Iterator[tuple[int, float]]]
"""Makes one training, and tells the epochs done and the accuracy after each."""

_LOOK = 1.0  # seconds between two looks at whether all processes are still there


def side_by_side(make: Make, context: Context, arms: Sequence[Arm]) -> Iterator[tuple[Arm, int, float]]:
    """As ``make`` tells it of each, in the order in which it happens, from ``context.jobs`` processes at most.

    An error in one ends all; what they have saved stays, for ``--resume``.
    """
    spawn = multiprocessing.get_context("spawn")
    jobs = min(context.jobs, len(arms))
    todo: Queue[int | None] = spawn.Queue()
    told: Queue[tuple[int, Any]] = spawn.Queue()
    for job in [*range(len(arms)), *[None] * jobs]:
        todo.put(job)
    threads = max(1, torch.get_num_threads() // jobs)
    alone = replace(context, track=unwatched, jobs=1)
    given = make, alone, list(arms), todo, told, threads
    processes: list[SpawnProcess] = []
    try:
        for _ in range(jobs):
            process = spawn.Process(target=_work, args=given, daemon=True)
            process.start()
            processes.append(process)
        left = len(arms)
        while left:
            codes = [process.exitcode for process in processes]
            if any(codes):
                raise LabError(f"trainings side by side: their processes ended with {codes}")
            try:
                i, news = told.get(timeout=_LOOK)
            except queue.Empty:
                if None not in codes:  # they had ended before, so that nothing is on its way
                    raise LabError(f"trainings side by side: {left} were not told of") from None
                continue
            if isinstance(news, str):
                raise LabError(f"{arms[i].title}: {news}")
            if news is None:
                left -= 1
            else:
                yield arms[i], *news
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _work(
    make: Make,
    context: Context,
    arms: Sequence[Arm],
    todo: "Queue[int | None]",
    told: "Queue[tuple[int, Any]]",
    threads: int,
) -> None:
    """One process: a training after the other, until none is left."""
    torch.set_num_threads(threads)
    while (i := todo.get()) is not None:
        try:
            for news in make(context, arms[i]):
                told.put((i, news))
            told.put((i, None))
        except LabError as error:
            told.put((i, str(error)))
        except KeyboardInterrupt:  # the process that waits for this one says so
            return
