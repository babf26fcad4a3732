"""One rule on one task: W workers, an optimizer outside the exchange, a row for what each step cost.

A launcher is where the workers live: ``virtual`` holds them in this process. It yields rows and writes nothing,
so that runs look the same to the report wherever they ran.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import gradsieve as gs
from gradsieve.lab.errors import LabError
from gradsieve.lab.records import EndRow, EpochRow, RunRow, StepRow
from gradsieve.lab.tasks import Recipe, Task
from gradsieve.lab.tasks.base import Batch, Classification, Gradients, Movable, on_device
from gradsieve.lab.tasks.flat import shaped
from gradsieve.types import Rule

ROWS_PER_EPOCH = 25
"""At most so many step rows an epoch; a curve needs no more and a long run stays readable."""

FEEDBACKS = {"momentum-unmasked": gs.Momentum(nesterov=True, masking=False)}
"""Beside those of the core: Algorithm 3 of Sahu et al. 2021, where a worker's momentum outlives what it sent."""


@dataclass(frozen=True)
class Options:
    """How to run; ``batch_size`` (a worker's), ``lr`` and ``momentum`` default to the task's recipe.

    ``strict`` compares rules at exact sizes, whatever the plan of the next step's size would add. ``device`` is where
    the virtual workers live; ``compiled`` has their network compiled before, which takes half a minute or more.
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
    device: str = "cpu"
    compiled: bool = False
    momentum: float | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "epochs", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise LabError(f"{name} takes a whole number of at least 1, not {value}")
        if self.lr is not None and not (math.isfinite(self.lr) and self.lr > 0):
            raise LabError(f"lr takes a number above 0, not {self.lr}")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise LabError(f"momentum takes a number of at least 0 and below 1, not {self.momentum}")
        check_compiled(self.compiled, self.device)

    def recipe(self, task: Task) -> Recipe:
        """The task's recipe with what the user chose in its place."""
        recipe = task.recipe.fitted(self.epochs)
        # Workers that apply momentum before the exchange: once more outside would square it.
        momentum = 0.0 if self.feedback.startswith("momentum") else self.momentum
        if momentum is not None:
            recipe = replace(recipe, momentum=momentum, nesterov=recipe.nesterov and momentum > 0)
        return replace(recipe, lr=self.lr or recipe.lr, batch_size=self.batch_size or recipe.batch_size)


def check_compiled(compiled: bool, device: str) -> None:
    """On a CPU a compiler's half minute does not come back."""
    if compiled and device == "cpu":
        raise LabError("networks are compiled for a GPU only: leave out --compile, or give --device cuda")


Launcher = Callable[[Task, Rule, Options, str], Iterator[StepRow | EpochRow | EndRow]]


def run(
    task: Task, rule: Rule, options: Options, launcher: Launcher, *, name: str, title: str = "", note: str = ""
) -> Iterator[RunRow | StepRow | EpochRow | EndRow]:
    """All rows of one run: what it is, then what the launcher reports."""
    if launcher.__name__ == "processes" and not isinstance(task, Classification):
        # Ranks take the loss of labels themselves, and know no other.
        raise LabError(f"{task.name} trains on virtual workers only: leave out --launch processes")
    task, recipe = on_device(task, options.device), options.recipe(task)
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
        device=options.device,
        compiled=options.compiled,
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
    device_seconds: dict[str, float] = field(default_factory=dict)  # by part of a step, where a GPU's clock tells
    optimizer: torch.optim.Optimizer | None = None  # where all workers share one


def train(
    task: Task, rule: Rule, options: Options, begin: Callable[[Training], None] = lambda training: None
) -> Iterator[Training]:
    """Trains W virtual workers, and hands over after each step.

    ``begin`` may put a state of an epoch's end into the fresh training: its ``step`` says where to go on.

    A GPU gets the next step's gradients to compute before the last step's figures are waited for, so that it is
    never idle; at the end of an epoch there is no next step, and the model is as the last one left it.
    """
    task = on_device(task, options.device)
    recipe = options.recipe(task)
    steps_per_epoch = task.steps_per_epoch(options.workers, recipe.batch_size)
    model = task.model(options.seed)
    gradient_n = attach_flat_gradient(model)
    optimizer = optimizer_of(model, recipe)
    workers = simulator(model, rule, options)
    training = Training(model, workers, 0, 0.0, recipe.lr, math.nan, 0.0)
    training.optimizer = optimizer
    begin(training)
    gradients: Gradients | None = None
    for epoch in range(training.step // steps_per_epoch, options.epochs):
        batches = task.batches(epoch, workers=options.workers, batch_size=recipe.batch_size, seed=options.seed)
        issued: _Issued | None = None
        for batch in batches:
            gradients = gradients or _gradients(task, model, batch, options.compiled)
            watch = Watch(gradient_n.device)
            losses_W, grads_Wn = gradients(batch)
            watch.lap("gradients")
            if issued is not None:
                yield issued.done(training)
            training.lr = recipe.lr_at(training.step / (steps_per_epoch * options.epochs))
            gradient_n.copy_(workers.step(grads_Wn, lr=training.lr))
            watch.lap("exchange")
            for group in optimizer.param_groups:
                group["lr"] = training.lr
            optimizer.step()
            training.step += 1
            training.epoch = training.step / steps_per_epoch
            issued = _Issued(workers, losses_W, watch)
            if not gradient_n.is_cuda:
                yield issued.done(training)
                issued = None
        if issued is not None:
            yield issued.done(training)


def _gradients(task: Task, model: nn.Module, batch: Batch, compiled: bool) -> Gradients:
    if isinstance(task, Movable):
        return task.gradients(model, batch, compiled=compiled)
    return lambda batch: task.batch_gradients(model, batch)


class Watch:
    """Seconds by part of a step: by the host's clock on a CPU, by its own on a GPU, which is not waited for."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._names: list[str] = []
        self._marks = [self._mark()]

    def lap(self, name: str) -> None:
        """What was issued since the last lap is ``name``."""
        self._names.append(name)
        self._marks.append(self._mark())

    def seconds(self) -> dict[str, float]:
        """By name; waits for the last lap to be over."""
        if self._on_gpu:
            self._marks[-1].synchronize()
        pairs = pairwise(self._marks)
        spent = [a.elapsed_time(b) / 1e3 if self._on_gpu else b - a for a, b in pairs]
        return dict(zip(self._names, spent, strict=True))

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class _Issued:
    """A step that a GPU may still be busy with."""

    def __init__(self, workers: gs.Simulator, losses_W: Tensor, watch: Watch):
        self._workers, self._watch = workers, watch
        self._loss = losses_W.mean().to("cpu", non_blocking=True)
        watch.lap("update")

    def done(self, training: Training) -> Training:
        """Wait for the step, and enter its figures."""
        spent = self._watch.seconds()
        self._workers.channel.catch_up()
        training.loss = self._loss.item()
        training.gradient_seconds += spent.pop("gradients")
        if self._workers.device.type == "cuda":  # the meter's clock is the host's
            for name, seconds in spent.items():
                training.device_seconds[name] = training.device_seconds.get(name, 0.0) + seconds
        return training


def virtual(task: Task, rule: Rule, options: Options, name: str) -> Iterator[StepRow | EpochRow | EndRow]:
    """The launcher that holds all workers in this process."""
    task = on_device(task, options.device)
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
    phases = {"gradients": training.gradient_seconds, **(training.device_seconds or stats.total.seconds)}
    yield EndRow(run=name, seconds=time.perf_counter() - started, phases=phases)


def optimizer_of(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The optimizer outside the exchange, as the recipe wants it."""
    norms = [] if recipe.decay_norms else [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    spared = {parameter for norm in norms for parameter in norm.parameters()}
    groups: dict[float, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(0.0 if parameter in spared else recipe.weight_decay, []).append(parameter)
    decayed = [{"params": parameters, "weight_decay": decay} for decay, parameters in groups.items()]
    fused = True if next(model.parameters()).is_cuda else None
    if recipe.betas is not None:
        return torch.optim.Adam(decayed, lr=recipe.lr, betas=recipe.betas, fused=fused)
    return torch.optim.SGD(decayed, lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov, fused=fused)


def simulator(model: nn.Module, rule: Rule, options: Options) -> gs.Simulator:
    """The exchange of a run; a pairing that the core refuses is the user's to mend."""
    try:
        return gs.Simulator(
            model,
            rule,
            workers=options.workers,
            scope=options.scope,
            feedback=FEEDBACKS.get(options.feedback, options.feedback),
            exchange=options.exchange,
            values=options.values,
            strict=options.strict,
            device=options.device,
        )
    except ValueError as error:
        raise LabError(str(error)) from error


def attach_flat_gradient(model: nn.Module) -> Tensor:
    """A flat vector of which every parameter's ``grad`` is a view: one copy hands the optimizer its gradient."""
    parameters = list(model.parameters())
    flat_n = parameters[0].new_zeros(sum(parameter.numel() for parameter in parameters), requires_grad=False)
    for parameter, view in zip(parameters, shaped(flat_n, parameters), strict=True):
        parameter.grad = view
    return flat_n
