"""The trainings of all figures, each made once: a finished one is taken from the store, an unfinished one goes on.

A training has a folder of its own, and its result appears there whole or not at all, so that several processes may
fill one store.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

import gradsieve as gs
from gradsieve.lab import tasks
from gradsieve.lab.errors import LabError
from gradsieve.lab.papers.arm import Arm
from gradsieve.lab.papers.entry import Context
from gradsieve.lab.papers.side_by_side import side_by_side
from gradsieve.lab.papers.snapshot import Snapshot, restore
from gradsieve.lab.records import RESULTS, EndRow, EpochRow, Run, RunRow, StepRow, read, write_file
from gradsieve.lab.runner import Launcher, Options, Training, rows, run, train
from gradsieve.lab.tasks import Task
from gradsieve.lab.tasks.base import Classification, on_device
from gradsieve.types import Rule

__all__ = ["Arm", "deferred", "folder", "load", "missing", "stand_in", "trained"]

QUICK_TRAIN, QUICK_TEST = 512, 200
"""Pictures of a quick run."""


def trained(context: Context, arms: Sequence[Arm]) -> dict[Arm, Run]:
    """The rows of each training: read where it is finished, made where it is not."""
    runs = {arm: _finished(context, arm) for arm in dict.fromkeys(arms)}
    missing = [arm for arm, kept in runs.items() if kept is None]
    total, done = sum(arm.epochs for arm in missing), dict.fromkeys(missing, 0)
    for arm, epochs, accuracy in _making(context, missing):
        done[arm] = epochs
        context.track("trainings", sum(done.values()), total, f"{arm.rule}, seed {arm.seed}: {accuracy:.2%}")
    runs |= {arm: _finished(context, arm) for arm in missing}
    return {arm: kept for arm, kept in runs.items() if kept is not None}


def folder(context: Context, arm: Arm) -> Path:
    """Where the rows of a training are kept."""
    scale = {"scale": "quick"} if context.quick else {}
    rounding = {"compiled": True} if context.compiled else {}
    return context.store / arm.folder(device=context.device, **scale, **rounding)


def missing(context: Context, stages: Iterable[Sequence[Arm]]) -> list[Arm]:
    """The trainings of the first stage that is not whole: without them nobody knows which the next one takes."""
    for stage in stages:
        if lacking := [arm for arm in dict.fromkeys(stage) if _finished(context, arm) is None]:
            return lacking
    return []


def load(context: Context, name: str) -> Task:
    """A task with its data, loaded once a process."""
    return _task(name, context.data_dir, context.cache_dir, context.quick)


def stand_in(context: Context, name: str) -> str:
    """The task itself, or in a quick run a small one: on the same images where they are there, else on digits."""
    if not context.quick:
        return name
    try:
        load(context, "cifar")
    except LabError:
        return "digits"
    return "cifar"


def deferred(run: Run) -> float:
    """The share of what a rule chose in a training that found no slot and had to wait for a later step."""
    assert run.last is not None
    kept = run.last.density * run.about.parameters * run.last.step
    return run.last.deferred / max(kept + run.last.deferred, 1.0)


@cache
def _task(name: str, data_dir: Path | None, cache_dir: Path | None, quick: bool) -> Task:
    task = tasks.get(name, data_dir=data_dir, cache_dir=cache_dir)
    if quick and isinstance(task, Classification) and task.train_inputs.dim() == 4:  # convolutions are slow
        train, test = _few(len(task.train_labels), QUICK_TRAIN), _few(len(task.test_labels), QUICK_TEST)
        task = replace(
            task,
            description=f"{len(train)} + {len(test)} images of {task.description}",
            train_inputs=task.train_inputs[train],
            train_labels=task.train_labels[train],
            test_inputs=task.test_inputs[test],
            test_labels=task.test_labels[test],
        )
    return task


@cache
def _placed(name: str, data_dir: Path | None, cache_dir: Path | None, quick: bool, device: str) -> Task:
    """The task where the trainings run: only a training needs that device, not a figure of finished ones."""
    return on_device(_task(name, data_dir, cache_dir, quick), device)


def _few(count: int, wanted: int) -> Tensor:
    """Some of all examples, from everywhere: an archive may have them class by class."""
    wanted = min(count, wanted)
    return torch.arange(wanted) * count // wanted


def _finished(context: Context, arm: Arm) -> Run | None:
    directory = folder(context, arm)
    if not (directory / RESULTS).exists():
        return None
    (run, *more) = read(directory)
    if more or run.end is None or run.last is None or (run.about.rule, run.about.seed) != (_rule(arm), arm.seed):
        raise LabError(f"{directory / RESULTS} is not the whole of the training {arm.title}: remove it")
    if not run.about.description.startswith(wanted := load(context, arm.task).description):
        raise LabError(
            f"{directory} was trained on other data ({run.about.description}; here: {wanted}): give another --trainings"
        )
    return run


def _rule(arm: Arm) -> str:
    return str(gs.parse(arm.rule))


def _making(context: Context, missing: Sequence[Arm]) -> Iterator[tuple[Arm, int, float]]:
    """Each training, its epochs done and its accuracy, as they come: one training after the other, or some at once."""
    if context.jobs > 1 and len(missing) > 1:
        yield from side_by_side(_made, context, missing)
        return
    for arm in missing:
        for done, accuracy in _made(context, arm):
            yield arm, done, accuracy


def _made(context: Context, arm: Arm) -> Iterator[tuple[int, float]]:
    """Trains, or trains on; tells the epochs done and the accuracy, and leaves the rows in the store."""
    directory = folder(context, arm)
    directory.mkdir(parents=True, exist_ok=True)
    task = _placed(arm.task, context.data_dir, context.cache_dir, context.quick, context.device)
    snapshot = Snapshot(
        directory / "state.npz", directory.name, task.description, device=context.device, resume=context.resume
    )
    state = snapshot.load()
    lines: list[str] = state[1]["rows"] if state else []
    passed = _seconds(lines)
    holder: list[Training] = []

    def begin(training: Training) -> None:
        holder.append(training)
        if state:
            restore(training, *state)

    for row in run(task, gs.parse(arm.rule), _options(context, arm), _virtual(begin), name=arm.title):
        if isinstance(row, RunRow) and state:
            continue  # it is the first of the rows that were saved
        if isinstance(row, EpochRow | EndRow):
            row = row.model_copy(update={"seconds": row.seconds + passed})
        lines.append(row.model_dump_json())
        if isinstance(row, EpochRow):
            yield row.epoch, row.accuracy
            if snapshot.due() and row.epoch < arm.epochs:
                snapshot.save(holder[0], lines)
    write_file(directory / RESULTS, ("\n".join(lines) + "\n").encode())
    snapshot.drop()


def _seconds(lines: Sequence[str]) -> float:
    """What the training took before it was stopped."""
    return EpochRow.model_validate_json(lines[-1]).seconds if lines else 0.0


def _options(context: Context, arm: Arm) -> Options:
    return Options(
        workers=arm.workers,
        epochs=arm.epochs,
        seed=arm.seed,
        batch_size=arm.batch_size,
        lr=arm.lr,
        momentum=arm.momentum,
        scope=arm.scope,
        feedback=arm.feedback,
        exchange=arm.exchange,
        values=arm.values,
        strict=arm.strict,
        device=context.device,
        compiled=context.compiled,
    )


def _virtual(begin: Callable[[Training], None]) -> Launcher:
    """The launcher of virtual workers, with a say in how they begin."""

    def virtual(task: Task, rule: Rule, options: Options, name: str) -> Iterator[StepRow | EpochRow | EndRow]:
        yield from rows(task, options, name, train(task, rule, options, begin))

    return virtual
