"""Figure 1: how Dense-SGD, TopK-SGD and RandK-SGD converge with 16 workers, k = 0.001 d."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure

from gradsieve.lab.papers import plots
from gradsieve.lab.papers.entry import Context, Outcome
from gradsieve.lab.papers.shi2019.gradients import DENSITY, WORKERS, available
from gradsieve.lab.papers.summary import Comparison
from gradsieve.lab.papers.trainings import Arm, load, trained
from gradsieve.lab.records import Run

EPOCHS = 60
_BATCH = {"digits": 4, "cifar": 8, "cifar-resnet18": 128}
"""A worker's examples a step: with 16 workers the batch that the task's own learning rate is meant for."""


@dataclass(frozen=True)
class Method:
    """A line of the figure."""

    name: str
    rule: str
    exchange: str
    feedback: str = "gradient"


METHODS = (
    Method("Dense-SGD", "dense", "dense"),
    Method("TopK-SGD", f"topk:{DENSITY}", "allgather"),
    Method("RandK-SGD", f"randomk:{DENSITY}", "allgather"),
    # The authors' code has random-k in both forms, and the figure does not say which it shows.
    Method("RandK-SGD, no feedback", f"randomk:{DENSITY}", "allgather", "none"),
)


def tasks(context: Context) -> list[str]:
    """A GPU trains the network that the CPU cannot."""
    return ["cifar-resnet18"] if context.device == "cuda" and not context.quick else available(context)


def check(context: Context) -> None:
    for task in tasks(context):
        load(context, task)


def arm(context: Context, task: str, method: Method, seed: int) -> Arm:
    return Arm(
        task=task,
        rule=method.rule,
        epochs=context.epochs or (3 if context.quick else EPOCHS),
        seed=seed,
        workers=WORKERS,
        scope="global",
        feedback=method.feedback,
        exchange=method.exchange,
        batch_size=_BATCH[task],
    )


def stages(context: Context) -> Iterator[Sequence[Arm]]:
    yield [
        arm(context, task, method, seed)
        for task in tasks(context)
        for method in METHODS
        for seed in range(context.seeds)
    ]


def figure1(context: Context) -> Outcome:
    (arms,) = stages(context)
    runs = trained(context, arms)
    lines = {
        (task, method.name): [runs[arm(context, task, method, seed)] for seed in range(context.seeds)]
        for task in tasks(context)
        for method in METHODS
    }
    named = " and ".join(tasks(context))
    note = f"{named}; {WORKERS} workers, k = {DENSITY} d over the whole gradient, {arms[0].epochs} epochs"
    data = "; ".join(lines[task, METHODS[0].name][0].about.description for task in tasks(context))
    return Outcome(draw(lines, note), compare(lines).rows, _results(lines), data)


Lines = dict[tuple[str, str], list[Run]]


def final(runs: Sequence[Run]) -> float:
    """The test accuracy at the end, mean over seeds."""
    return float(np.mean([run.epochs[-1].accuracy for run in runs]))


def loss(run: Run) -> list[float]:
    """The training loss at the end of each epoch: the mean over the steps that were recorded in it."""
    by_epoch: dict[int, list[float]] = {}
    for step in run.steps:
        by_epoch.setdefault(int(np.ceil(step.epoch - 1e-9)), []).append(step.loss)
    return [float(np.mean(by_epoch[epoch.epoch])) for epoch in run.epochs]


def compare(lines: Lines) -> Comparison:
    rows = Comparison("shi2019/fig1")
    rows.against("workers", WORKERS)
    rows.against("density", DENSITY)
    dense, *others = (method.name for method in METHODS)
    for task in dict.fromkeys(task for task, _ in lines):
        rows.alone(f"{task}: test accuracy of {dense} at the end", final(lines[task, dense]))
        for name in others:
            rows.alone(
                f"{task}: test accuracy of {name} at the end", final(lines[task, name]), _sent(lines[task, name])
            )
            rows.alone(
                f"{task}: accuracy of {name} over that of {dense}",
                final(lines[task, name]) / final(lines[task, dense]),
                "the paper: close to it" if name.startswith("TopK") else "the paper: far behind",
            )
    return rows


def _sent(runs: Sequence[Run]) -> str:
    density = np.mean([run.epochs[-1].density for run in runs])
    return f"sent {100 * density:.3g}% of the coordinates a step"


def _results(lines: Lines) -> list[dict[str, float | int | str]]:
    return [
        {
            "task": task,
            "method": name,
            "seed": run.about.seed,
            "epoch": epoch.epoch,
            "train_loss": mean,
            "test_loss": epoch.test_loss,
            "accuracy": epoch.accuracy,
            "megabytes": epoch.bytes / 1e6,
        }
        for (task, name), runs in lines.items()
        for run in runs
        for epoch, mean in zip(run.epochs, loss(run), strict=True)
    ]


def draw(lines: Lines, note: str) -> Figure:
    tasks = list(dict.fromkeys(task for task, _ in lines))
    colours = dict(zip((method.name for method in METHODS), (plots.BASELINE, *plots.COLOURS), strict=False))
    with plots.style():
        figure, axes = plots.panels(2 * len(tasks), note, columns=2)
        for (task, name), runs in lines.items():
            of_loss, of_accuracy = axes[2 * tasks.index(task) :][:2]
            epochs = [epoch.epoch for epoch in runs[0].epochs]
            dash = "--" if name == METHODS[0].name else "-"
            losses_PS = np.array([loss(run) for run in runs]).T
            accuracy_PS = np.array([[100 * epoch.accuracy for epoch in run.epochs] for run in runs]).T
            plots.logarithmic(of_loss)
            plots.curve(of_loss, epochs, losses_PS, name, colours[name], dash=dash)
            plots.curve(of_accuracy, epochs, accuracy_PS, name, colours[name], dash=dash)
            of_loss.set(title=f"{task}: loss", xlabel="epoch", ylabel="training loss")
            of_accuracy.set(title=f"{task}: accuracy", xlabel="epoch", ylabel="test accuracy, %")
        return plots.finish(figure, axes)
