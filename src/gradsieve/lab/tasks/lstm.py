"""A word-level LSTM, and its gradients for W workers at once.

Shape suffixes: W workers in all, B texts of a worker side by side, T words of each, H units, G = 4 H gates.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gradsieve.lab.tasks.opening import dropout_mask


class State(NamedTuple):
    """What the layers remember of the words before: one tensor a layer."""

    hidden: tuple[Tensor, ...]
    cell: tuple[Tensor, ...]


class WordLstm(nn.Module):
    """Embedding, layers of LSTM, and a softmax over all words on the same embedding (Press & Wolf 2016).

    ``dropout`` is that of everything that enters or leaves a layer; masks follow from ``seed``.

    >>> with torch.device("meta"):
    ...     sum(parameter.numel() for parameter in WordLstm(28_869).parameters())
    28949319
    """

    def __init__(self, vocabulary: int, units: int = 650, layers: int = 3, dropout: float = 0.4, seed: int = 0):
        super().__init__()
        self.dropout, self.seed = dropout, seed
        self.words = nn.Embedding(vocabulary, units)
        self.layers = nn.ModuleList(nn.LSTM(units, units, batch_first=True) for _ in range(layers))
        self.bias = nn.Parameter(torch.zeros(vocabulary))
        nn.init.uniform_(self.words.weight, -0.1, 0.1)

    def forward(self, words_BT: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Scores ``[B, T, vocabulary]`` of what comes next, without dropout, and what is remembered."""
        x_BTH, last = self.words(words_BT), []
        for i, layer in enumerate(self.layers):
            before = None if state is None else (state.hidden[i][None], state.cell[i][None])
            x_BTH, (hidden, cell) = layer(x_BTH, before)
            last.append((hidden[0], cell[0]))
        return nn.functional.linear(x_BTH, self.words.weight, self.bias), State(*zip(*last, strict=True))

    def fresh(self, columns: int) -> State:
        """Nothing remembered of so many texts."""
        zeros = tuple(self.bias.new_zeros(columns, self.words.embedding_dim) for _ in self.layers)
        return State(zeros, zeros)

    def losses(
        self, weights: dict[str, Tensor], words_WBT: Tensor, next_WBT: Tensor, state: State, draws: torch.Generator
    ) -> tuple[Tensor, State]:
        """Each worker's mean loss ``[W]``, from weights ``[W, ...]`` that may be its own, with dropout."""
        workers, columns, length = words_WBT.shape
        words_WTB = words_WBT.transpose(1, 2).flatten(1)  # rows are texts, the loop below goes by word
        table_WVH = weights["words.weight"]
        x_WNH = table_WVH[torch.arange(workers, device=table_WVH.device)[:, None], words_WTB]
        x_WNH = self._dropped(x_WNH, draws)
        hidden, cell = [], []
        for i in range(len(self.layers)):
            into_WGH, again_WGH, bias_WG, more_WG = (
                weights[f"layers.{i}.{name}_l0"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            )
            gates_WNG = torch.baddbmm((bias_WG + more_WG)[:, None], x_WNH, into_WGH.transpose(1, 2))
            gates_TWBG = gates_WNG.view(workers, length, columns, -1).transpose(0, 1)
            before = (part[i].view(workers, columns, -1) for part in state)
            out_TWBH, last_WBH = _Recurrence.apply(gates_TWBG, again_WGH, *before)  # type: ignore[no-untyped-call]
            hidden.append(out_TWBH[-1].detach().flatten(0, 1))
            cell.append(last_WBH.flatten(0, 1))
            x_WNH = self._dropped(out_TWBH.transpose(0, 1).flatten(1, 2), draws)
        scores_WNV = torch.baddbmm(weights["bias"][:, None], x_WNH, table_WVH.transpose(1, 2))
        losses_N = nn.functional.cross_entropy(
            scores_WNV.flatten(0, 1), next_WBT.transpose(1, 2).flatten(), reduction="none"
        )
        return losses_N.view(workers, -1).mean(1), State(tuple(hidden), tuple(cell))

    def _dropped(self, x: Tensor, draws: torch.Generator) -> Tensor:
        if self.dropout == 0:
            return x
        return x * dropout_mask(x.shape, self.dropout, draws)


class _Recurrence(torch.autograd.Function):
    """One LSTM layer, given its gates before they hear of the last step's output.

    The workers' recurrent weights must be equal: forward is then one product a word for all of them, and only their
    gradients differ.
    """

    @staticmethod
    def forward(
        ctx: Any, gates_TWBG: Tensor, weights_WGH: Tensor, hidden_WBH: Tensor, cell_WBH: Tensor
    ) -> tuple[Tensor, Tensor]:
        length, workers, columns, gates = gates_TWBG.shape
        units = gates // 4
        weight_HG = weights_WGH[0].t()
        gates_TCG = gates_TWBG.clone(memory_format=torch.contiguous_format).view(length, workers * columns, gates)
        hidden_TCH = gates_TCG.new_empty(length + 1, workers * columns, units)
        cell_TCH = torch.empty_like(hidden_TCH)
        hidden_TCH[0], cell_TCH[0] = hidden_WBH.flatten(0, 1), cell_WBH.flatten(0, 1)
        take_and_keep, new, show = gates_TCG.split([2 * units, units, units], dim=2)  # type: ignore[no-untyped-call]
        take, keep = take_and_keep.chunk(2, dim=2)
        for t in range(length):
            gates_TCG[t].addmm_(hidden_TCH[t], weight_HG)
            take_and_keep[t].sigmoid_()
            new[t].tanh_()
            show[t].sigmoid_()
            torch.mul(keep[t], cell_TCH[t], out=cell_TCH[t + 1]).addcmul_(take[t], new[t])
            torch.mul(cell_TCH[t + 1].tanh(), show[t], out=hidden_TCH[t + 1])
        ctx.save_for_backward(gates_TCG, hidden_TCH, cell_TCH, weights_WGH)
        last_WBH = cell_TCH[-1].view(workers, columns, units)
        ctx.mark_non_differentiable(last_WBH)
        return hidden_TCH[1:].view(length, workers, columns, units), last_WBH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_TWBH: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gates_TCG, hidden_TCH, cell_TCH, weights_WGH = ctx.saved_tensors
        length, workers, columns, units = slope_TWBH.shape
        slope_TCH = slope_TWBH.reshape(length, workers * columns, units)
        take, keep, new, show = gates_TCG.chunk(4, dim=2)
        shown = cell_TCH[1:].tanh()
        to_cell_TCH = show * (1 - shown * shown)  # d hidden / d cell
        # d cell / d gate for the first three gates, d hidden / d gate for the last
        by_gate_TCG = torch.cat(
            [
                new * take * (1 - take),
                cell_TCH[:-1] * keep * (1 - keep),
                take * (1 - new * new),
                shown * show * (1 - show),
            ],
            dim=2,
        ).view(length, -1, 4, units)
        gates_slope = torch.empty_like(by_gate_TCG)
        weight_GH, cell_CH = weights_WGH[0], torch.zeros_like(slope_TCH[0])
        for t in reversed(range(length)):
            hidden_CH = slope_TCH[t]
            if t + 1 < length:
                hidden_CH = torch.addmm(hidden_CH, gates_slope[t + 1].flatten(1), weight_GH)
                cell_CH = cell_CH * keep[t + 1]
            cell_CH = torch.addcmul(cell_CH, hidden_CH, to_cell_TCH[t])
            torch.mul(cell_CH[:, None], by_gate_TCG[t, :, :3], out=gates_slope[t, :, :3])
            torch.mul(hidden_CH, by_gate_TCG[t, :, 3], out=gates_slope[t, :, 3])
        gates_TWBG = gates_slope.view(length, workers, columns, 4 * units)
        before_TWBH = hidden_TCH[:-1].view(length, workers, columns, units)
        return gates_TWBG, torch.einsum("twbg,twbh->wgh", gates_TWBG, before_TWBH), None, None
