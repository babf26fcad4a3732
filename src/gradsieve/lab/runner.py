"""One rule on one task: W workers, an optimizer outside the exchange, a row for what each step cost.

A launcher is where the workers live: ``virtual`` holds them in this process. It yields rows and writes nothing,
so that runs look the same to the report wherever they ran.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

import gradsieve as gs
from gradsieve.lab.errors import LabError
from gradsieve.lab.records import EndRow, EpochRow, RunRow, StepRow
from gradsieve.lab.tasks import Recipe, Task
from gradsieve.types import Rule

ROWS_PER_EPOCH = 25
"""At most so many step rows an epoch; a curve needs no more and a long run stays readable."""


@dataclass(frozen=True)
class Options:
    """How to run; ``batch_size`` (a worker's) and ``lr`` default to the task's recipe.

    ``strict`` compares rules at exact sizes, whatever the plan of the next step's size would add.
    """

    workers: int = 4
    epochs: int = 20
    seed: int = 0
    batch_size: int | None = None
    lr: float | None = None
    scope: str = "layer"
    feedback: str = "gradient"
    exchange: str = "auto"
    values: str = "float32"
    strict: bool = True

    def __post_init__(self) -> None:
        for name in ("workers", "epochs", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LabError(f"{name} takes a whole number of at least 1, not {value}")
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr > 0):
            raise LabError(f"lr takes a number above 0, not {self.lr}")

    def recipe(self, task: Task) -> Recipe:
        """The task's recipe with what the user chose in its place."""
        recipe = task.recipe
        if self.feedback == "momentum":
            # The workers apply momentum before the exchange; once more outside would square it.
            recipe = replace(recipe, momentum=0.0, nesterov=False)
        return replace(recipe, lr=self.lr or recipe.lr, batch_size=self.batch_size or recipe.batch_size)


Launcher = Callable[[Task, Rule, Options, str], Iterator[StepRow | EpochRow | EndRow]]


def run(
    task: Task, rule: Rule, options: Options, launcher: Launcher, *, name: str, title: str = "", note: str = ""
) -> Iterator[RunRow | StepRow | EpochRow | EndRow]:
    """All rows of one run: what it is, then what the launcher reports."""
    recipe = options.recipe(task)
    yield RunRow(
        run=name,
        title=title,
        task=task.name,
        description=task.description,
        rule=str(rule),
        note=note,
        workers=options.workers,
        epochs=options.epochs,
        seed=options.seed,
        batch_size=recipe.batch_size,
        lr=recipe.lr,
        scope=options.scope,
        feedback=options.feedback,
        exchange=options.exchange,
        values=options.values,
        strict=options.strict,
        launch=launcher.__name__,
        parameters=sum(parameter.numel() for parameter in task.model(options.seed).parameters()),
    )
    yield from launcher(task, rule, options, name)


class Metered(Protocol):
    """What exchanges the gradients and knows what that cost: a simulator, or the handle of a DDP hook."""

    def stats(self) -> gs.Stats: ...


@dataclass
class Training:
    """Where a training stands after a step."""

    model: nn.Module
    sieve: Metered
    step: int
    epoch: float
    lr: float
    loss: float
    gradient_seconds: float


def train(task: Task, rule: Rule, options: Options) -> Iterator[Training]:
    """Trains W virtual workers, and hands over after each step."""
    recipe = options.recipe(task)
    steps_per_epoch = task.steps_per_epoch(options.workers, recipe.batch_size)
    model = task.model(options.seed)
    gradient_n = attach_flat_gradient(model)
    optimizer = optimizer_of(model, recipe)
    workers = simulator(model, rule, options)
    training = Training(model, workers, 0, 0.0, recipe.lr, math.nan, 0.0)
    for epoch in range(options.epochs):
        batches = task.batches(epoch, workers=options.workers, batch_size=recipe.batch_size, seed=options.seed)
        for batch in batches:
            training.lr = recipe.lr_at(training.step / (steps_per_epoch * options.epochs))
            started = time.perf_counter()
            losses_W, grads_Wn = task.batch_gradients(model, batch)
            training.gradient_seconds += time.perf_counter() - started
            gradient_n.copy_(workers.step(grads_Wn, lr=training.lr))
            for group in optimizer.param_groups:
                group["lr"] = training.lr
            optimizer.step()
            training.step += 1
            training.epoch = training.step / steps_per_epoch
            training.loss = losses_W.mean().item()
            yield training


def virtual(task: Task, rule: Rule, options: Options, name: str) -> Iterator[StepRow | EpochRow | EndRow]:
    """The launcher that holds all workers in this process."""
    yield from rows(task, options, name, train(task, rule, options))


def rows(
    task: Task, options: Options, name: str, trainings: Iterator[Training]
) -> Iterator[StepRow | EpochRow | EndRow]:
    """What a training has to tell, wherever it runs: some rows an epoch, an evaluation after each, and its end."""
    steps_per_epoch = task.steps_per_epoch(options.workers, options.recipe(task).batch_size)
    stride = math.ceil(steps_per_epoch / ROWS_PER_EPOCH)
    started = time.perf_counter()
    for training in trainings:
        stats = training.sieve.stats()
        ends_epoch = training.step % steps_per_epoch == 0
        if ends_epoch or training.step % stride == 0:
            yield StepRow(
                run=name,
                step=training.step,
                epoch=training.epoch,
                lr=training.lr,
                loss=training.loss,
                density=stats.last.density,
                bytes=stats.last.bytes,
                error=stats.last.error,
            )
        if ends_epoch:
            evaluation = task.evaluate(training.model)
            yield EpochRow(
                run=name,
                epoch=training.step // steps_per_epoch,
                step=training.step,
                accuracy=evaluation.accuracy,
                test_loss=evaluation.loss,
                density=stats.total.density,
                bytes=stats.total.bytes,
                dense_bytes=stats.total.dense_bytes,
                deferred=stats.total.deferred,
                error=stats.total.error,
                seconds=time.perf_counter() - started,
            )
    phases = {"gradients": training.gradient_seconds, **stats.total.seconds}
    yield EndRow(run=name, seconds=time.perf_counter() - started, phases=phases)


def optimizer_of(model: nn.Module, recipe: Recipe) -> torch.optim.SGD:
    """The optimizer outside the exchange, as the recipe wants it."""
    return torch.optim.SGD(
        model.parameters(),
        lr=recipe.lr,
        momentum=recipe.momentum,
        nesterov=recipe.nesterov,
        weight_decay=recipe.weight_decay,
    )


def simulator(model: nn.Module, rule: Rule, options: Options) -> gs.Simulator:
    """The exchange of a run; a pairing that the core refuses is the user's to mend."""
    try:
        return gs.Simulator(
            model,
            rule,
            workers=options.workers,
            scope=options.scope,
            feedback=options.feedback,
            exchange=options.exchange,
            values=options.values,
            strict=options.strict,
        )
    except ValueError as error:
        raise LabError(str(error)) from error


def attach_flat_gradient(model: nn.Module) -> Tensor:
    """A flat vector of which every parameter's ``grad`` is a view: one copy hands the optimizer its gradient."""
    parameters = list(model.parameters())
    flat_n = torch.zeros(sum(parameter.numel() for parameter in parameters))
    start = 0
    for parameter in parameters:
        parameter.grad = flat_n[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return flat_n
