"""What a task is: a model, data in memory, defaults for training, and gradients of W workers at once.

Shape suffixes: W workers in all, B examples in a worker's batch, n coordinates of the flat gradient.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional

from gradsieve.lab.errors import LabError
from gradsieve.lab.tasks.flat import shaped
from gradsieve.lab.tasks.replay import Replay
from gradsieve.ops.ahead import sent_ahead

_EVALUATION_BATCH = 1000
_VECTORISED_LAYERS = (nn.Linear, nn.LayerNorm, nn.Embedding)


class Batch(NamedTuple):
    """One step's examples for all workers: ``inputs_WB`` is [W, B, ...], ``labels_WB`` is [W, B], or [W, B, T] where
    an example has T of them."""

    inputs_WB: Tensor
    labels_WB: Tensor


class Evaluation(NamedTuple):
    """How good a model is on the test set; ``accuracy`` is a fraction."""

    loss: float
    accuracy: float


@dataclass(frozen=True)
class Recipe:
    """How a task is trained unless the user says otherwise.

    The schedule is in fractions of the run, so that fewer epochs compress it: the rate grows linearly from
    ``start * lr`` to ``lr`` over ``warmup``, and is divided by 10 at each point of ``decay_at``. ``smoothing`` is
    that of the labels, in training alone. ``decay_norms=False`` leaves batch norms out of the weight decay. Large
    rates need a warm-up of some ``warmup_epochs`` however short the run is: see ``fitted``. The optimizer is SGD; with
    ``betas`` it is Adam with these.
    """

    lr: float
    batch_size: int
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    decay_norms: bool = True
    smoothing: float = 0.0
    warmup: float = 0.0
    warmup_epochs: float = 0.0
    start: float = 0.1
    decay_at: tuple[float, ...] = ()
    betas: tuple[float, float] | None = None

    def fitted(self, epochs: int) -> "Recipe":
        """The recipe of a run of so many epochs: its warm-up lasts ``warmup_epochs``, or until the rate first falls.

        >>> Recipe(lr=1.6, batch_size=256, warmup_epochs=5, decay_at=(0.5, 0.8)).fitted(8).warmup
        0.5
        """
        longest = min(self.decay_at, default=1.0)
        return replace(self, warmup=max(self.warmup, min(self.warmup_epochs / epochs, longest)))

    def lr_at(self, progress: float) -> float:
        """The learning rate after the fraction ``progress`` of the run.

        >>> Recipe(lr=0.1, batch_size=32, warmup=0.1, decay_at=(0.5,)).lr_at(0.2)
        0.1
        """
        if progress < self.warmup:
            return self.lr * (self.start + (1 - self.start) * progress / self.warmup)
        return self.lr / 10.0 ** sum(progress >= point for point in self.decay_at)


class Task(Protocol):
    """What the runner needs to know of a task."""

    @property
    def name(self) -> str: ...

    @property
    def description(self) -> str:
        """The data and the model in one line, for the report."""

    @property
    def recipe(self) -> Recipe: ...

    def model(self, seed: int) -> nn.Module:
        """A fresh model whose initial weights depend on ``seed`` alone."""

    def steps_per_epoch(self, workers: int, batch_size: int) -> int: ...

    def batches(self, epoch: int, *, workers: int, batch_size: int, seed: int) -> Iterator[Batch]:
        """One epoch, shuffled by (seed, epoch) and dealt to the workers; the incomplete last step is dropped."""

    def batch_gradients(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Each worker's mean loss [W] and its flat gradient [W, n], float32, in the order of ``parameters()``."""

    def evaluate(self, model: nn.Module) -> Evaluation: ...


Gradients = Callable[[Batch], tuple[Tensor, Tensor]]
"""What ``Task.batch_gradients`` is for one model."""


@runtime_checkable
class Movable(Task, Protocol):
    """A task that also trains on a GPU."""

    def to(self, device: torch.device) -> "Movable":
        """This task with its data, and the models that it makes, on ``device``."""

    def gradients(self, model: nn.Module, batch: Batch, *, compiled: bool = False) -> Gradients:
        """The fastest form of ``batch_gradients`` for ``model`` and batches of this shape; on a GPU the model may be
        compiled first. Results may be overwritten by the next call."""


def on_device(task: Task, device: str) -> Task:
    """The task on a device; what cannot be there is the user's to mend."""
    if device == "cpu":
        return task
    if not torch.cuda.is_available():
        raise LabError(f"device {device}: PyTorch finds no GPU here")
    if not isinstance(task, Movable):
        raise LabError(f"{task.name} trains on the CPU only")
    return task.to(torch.device(device))


@dataclass(frozen=True)
class Classification:
    """A task with labelled examples in memory and a cross-entropy loss.

    With ``bfloat16`` a GPU computes in it, images channels last; parameters, gradients and losses stay float32, and on
    a CPU everything does.
    """

    name: str
    description: str
    recipe: Recipe
    build: Callable[[], nn.Module]
    train_inputs: Tensor
    train_labels: Tensor
    test_inputs: Tensor
    test_labels: Tensor
    prepare: Callable[[Tensor], Tensor] = lambda inputs: inputs
    augment: Callable[[Tensor, torch.Generator], Tensor] = lambda inputs, generator: inputs
    bfloat16: bool = False

    @property
    def device(self) -> torch.device:
        return self.train_inputs.device

    @property
    def narrow(self) -> bool:
        """Whether models compute in bfloat16 where the task is now."""
        return self.bfloat16 and self.device.type == "cuda"

    def to(self, device: torch.device) -> Self:
        if device.type == self.device.type:
            return self
        data = ("train_inputs", "train_labels", "test_inputs", "test_labels")
        where = f"{'bfloat16 ' if self.bfloat16 else ''}on {torch.cuda.get_device_name(device)}"
        moved = {name: getattr(self, name).to(device) for name in data}
        return replace(self, description=f"{self.description}, {where}", **moved)

    def model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build()
        layout = torch.channels_last if self.narrow else torch.preserve_format
        return model.to(self.device, memory_format=layout)  # type: ignore[call-overload, no-any-return]

    def steps_per_epoch(self, workers: int, batch_size: int) -> int:
        steps = len(self.train_labels) // (workers * batch_size)
        if steps == 0:
            raise LabError(
                f"{workers} workers x {batch_size} examples a step exceed the {len(self.train_labels)} "
                f"training examples of {self.name}; use fewer workers or a smaller --batch-size"
            )
        return steps

    def batches(self, epoch: int, *, workers: int, batch_size: int, seed: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
        order = sent_ahead(torch.randperm(len(self.train_labels), generator=generator), self.device)
        steps = self.steps_per_epoch(workers, batch_size)
        for chosen in order[: steps * workers * batch_size].view(steps, workers * batch_size):
            inputs = self.augment(self.prepare(self.train_inputs[chosen]), generator)
            yield Batch(
                inputs.view(workers, batch_size, *inputs.shape[1:]),
                self.train_labels[chosen].view(workers, batch_size),
            )

    def batch_gradients(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        if vectorisable(model):
            return _gradients_at_once(model, batch, self.recipe.smoothing)
        with self._precision():
            return _gradients_one_by_one(model, batch, self.recipe.smoothing)

    def gradients(self, model: nn.Module, batch: Batch, *, compiled: bool = False) -> Gradients:
        if self.device.type == "cpu" or vectorisable(model):
            return lambda batch: self.batch_gradients(model, batch)
        return Replay(model, batch, smoothing=self.recipe.smoothing, narrow=self.narrow, compiled=compiled)

    @torch.inference_mode()
    def evaluate(self, model: nn.Module) -> Evaluation:
        was_training = model.training
        model.eval()
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        with self._precision():
            for start in range(0, len(self.test_labels), _EVALUATION_BATCH):
                labels = self.test_labels[start : start + _EVALUATION_BATCH]
                logits = model(self.prepare(self.test_inputs[start : start + _EVALUATION_BATCH]))
                loss += functional.cross_entropy(logits, labels, reduction="sum")
                correct += (logits.argmax(1) == labels).sum()
        model.train(was_training)
        return Evaluation(loss.item() / len(self.test_labels), correct.item() / len(self.test_labels))

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast("cuda", torch.bfloat16) if self.narrow else nullcontext()


def vectorisable(model: nn.Module) -> bool:
    """Whether all workers' gradients may be taken in one ``vmap``, and whether that pays.

    Convolutions are out because the vectorised form is a grouped convolution, which is slower on a CPU than a
    loop; batch norm, dropout and recurrent layers because ``vmap`` refuses them or changes what they mean.
    """
    return all(
        isinstance(module, _VECTORISED_LAYERS)
        for module in model.modules()
        if isinstance(module, nn.Dropout) or any(True for _ in module.parameters(recurse=False))
    )


def _gradients_at_once(model: nn.Module, batch: Batch, smoothing: float) -> tuple[Tensor, Tensor]:
    def loss_of(parameters: dict[str, Tensor], inputs_B: Tensor, labels_B: Tensor) -> Tensor:
        logits = functional_call(model, parameters, (inputs_B,))
        return functional.cross_entropy(logits, labels_B, label_smoothing=smoothing)

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradients, losses_W = vmap(grad_and_value(loss_of), in_dims=(None, 0, 0))(parameters, *batch)
    return losses_W, torch.cat([gradient.flatten(1) for gradient in gradients.values()], dim=1)


def _gradients_one_by_one(model: nn.Module, batch: Batch, smoothing: float) -> tuple[Tensor, Tensor]:
    parameters = list(model.parameters())
    n = sum(parameter.numel() for parameter in parameters)
    losses, grads_Wn = [], parameters[0].new_empty(len(batch.labels_WB), n)
    for row_n, inputs_B, labels_B in zip(grads_Wn, *batch, strict=True):
        loss = functional.cross_entropy(model(inputs_B), labels_B, label_smoothing=smoothing)
        torch._foreach_copy_(shaped(row_n, parameters), torch.autograd.grad(loss, parameters))
        losses.append(loss.detach())
    return torch.stack(losses), grads_Wn
