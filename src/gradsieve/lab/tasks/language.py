"""WikiText-2 with the LSTM of Sahu et al. 2021, and with one that a CPU can train.

Shape suffixes: W workers in all, B texts of a worker side by side, T words of each, n coordinates of the flat gradient.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradsieve.lab.errors import LabError
from gradsieve.lab.tasks import words
from gradsieve.lab.tasks.apart import gradients_apart
from gradsieve.lab.tasks.base import Batch, Evaluation, Gradients, Recipe
from gradsieve.lab.tasks.lstm import State, WordLstm
from gradsieve.lab.tasks.opening import Draws, Opening, opened

_EVALUATION_COLUMNS = 64
_STEPS = 68  # an epoch of the paper: 2.1 million words, 8 x 128 columns, windows of 30


@dataclass(frozen=True)
class LanguageModel:
    """The next word of a text; a worker has ``batch_size`` stretches of it, read in windows of ``window`` words.

    What the layers remember goes from window to window and gradients do not. ``clip`` bounds the norm of each worker's
    gradient before anything else sees it. ``accuracy`` is the share of words foretold, ``exp(loss)`` the perplexity.
    """

    name: str
    description: str
    recipe: Recipe
    train_words: Tensor
    test_words: Tensor
    vocabulary: int
    network: dict[str, Any] = field(default_factory=dict)
    window: int = 30
    clip: float = 0.4

    @property
    def device(self) -> torch.device:
        return self.train_words.device

    def to(self, device: torch.device) -> Self:
        if device.type == self.device.type:
            return self
        where = f"{self.description}, on {torch.cuda.get_device_name(device)}"
        moved = {name: getattr(self, name).to(device) for name in ("train_words", "test_words")}
        return replace(self, description=where, **moved)

    def model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = WordLstm(self.vocabulary, seed=seed, **self.network)
        return model.to(self.device)

    def steps_per_epoch(self, workers: int, batch_size: int) -> int:
        steps = (len(self.train_words) // (workers * batch_size) - 1) // self.window
        if steps < 1:
            raise LabError(
                f"{workers} workers x {batch_size} texts of {self.window} words a step exceed the "
                f"{len(self.train_words)} words of {self.name}; use fewer workers or a smaller --batch-size"
            )
        return steps

    def batches(self, epoch: int, *, workers: int, batch_size: int, seed: int) -> Iterator[Batch]:
        """One epoch: the text in its order, for a text cannot be shuffled; the incomplete last step is dropped."""
        text_WBT = _columns(self.train_words, workers * batch_size).view(workers, batch_size, -1)
        steps, window = self.steps_per_epoch(workers, batch_size), self.window
        starts = range(0, steps * window, window)
        windows = (Batch(text_WBT[..., at : at + window], text_WBT[..., at + 1 : at + window + 1]) for at in starts)
        return opened(windows, epoch)

    def batch_gradients(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.gradients(model, batch)(batch)

    def gradients(self, model: nn.Module, batch: Batch, *, compiled: bool = False) -> Gradients:
        assert isinstance(model, WordLstm)
        return _Reader(model, self.clip)

    @torch.inference_mode()
    def evaluate(self, model: nn.Module) -> Evaluation:
        columns = min(_EVALUATION_COLUMNS, len(self.test_words) // 2)
        text_BT = _columns(self.test_words, columns)
        state: State | None = None
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        correct = torch.zeros((), dtype=torch.int64, device=self.device)
        length = text_BT.shape[1] - 1
        for start in range(0, length, self.window):
            end = min(start + self.window, length)
            labels = text_BT[:, start + 1 : end + 1].flatten()
            scores, state = model(text_BT[:, start:end], state)
            loss += functional.cross_entropy(scores.flatten(0, 1), labels, reduction="sum")
            correct += (scores.flatten(0, 1).argmax(1) == labels).sum()
        return Evaluation(loss.item() / (columns * length), correct.item() / (columns * length))


class _Reader:
    """Gradients of one window after the other: remembers what the layers do, and draws dropout."""

    def __init__(self, model: WordLstm, clip: float):
        self._model, self._clip = model, clip
        self._draws = Draws(model.seed, model.bias.device)
        self._state: State | None = None

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        words_WBT, next_WBT = batch
        workers, columns = words_WBT.shape[:2]
        if self._state is None or isinstance(batch, Opening):
            self._state = self._model.fresh(workers * columns)
        self._draws.follow(batch)
        before, draws = self._state, self._draws.generator

        def losses(weights: dict[str, Tensor]) -> Tensor:
            losses_W, self._state = self._model.losses(weights, words_WBT, next_WBT, before, draws)
            return losses_W

        losses_W, grads_Wn = gradients_apart(self._model, workers, losses)
        return losses_W, clipped(grads_Wn, self._clip)


def clipped(grads_Wn: Tensor, norm: float) -> Tensor:
    """Each worker's gradient, in place, with a norm of at most ``norm``.

    >>> clipped(torch.tensor([[3.0, 4.0], [0.3, 0.4]]), 1.0).norm(dim=1)
    tensor([1.0000, 0.5000])
    """
    return grads_Wn.mul_((norm / (grads_Wn.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0))


def _columns(text: Tensor, columns: int) -> Tensor:
    """The text cut into so many equal stretches, side by side; what is left over is dropped."""
    length = len(text) // columns
    return text[: columns * length].view(columns, length)


def task(*, data_dir: Path | None = None, cache_dir: Path | None = None) -> LanguageModel:
    """Three layers of 650, as in Sahu et al. 2021, Table 3, and the code it names: 90 epochs of 8 workers x 128.

    Where a shorter text stands in for the training text, the batch is smaller, so that an epoch has as many steps.
    """
    text = words.load(data_dir)
    fitting = len(text.train) // (8 * (_STEPS * 30 + 1))
    return LanguageModel(
        name="wikitext-lstm",
        description=f"{text.description}, LSTM of three layers of 650, tied embedding",
        recipe=Recipe(
            lr=20.0,
            batch_size=max(1, min(128, fitting)) if text.stand_in else 128,
            momentum=0.0,
            warmup_epochs=5,
            start=1 / 16,
            decay_at=(60 / 90, 80 / 90),
        ),
        train_words=text.train,
        test_words=text.test,
        vocabulary=text.vocabulary,
    )


def small(*, data_dir: Path | None = None, cache_dir: Path | None = None) -> LanguageModel:
    """The first 12,000 words of each text, 1,000 of them different, and two layers of 64: seconds on a CPU."""
    text = words.load(data_dir, most=1000, longest=12_000)
    return LanguageModel(
        name="wikitext-lstm-small",
        description=f"{text.description}, LSTM of two layers of 64, tied embedding",
        recipe=Recipe(lr=20.0, batch_size=8, momentum=0.0, warmup=0.1, start=1 / 16, decay_at=(60 / 90, 80 / 90)),
        train_words=text.train,
        test_words=text.test,
        vocabulary=text.vocabulary,
        network={"units": 64, "layers": 2, "dropout": 0.0},
    )
