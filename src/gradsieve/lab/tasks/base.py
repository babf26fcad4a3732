"""What a task is: a model, data in memory, defaults for training, and gradients of W workers at once.

Shape suffixes: W workers in all, B examples in a worker's batch, n coordinates of the flat gradient.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional

from gradsieve.lab.errors import LabError

_EVALUATION_BATCH = 1000
_VECTORISED_LAYERS = (nn.Linear, nn.LayerNorm, nn.Embedding)


class Batch(NamedTuple):
    """One step's examples for all workers: ``inputs_WB`` is [W, B, ...], ``labels_WB`` is [W, B]."""

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
    ``lr / 10`` to ``lr`` over ``warmup``, and is divided by 10 at each point of ``decay_at``. ``smoothing`` is
    that of the labels, in training alone.
    """

    lr: float
    batch_size: int
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 0.0
    smoothing: float = 0.0
    warmup: float = 0.0
    decay_at: tuple[float, ...] = ()

    def lr_at(self, progress: float) -> float:
        """The learning rate after the fraction ``progress`` of the run.

        >>> Recipe(lr=0.1, batch_size=32, warmup=0.1, decay_at=(0.5,)).lr_at(0.2)
        0.1
        """
        if progress < self.warmup:
            return self.lr * (0.1 + 0.9 * progress / self.warmup)
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


@dataclass(frozen=True)
class Classification:
    """A task with labelled examples in memory and a cross-entropy loss."""

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

    def model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build()

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
        order = torch.randperm(len(self.train_labels), generator=generator)
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
        return _gradients_one_by_one(model, batch, self.recipe.smoothing)

    @torch.inference_mode()
    def evaluate(self, model: nn.Module) -> Evaluation:
        was_training = model.training
        model.eval()
        loss, correct = 0.0, 0
        for start in range(0, len(self.test_labels), _EVALUATION_BATCH):
            labels = self.test_labels[start : start + _EVALUATION_BATCH]
            logits = model(self.prepare(self.test_inputs[start : start + _EVALUATION_BATCH]))
            loss += functional.cross_entropy(logits, labels, reduction="sum").item()
            correct += int((logits.argmax(1) == labels).sum())
        model.train(was_training)
        return Evaluation(loss / len(self.test_labels), correct / len(self.test_labels))


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
    losses, rows = [], []
    for inputs_B, labels_B in zip(*batch, strict=True):
        loss = functional.cross_entropy(model(inputs_B), labels_B, label_smoothing=smoothing)
        gradients = torch.autograd.grad(loss, parameters)
        rows.append(torch.cat([gradient.flatten() for gradient in gradients]))
        losses.append(loss.detach())
    return torch.stack(losses), torch.stack(rows)
