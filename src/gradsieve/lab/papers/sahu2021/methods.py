"""What the deep-learning figures share: one method's trainings over all seeds, and what is told of them."""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gradsieve.lab.papers.arm import Arm
from gradsieve.lab.papers.entry import Context
from gradsieve.lab.papers.summary import Comparison
from gradsieve.lab.papers.trainings import deferred, trained
from gradsieve.lab.records import Run
from gradsieve.lab.tasks import Recipe

LEAST = 1e-7
"""A density that top-k can be asked for, where a threshold sent nothing at all."""

Result = dict[str, float | int | str]
Stages = Iterator[Sequence[Arm]]


@dataclass(frozen=True)
class Method:
    """What one method's trainings came to. Accuracies and densities are in percent, as the paper prints them."""

    runs: tuple[Run, ...]

    @property
    def accuracies(self) -> list[float]:
        return [100 * epoch.accuracy for run in self.runs if (epoch := run.last)]

    @property
    def accuracy(self) -> float:
        return statistics.fmean(self.accuracies)

    @property
    def deviation(self) -> float:
        """The standard deviation over seeds; 0 of a single one."""
        return statistics.stdev(self.accuracies) if len(self.runs) > 1 else 0.0

    @property
    def density(self) -> float:
        """The average over all steps and seeds of what was sent."""
        return statistics.fmean(100 * epoch.density for run in self.runs if (epoch := run.last))

    @property
    def bytes(self) -> float:
        return statistics.fmean(epoch.bytes for run in self.runs if (epoch := run.last))

    @property
    def error(self) -> float:
        """The total error: the sum over steps of the memory's squared norm."""
        return statistics.fmean(epoch.error for run in self.runs if (epoch := run.last))

    @property
    def deferred(self) -> float:
        return statistics.fmean(map(deferred, self.runs))

    @property
    def label(self) -> str:
        """How many there are.

        >>> Method(()).label
        'no seeds'
        """
        count = len(self.runs)
        return "one seed" if count == 1 else f"{count or 'no'} seeds"

    def by_step(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """A figure of the step rows: iterations ``[P]`` and values ``[P, S]``, a column a seed."""
        values_PS = np.array([[getattr(step, name) for step in run.steps] for run in self.runs]).T
        return np.array([step.step for step in self.runs[0].steps]), values_PS

    def by_epoch(self) -> tuple[np.ndarray, np.ndarray]:
        """Iterations ``[P]`` and test accuracies ``[P, S]``, after each epoch."""
        values_PS = np.array([[100 * epoch.accuracy for epoch in run.epochs] for run in self.runs]).T
        return np.array([epoch.step for epoch in self.runs[0].epochs]), values_PS


def make_all(context: Context, stages: Iterable[Sequence[Arm]]) -> None:
    """Has all trainings of a figure in the store."""
    for stage in stages:
        trained(context, stage)


def topk_at(percent: float) -> str:
    """Top-k at an average density that a rule came to, to three digits.

    >>> topk_at(0.08912)
    'topk:0.000891'
    """
    return f"topk:{min(max(percent / 100, LEAST), 1.0):.3g}"


def exchange_of(rule: str) -> tuple[str, bool]:
    """How a rule's trainings exchange, and whether sizes are exact. Sparse ones are gathered at every step, as in the
    paper; a threshold's planned sizes would make the bursts wait that are its whole point."""
    return ("auto" if rule == "dense" else "allgather"), rule.startswith("threshold")


def ratio(one: float, other: float) -> float:
    """How many times the other it is; a diverged or idle training must not end the whole figure."""
    return one / other if other else math.inf


def waited(rows: Comparison, methods: Iterable[Method]) -> None:
    rows.alone(
        "largest share of a method's chosen elements that found no slot and went a step later",
        max(method.deferred for method in methods),
        "none of a threshold's, whose sizes are exact here",
    )


def shortened(epochs: int, paper: int, recipe: Recipe) -> str:
    """How a training differs from the paper's longer one.

    >>> shortened(30, 300, Recipe(lr=1.6, batch_size=256, warmup_epochs=5, decay_at=(0.5, 0.8)))
    '30 of 300 epochs, the rate falls in proportion and grows for 5 epochs as there'
    """
    warmup = recipe.fitted(epochs).warmup * epochs
    grows = f" and grows for {warmup:.2g} epochs{' as there' if warmup == recipe.warmup_epochs else ''}"
    return f"{epochs} of {paper} epochs, the rate falls in proportion{grows if recipe.warmup_epochs else ''}"


def data_of(method: Method) -> str:
    return method.runs[0].about.description


def epoch_results(methods: Mapping[str, Method]) -> list[Result]:
    """A row for each epoch of each training; figures are of the training so far."""
    return [
        {
            "method": name,
            "rule": run.about.rule,
            "seed": run.about.seed,
            "epoch": epoch.epoch,
            "accuracy": epoch.accuracy,
            "density": epoch.density,
            "bytes": epoch.bytes,
            "total_error": epoch.error,
            "deferred": epoch.deferred,
        }
        for name, method in methods.items()
        for run in method.runs
        for epoch in run.epochs
    ]


def step_results(methods: Mapping[str, Method]) -> list[Result]:
    """A row for each recorded step of each training, with the test accuracy where an epoch ends."""
    results: list[Result] = []
    for name, method in methods.items():
        for run in method.runs:
            accuracy = {epoch.step: epoch.accuracy for epoch in run.epochs}
            results += [
                {
                    "method": name,
                    "rule": run.about.rule,
                    "seed": run.about.seed,
                    "step": step.step,
                    "loss": step.loss,
                    "density": step.density,
                    "error": step.error,
                    "accuracy": accuracy.get(step.step, ""),
                }
                for step in run.steps
            ]
    return results
