"""MovieLens with NeuMF: rate the film that a user rated last above 100 that the user never rated.

Shape suffixes: W workers in all, B examples in a worker's batch, n coordinates of the flat gradient, U users, N films.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn import functional

from gradsieve.lab.errors import LabError
from gradsieve.lab.tasks import ratings
from gradsieve.lab.tasks.base import Batch, Evaluation, Gradients, Recipe
from gradsieve.lab.tasks.neumf import NeuMF
from gradsieve.lab.tasks.opening import Draws, opened

HITS = 10
BATCH = 1 << 17
"""A worker's examples a step in the paper, which has 94 steps an epoch."""
IN_PLACE = " in place of MovieLens-20M"
_STEPS = 94
_EVALUATION_USERS = 4096


@dataclass(frozen=True)
class Recommendation:
    """Rated or not: every rating once an epoch, and for each ``drawn`` films at random in its place.

    With ``apart``, workers hold the ratings and the random films of an epoch one after the other, so that most see one
    kind alone: so does the code that the papers ran. ``accuracy`` is the share of users whose last film is among the
    10 first of all candidates.
    """

    name: str
    description: str
    recipe: Recipe
    pairs_P2: Tensor
    candidates_UN: Tensor
    users: int
    films: int
    drawn: int = 4
    apart: bool = False
    dropout: float = 0.5

    @property
    def device(self) -> torch.device:
        return self.pairs_P2.device

    def to(self, device: torch.device) -> Self:
        if device.type == self.device.type:
            return self
        where = f"{self.description}, on {torch.cuda.get_device_name(device)}"
        moved = {name: getattr(self, name).to(device) for name in ("pairs_P2", "candidates_UN")}
        return replace(self, description=where, **moved)

    def model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = NeuMF(self.users, self.films, dropout=self.dropout, seed=seed)
        return model.to(self.device)

    def steps_per_epoch(self, workers: int, batch_size: int) -> int:
        examples = len(self.pairs_P2) * (1 + self.drawn)
        steps = examples // workers // batch_size
        if steps == 0:
            raise LabError(
                f"{workers} workers x {batch_size} examples a step exceed the {examples} training examples of "
                f"{self.name}; use fewer workers or a smaller --batch-size"
            )
        return steps

    def batches(self, epoch: int, *, workers: int, batch_size: int, seed: int) -> Iterator[Batch]:
        draws = torch.Generator(self.device).manual_seed(seed * 1_000_003 + epoch)
        pairs, rated = self._examples(draws)
        share, steps = len(rated) // workers, self.steps_per_epoch(workers, batch_size)
        if self.apart:
            order = torch.stack([_shuffled(share, draws) + worker * share for worker in range(workers)])
        else:
            order = _shuffled(len(rated), draws)[: workers * share].view(workers, share)
        chosen = torch.split(order[:, : steps * batch_size], batch_size, dim=1)
        return opened((Batch(pairs[chosen_WB], rated[chosen_WB]) for chosen_WB in chosen), epoch)

    def _examples(self, draws: torch.Generator) -> tuple[Tensor, Tensor]:
        """All ratings, then random films for the same users; a film drawn may be one that the user has rated."""
        negatives = self.pairs_P2.repeat(self.drawn, 1)
        negatives[:, 1] = torch.randint(self.films, (len(negatives),), device=self.device, generator=draws)
        rated = torch.zeros(len(self.pairs_P2) + len(negatives), device=self.device)
        rated[: len(self.pairs_P2)] = 1.0
        return torch.cat([self.pairs_P2, negatives]), rated

    def batch_gradients(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.gradients(model, batch)(batch)

    def gradients(self, model: nn.Module, batch: Batch, *, compiled: bool = False) -> Gradients:
        assert isinstance(model, NeuMF)
        draws = Draws(model.seed, self.device)

        def gradients(batch: Batch) -> tuple[Tensor, Tensor]:
            draws.follow(batch)
            return _gradients(model, batch, model.masks(batch.labels_WB.shape, draws.generator))

        return gradients

    @torch.inference_mode()
    def evaluate(self, model: nn.Module) -> Evaluation:
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        hits = torch.zeros((), dtype=torch.int64, device=self.device)
        for start in range(0, self.users, _EVALUATION_USERS):
            films_UN = self.candidates_UN[start : start + _EVALUATION_USERS]
            users_UN = torch.arange(start, start + len(films_UN), device=self.device)[:, None].expand_as(films_UN)
            odds_UN = model(torch.stack([users_UN, films_UN], dim=-1))
            rated_UN = torch.zeros_like(odds_UN)
            rated_UN[:, 0] = 1.0
            loss += functional.binary_cross_entropy_with_logits(odds_UN, rated_UN, reduction="sum")
            hits += ((~(odds_UN[:, 1:] < odds_UN[:, :1])).sum(1) < HITS).sum()  # a tie, or a NaN, is no hit
        return Evaluation(loss.item() / self.candidates_UN.numel(), hits.item() / self.users)


def _shuffled(count: int, draws: torch.Generator) -> Tensor:
    return torch.randperm(count, device=draws.device, generator=draws)


def _gradients(model: NeuMF, batch: Batch, masks_WB: list[Tensor]) -> tuple[Tensor, Tensor]:
    def loss_of(weights: dict[str, Tensor], pairs_B2: Tensor, rated_B: Tensor, masks_B: list[Tensor]) -> Tensor:
        odds_B = functional_call(model, weights, (pairs_B2, masks_B))
        return functional.binary_cross_entropy_with_logits(odds_B, rated_B)

    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradients, losses_W = vmap(grad_and_value(loss_of), in_dims=(None, 0, 0, 0))(weights, *batch, masks_WB)
    return losses_W, torch.cat([gradient.flatten(1) for gradient in gradients.values()], dim=1)


def task(*, data_dir: Path | None = None, cache_dir: Path | None = None) -> Recommendation:
    """NeuMF as in Sahu et al. 2021, Table 4, and the code it names: 30 epochs of 8 workers x 131,072.

    A smaller set than MovieLens-20M has smaller batches, so that an epoch has as many steps.
    """
    known = ratings.load(data_dir)
    stands_in = known.source != "MovieLens-20M"
    fitting = len(known.pairs_P2) * 5 // (8 * _STEPS)
    return Recommendation(
        name="movielens-ncf",
        description=f"{known.description}{IN_PLACE if stands_in else ''}, NeuMF 64 + 256-256-128-64",
        recipe=Recipe(
            lr=4.5e-3, batch_size=max(1, min(BATCH, fitting)) if stands_in else BATCH, momentum=0.0, betas=(0.25, 0.5)
        ),
        pairs_P2=known.pairs_P2,
        candidates_UN=known.candidates_UN,
        users=known.users,
        films=known.films,
    )


def apart(*, data_dir: Path | None = None, cache_dir: Path | None = None) -> Recommendation:
    """The same with ratings and random films on different workers, as the code of Sahu et al. 2021 deals them."""
    dealt = task(data_dir=data_dir)
    described = f"{dealt.description}, ratings and random films on different workers"
    return replace(dealt, name="movielens-ncf-apart", description=described, apart=True)


def small(*, data_dir: Path | None = None, cache_dir: Path | None = None) -> Recommendation:
    """The first 25 users alone: seconds on a CPU."""
    whole = task(data_dir=data_dir)
    return replace(
        whole,
        name="movielens-ncf-small",
        description=f"{whole.description}, its first 25 users alone",
        recipe=replace(whole.recipe, batch_size=256),
        pairs_P2=whole.pairs_P2[whole.pairs_P2[:, 0] < 25],
        candidates_UN=whole.candidates_UN[:25],
        users=min(25, whole.users),
    )
