"""Algorithm 1 on a convex problem, all rules, seeds and workers in one tensor.

A step of ``gs.Simulator`` costs about half a millisecond of bookkeeping and the figures take up to 100,000 of them, so
this is the same step without it: q = memory + gradient, send C(q) in float32, memory = q - sent, x -= lr * mean(sent).
A test holds the two together. R rules, S seeds, W workers, d coordinates, P recorded points, N examples, B a worker's.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

import gradsieve as gs
from gradsieve.compressors.base import k_of
from gradsieve.lab.papers.checkpoint import Checkpoint
from gradsieve.lab.papers.entry import Track, unwatched
from gradsieve.lab.tasks.logistic import Logistic
from gradsieve.types import Rule

BITS = 32
"""A sent element, as the authors count it: its value and not its index."""
_TOLD = 200
_ROWS = 400
_BUFFER = 64


class Gradients(Protocol):
    """All workers' gradients at once."""

    workers: int

    def __call__(self, step: int, x_RSd: Tensor) -> Tensor:
        """[R, S, W, d]"""


class Stochastic:
    """Each worker draws one example of its own share a step; all rules see the same draws."""

    def __init__(self, problem: Logistic, workers: int, seeds: int, steps: int) -> None:
        self.problem, self.workers = problem, workers
        rows = [_rows(len(problem.labels_N), workers, steps, seed) for seed in range(seeds)]
        self._rows_TSW = torch.stack(rows, dim=1)

    def __call__(self, step: int, x_RSd: Tensor) -> Tensor:
        a_SWd = self.problem.signed_Nd[self._rows_TSW[step]]
        margin_RSW = torch.einsum("swd,rsd->rsw", a_SWd, x_RSd)
        slope_RSW = torch.sigmoid(-margin_RSW).neg_()
        return (a_SWd * slope_RSW[..., None]).add_(x_RSd[:, :, None], alpha=self.problem.l2)


class Star:
    """EF-GDstar: each worker's full gradient less the one that it has at the optimum, which all reach together."""

    def __init__(self, problem: Logistic, workers: int, seeds: int) -> None:
        self.problem, self.workers = problem, workers
        order_SN = torch.stack([_split(len(problem.labels_N), workers, seed).flatten() for seed in range(seeds)])
        self._a_SNd = problem.signed_Nd[order_SN]
        self._slope_SN = torch.sigmoid(-(self._a_SNd @ problem.minimiser))

    def __call__(self, step: int, x_RSd: Tensor) -> Tensor:
        rules, seeds, size = x_RSd.shape
        share = self._a_SNd.shape[1] // self.workers
        away_RSd = x_RSd - self.problem.minimiser
        out_RSWd = torch.empty(rules, seeds, self.workers, size, dtype=x_RSd.dtype)
        for seed, a_Nd in enumerate(self._a_SNd):
            # The difference of slopes before the product: far fewer digits cancel than in a difference of gradients.
            slope_RN = torch.sigmoid(-(x_RSd[:, seed] @ a_Nd.T)).sub_(self._slope_SN[seed]).mul_(-1 / share)
            slope_WRB = slope_RN.view(rules, self.workers, share).transpose(0, 1)
            out_RSWd[:, seed] = torch.bmm(slope_WRB, a_Nd.view(self.workers, share, size)).transpose(0, 1)
        return out_RSWd.add_(away_RSd[:, :, None], alpha=self.problem.l2)


def _split(examples: int, workers: int, seed: int) -> Tensor:
    """A random equal share of the examples for each worker, [W, B]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(examples, generator=generator)[: examples // workers * workers].view(workers, -1)


def _rows(examples: int, workers: int, steps: int, seed: int) -> Tensor:
    """The example that each worker draws at each step, [T, W]."""
    split_WB = _split(examples, workers, seed)
    generator = torch.Generator().manual_seed(seed + (1 << 31))
    draw_TW = torch.randint(split_WB.shape[1], (steps, workers), generator=generator)
    return split_WB.T.gather(0, draw_TW)


def kept(rule: Rule, q_SWd: Tensor) -> Tensor:
    """What the rule sends of each worker's q, in place of the rest zeros."""
    if isinstance(rule, gs.HardThreshold):
        return torch.where(q_SWd.abs() >= rule.threshold, q_SWd, 0.0)
    if isinstance(rule, gs.TopK):
        index_SWk = q_SWd.abs().topk(k_of(rule.density, q_SWd.shape[-1]), dim=-1).indices
        return torch.zeros_like(q_SWd).scatter_(-1, index_SWk, q_SWd.gather(-1, index_SWk))
    raise TypeError(f"the convex figures compare top-k and the hard threshold, not {rule!r}")


@dataclass(frozen=True)
class Curves:
    """What was recorded; ``error`` and ``compensated`` are means over workers of |e|^2 and |p|^2, in update units."""

    iteration_P: Tensor
    above_PRS: Tensor  # f(x) - f*
    elements_PRS: Tensor  # sent so far by a worker
    kept_PRS: Tensor  # sent in this step by a worker
    error_PRS: Tensor
    compensated_PRS: Tensor
    total_error_RS: Tensor  # the sum over all steps, recorded or not
    x_RSd: Tensor
    seconds: float

    @property
    def bits_PRS(self) -> Tensor:
        return self.elements_PRS * BITS

    def results(self, names: Sequence[str]) -> list[dict[str, float | int | str]]:
        """One row a point, rule and seed; some hundred points a curve."""
        stride = math.ceil(len(self.iteration_P) / _ROWS)
        return [
            {
                "method": name,
                "seed": seed,
                "iteration": int(iteration),
                "bits": self.bits_PRS[point, rule, seed].item(),
                "suboptimality": self.above_PRS[point, rule, seed].item(),
                "kept": self.kept_PRS[point, rule, seed].item(),
                "error": self.error_PRS[point, rule, seed].item(),
                "compensated": self.compensated_PRS[point, rule, seed].item(),
            }
            for rule, name in enumerate(names)
            for seed in range(self.above_PRS.shape[2])
            for point, iteration in list(enumerate(self.iteration_P))[::stride]
        ]


def follow(
    problem: Logistic,
    rules: Sequence[Rule],
    gradients: Gradients,
    start_d: Tensor,
    *,
    seeds: int,
    steps: int,
    every: int = 1,
    checkpoint: Checkpoint | None = None,
    track: Track = unwatched,
    part: str = "iterations",
) -> Curves:
    """Runs all rules side by side for ``steps`` iterations and records every ``every``-th."""
    state = checkpoint.load() if checkpoint else None
    if state is None:
        state = _start(len(rules), seeds, gradients.workers, start_d, steps // every)
    buffer: list[tuple[int, Tensor]] = []
    since = time.perf_counter() - state["seconds"].item()
    if int(state["step"]) == 0:
        state["above"][0] = problem.value(state["x"].flatten(0, 1)).view(len(rules), seeds)
    for step in range(int(state["step"]), steps):
        point = (step + 1) // every if (step + 1) % every == 0 else None
        _step(problem, rules, gradients, state, step, point)
        if point is not None:
            buffer.append((point, state["x"].clone()))
        save = checkpoint is not None and checkpoint.due()
        if buffer and (save or len(buffer) == _BUFFER or step + 1 == steps):
            _evaluate(problem, buffer, state["above"])
        state["seconds"].fill_(time.perf_counter() - since)
        if checkpoint is not None and (save or step + 1 == steps):
            checkpoint.save(state)
        if (step + 1) % _TOLD == 0 or step + 1 == steps:
            track(part, step + 1, steps, f"{step + 1:,} of {steps:,}")
    return Curves(
        iteration_P=torch.arange(steps // every + 1) * every,
        above_PRS=state["above"] - problem.minimum,
        elements_PRS=state["elements"],
        kept_PRS=state["kept"],
        error_PRS=state["error"],
        compensated_PRS=state["compensated"],
        total_error_RS=state["total_error"],
        x_RSd=state["x"],
        seconds=state["seconds"].item(),
    )


def _start(rules: int, seeds: int, workers: int, start_d: Tensor, points: int) -> dict[str, Tensor]:
    def zeros(*sizes: int) -> Tensor:
        return torch.zeros(*sizes, dtype=torch.float64)

    curves = {name: zeros(points + 1, rules, seeds) for name in ("above", "elements", "kept", "error", "compensated")}
    return {
        "step": torch.zeros((), dtype=torch.int64),
        "x": start_d.repeat(rules, seeds, 1),
        "memory": zeros(rules, seeds, workers, len(start_d)),
        "seconds": zeros(1)[0],
        "sent": zeros(rules, seeds),
        "total_error": zeros(rules, seeds),
        **curves,
    }


def _step(
    problem: Logistic,
    rules: Sequence[Rule],
    gradients: Gradients,
    state: Mapping[str, Tensor],
    step: int,
    point: int | None,
) -> None:
    """One iteration of all rules; ``point`` is where it is recorded."""
    q_RSWd = gradients(step, state["x"]).add_(state["memory"])
    for r, rule in enumerate(rules):
        if isinstance(rule, gs.Dense):
            state["x"][r].sub_(q_RSWd[r].mean(1), alpha=problem.lr)
            count_S = torch.full((q_RSWd.shape[1],), float(q_RSWd.shape[-1]), dtype=torch.float64)
        else:
            sent_SWd = kept(rule, q_RSWd[r]).float().double()  # what float32 drops stays in the memory
            torch.sub(q_RSWd[r], sent_SWd, out=state["memory"][r])
            state["x"][r].sub_(sent_SWd.mean(1), alpha=problem.lr)
            count_S = torch.count_nonzero(sent_SWd, dim=(1, 2)).double() / gradients.workers
        state["sent"][r] += count_S
        if point is not None:
            state["kept"][point, r] = count_S
    error_RS = problem.lr**2 * state["memory"].square().sum((-1, -2)) / gradients.workers
    state["total_error"].add_(error_RS)
    state["step"].fill_(step + 1)
    if point is not None:
        state["elements"][point] = state["sent"]
        state["error"][point] = error_RS
        state["compensated"][point] = problem.lr**2 * q_RSWd.square().sum((-1, -2)) / gradients.workers


def _evaluate(problem: Logistic, buffer: list[tuple[int, Tensor]], above_PRS: Tensor) -> None:
    """f at all buffered points in one product: the data are read once for dozens of points."""
    points = [point for point, _ in buffer]
    x_PRSd = torch.stack([x_RSd for _, x_RSd in buffer])
    above_PRS[points] = problem.value(x_PRSd.flatten(0, 2)).view(x_PRSd.shape[:3])
    buffer.clear()
