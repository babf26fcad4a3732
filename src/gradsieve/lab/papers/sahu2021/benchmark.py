"""What the figures beside CIFAR-10's share: a benchmark of the paper (its Tables 3 and 4), and how it is judged."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from gradsieve.lab.papers.arm import Arm
from gradsieve.lab.papers.entry import Context, Entry, Outcome
from gradsieve.lab.papers.sahu2021.methods import Method, Stages, exchange_of, shortened, topk_at
from gradsieve.lab.papers.trainings import load, trained
from gradsieve.lab.records import EpochRow

QUICK_EPOCHS = 2
SEEDS = 3
_NOT_THEIRS = "not the paper's data"


class View(Protocol):
    """What a figure makes of a benchmark."""

    @property
    def key(self) -> str: ...

    def stages(self, context: Context) -> Stages: ...

    def __call__(self, context: Context) -> Outcome: ...


Judge = Callable[[Sequence[EpochRow]], list[float]]
"""How good a training was after each of its epochs."""


def perplexity(epochs: Sequence[EpochRow]) -> list[float]:
    """exp of the test loss; a loss that has left all bounds is infinite and no error."""
    return [math.exp(epoch.test_loss) if epoch.test_loss < 700 else math.inf for epoch in epochs]


def best_hit_rate(epochs: Sequence[EpochRow]) -> list[float]:
    """The best Hit-Rate@10 so far, in percent: what the authors' code keeps, and Figure 6a shows."""
    return np.maximum.accumulate([100 * epoch.accuracy for epoch in epochs]).tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Judged(Method):
    """One method's trainings, judged by another figure than the last accuracy."""

    judge: Judge = field(default=perplexity)

    @property
    def accuracies(self) -> list[float]:
        return [self.judge(run.epochs)[-1] for run in self.runs]

    def by_epoch(self) -> tuple[np.ndarray, np.ndarray]:
        values_PS = np.array([self.judge(run.epochs) for run in self.runs]).T
        return np.array([epoch.step for epoch in self.runs[0].epochs]), values_PS

    @property
    def best(self) -> float:
        """The mean over seeds of the lowest value of a training."""
        return float(np.mean([min(self.judge(run.epochs)) for run in self.runs]))


@dataclass(frozen=True)
class Benchmark:
    """A task, the thresholds that the paper prints, and how a training is judged.

    ``batch`` is the size of a worker's batch that the thresholds are for, where a gradient's elements are as small as
    the batch is large: an element of an embedding is the mean over a batch that mostly does not touch it.
    """

    task: str
    small: str
    epochs: int
    thresholds: tuple[float, ...]
    judge: Judge
    measure: str
    unit: str
    lower_is_better: bool
    batch: int | None = None

    def entry(self, view: View, title: str, needs: str) -> Entry:
        return Entry(
            view.key,
            title,
            needs,
            view,
            check=self.check,
            seeds=SEEDS,
            epochs=self.epochs,
            devices=("cpu", "cuda"),
            stages=view.stages,
        )

    def name(self, context: Context) -> str:
        return self.small if context.quick else self.task

    def check(self, context: Context) -> None:
        load(context, self.name(context))

    def epochs_of(self, context: Context) -> int:
        return context.epochs or (QUICK_EPOCHS if context.quick else self.epochs)

    def arms(self, context: Context, rule: str) -> list[Arm]:
        """One training a seed."""
        exchange, strict = exchange_of(rule)
        task, epochs = self.name(context), self.epochs_of(context)
        return [Arm(task, rule, epochs, seed=seed, exchange=exchange, strict=strict) for seed in range(context.seeds)]

    def threshold(self, context: Context, printed: float) -> str:
        """The rule of a printed threshold, for the batches that are trained on here."""
        batch = load(context, self.name(context)).recipe.batch_size
        return f"threshold:{printed * (self.batch / batch if self.batch else 1):.4g}"

    def made(self, context: Context, rule: str) -> Judged:
        """A method's trainings, from the store where they are there."""
        return Judged(tuple(trained(context, self.arms(context, rule)).values()), self.judge)

    def equal_topk(self, context: Context, rule: str) -> str:
        """Top-k at the average density that a rule came to over its own trainings, to three digits."""
        return topk_at(self.made(context, rule).density)

    def ahead(self, one: float, other: float) -> float:
        """By how much one is better than the other."""
        return other - one if self.lower_is_better else one - other

    def why(self, context: Context, method: Judged) -> str:
        """Why a figure may not be the paper's."""
        epochs, reasons = self.epochs_of(context), [_NOT_THEIRS] if self.notes(method) else []
        if epochs != self.epochs:
            reasons.append(shortened(epochs, self.epochs, load(context, self.name(context)).recipe))
        return "; ".join(reasons)

    def notes(self, method: Judged) -> list[str]:
        """What every output must say of the data."""
        described = method.runs[0].about.description
        return [f"{_NOT_THEIRS}: {described}"] if "in place of" in described else []

    def note(self, context: Context, method: Judged) -> str:
        """What was run, for under a figure."""
        about = method.runs[0].about
        return (
            f"{about.description}\n{about.workers} workers x {about.batch_size}, {about.epochs} epochs "
            f"(paper: {self.epochs}), {method.label}{', a quick run' if context.quick else ''}"
        )
