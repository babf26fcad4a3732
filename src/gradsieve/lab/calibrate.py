"""``threshold:auto``: the hard threshold that spends no more than a given density over a run.

The published rule, lambda = 1 / (2 sqrt k), knows k and not the scale of the gradients, so that it is where the
search starts and not where it ends: short runs from the same seed steer the threshold until the budget is met.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

import gradsieve as gs
from gradsieve.lab.runner import Options, simulator, train
from gradsieve.lab.tasks import Task
from gradsieve.theory import threshold_from_k
from gradsieve.types import Rule

DEFAULT_DENSITY = 0.01
_WHOLE_RUN_STEPS = 500  # a run this short is calibrated on all of itself
_SHORT_RUN_STEPS = 200
_MAX_TRIALS = 10
_CLOSE_ENOUGH = 0.97


@dataclass(frozen=True)
class Calibration:
    """The threshold that was found, and how."""

    threshold: float
    published: float
    budget: float
    density: float
    trials: int
    epochs: int

    @property
    def note(self) -> str:
        met = "at most" if self.density <= self.budget else "not reached:"
        return (
            f"threshold {self.threshold:.4g}, calibrated from the published 1/(2 sqrt k) = {self.published:.4g} "
            f"in {self.trials} runs of {self.epochs} epochs for a density of {met} {self.budget:.3%}"
        )


def budget_of(rules: Sequence[Rule], task: Task, options: Options) -> float:
    """The density of the first top-k rule, as it is after rounding k in every layer; 1% where there is none."""
    for rule in rules:
        if isinstance(rule, gs.TopK):
            probe = simulator(task.model(options.seed), rule, replace(options, workers=1, exchange="allgather"))
            size = sum(parameter.numel() for parameter in task.model(options.seed).parameters())
            probe.step(torch.linspace(-1.0, 1.0, size).unsqueeze(0), lr=1.0)
            return probe.stats().total.density
    return DEFAULT_DENSITY


def calibrate(task: Task, options: Options, budget: float, on_trial: Callable[[int], None]) -> Calibration:
    """Searches the smallest threshold whose average density stays within ``budget``.

    ``on_trial`` is told the number of each trial before it is run. With error feedback the density falls about
    as 1 / threshold, and the search follows that line in logarithms, inside the bracket it has so far.
    """
    short = replace(options, epochs=_epochs(task, options))
    size = sum(parameter.numel() for parameter in task.model(options.seed).parameters())
    published = threshold = threshold_from_k(max(1, math.floor(budget * size)))
    above = 0.0  # the largest threshold known to spend too much
    best: tuple[float, float] | None = None  # the smallest one known to be within the budget, and its density
    trials = 0
    while trials < _MAX_TRIALS:
        trials += 1
        on_trial(trials)
        density = _density(task, gs.HardThreshold(threshold), short)
        if density > budget:
            above = max(above, threshold)
        elif best is None or threshold < best[0]:
            best = threshold, density
        if best is not None and best[1] >= _CLOSE_ENOUGH * budget:
            break
        # A little beyond the line, since a point just within the budget is what is looked for.
        proposal = threshold * max(density / budget, 0.1) * (1.01 if density > budget else 0.995)
        if above and best is not None and not above < proposal < best[0]:
            proposal = math.sqrt(above * best[0])
        threshold = proposal
    found, density = best or (threshold, density)
    return Calibration(found, published, budget, density, trials, short.epochs)


def _epochs(task: Task, options: Options) -> int:
    """How many epochs a trial has: all of a short run, else a compressed schedule of about 200 steps."""
    steps_per_epoch = task.steps_per_epoch(options.workers, options.recipe(task).batch_size)
    if options.epochs * steps_per_epoch <= _WHOLE_RUN_STEPS:
        return options.epochs
    return min(options.epochs, math.ceil(_SHORT_RUN_STEPS / steps_per_epoch))


def _density(task: Task, rule: Rule, options: Options) -> float:
    for training in train(task, rule, options):
        last = training
    return last.simulator.stats().total.density
