"""NeuMF (He et al. 2017): a product of embeddings and a multilayer perceptron, side by side."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from gradsieve.lab.tasks.opening import dropout_mask

WIDTHS = (256, 256, 128, 64)


class NeuMF(nn.Module):
    """How likely a user is to rate a film; masks of dropout, one a hidden layer, follow from ``seed`` in training.

    >>> with torch.device("meta"):
    ...     sum(parameter.numel() for parameter in NeuMF(138_493, 26_744).parameters())
    31832577
    """

    def __init__(
        self,
        users: int,
        films: int,
        factors: int = 64,
        widths: Sequence[int] = WIDTHS,
        dropout: float = 0.5,
        seed: int = 0,
    ):
        super().__init__()
        self.dropout, self.seed, self.widths = dropout, seed, tuple(widths)
        self.product_user = nn.Embedding(users, factors)
        self.product_film = nn.Embedding(films, factors)
        self.user = nn.Embedding(users, widths[0] // 2)
        self.film = nn.Embedding(films, widths[0] // 2)
        self.hidden = nn.ModuleList(nn.Linear(*sizes) for sizes in pairwise(widths))
        self.last = nn.Linear(factors + widths[-1], 1)
        for table in (self.product_user, self.product_film, self.user, self.film):
            nn.init.normal_(table.weight, std=0.01)
        for layer in self.hidden:
            nn.init.xavier_uniform_(layer.weight)  # type: ignore[arg-type]
        nn.init.kaiming_uniform_(self.last.weight, nonlinearity="linear")  # LeCun's: variance 1 / inputs

    def forward(self, pairs_B2: Tensor, masks: Sequence[Tensor] = ()) -> Tensor:
        """Log-odds [B]; each hidden layer is multiplied by its mask where there are any."""
        user_B, film_B = pairs_B2.unbind(-1)
        x = torch.cat([self.user(user_B), self.film(film_B)], dim=-1)
        for i, layer in enumerate(self.hidden):
            x = layer(x).relu()
            if masks:
                x = x * masks[i]
        product = self.product_user(user_B) * self.product_film(film_B)
        odds: Tensor = self.last(torch.cat([product, x], dim=-1)).squeeze(-1)
        return odds

    def masks(self, examples: Sequence[int], draws: torch.Generator) -> list[Tensor]:
        """Masks for so many examples; none where nothing is dropped."""
        if self.dropout == 0:
            return []
        return [dropout_mask((*examples, width), self.dropout, draws) for width in self.widths[1:]]
