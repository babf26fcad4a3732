"""``threshold:auto``: the hard threshold that spends no more than a given budget over a run.

The published rule, lambda = 1 / (2 sqrt k), knows k and not the scale of the gradients, so that it is where the
search starts and not where it ends: short runs from the same seed steer the threshold until the budget is met.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

import gradsieve as gs
from gradsieve.lab.runner import Options, simulator, train
from gradsieve.lab.summary import size
from gradsieve.lab.tasks import Task
from gradsieve.theory import threshold_from_k
from gradsieve.types import Rule

DEFAULT_DENSITY = 0.01
_WHOLE_RUN_STEPS = 500  # a run this short is calibrated on all of itself
_SHORT_RUN_STEPS = 200
_MAX_TRIALS = 10
_CLOSE_ENOUGH = 0.97


@dataclass(frozen=True)
class Budget:
    """What a step may cost on average: a density, and a worker's bytes where a rule to match sets them.

    Bytes count beside density because they differ: a rule whose count varies has its counts told first, or pads.
    """

    density: float
    step_bytes: float = math.inf

    def spent(self, stats: gs.Stats) -> float:
        """The share of the budget that a run used; more than 1 is too much."""
        total = stats.total
        return max(total.density / self.density, total.bytes / total.steps / self.step_bytes)

    def __str__(self) -> str:
        limit = f"a density of {self.density:.3%}"
        return limit if math.isinf(self.step_bytes) else f"{limit} and {size(self.step_bytes)} a step"


@dataclass(frozen=True)
class Calibration:
    """The threshold that was found, and how."""

    threshold: float
    published: float
    budget: Budget
    met: bool
    trials: int
    epochs: int

    @property
    def note(self) -> str:
        outcome = "to spend at most" if self.met else "without getting down to"
        return (
            f"threshold {self.threshold:.4g}, calibrated from the published 1/(2 sqrt k) = {self.published:.4g} "
            f"in {self.trials} runs of {self.epochs} epochs {outcome} {self.budget}"
        )


def budget_of(rules: Sequence[Rule], task: Task, options: Options) -> Budget:
    """What the first top-k rule spends, after rounding k in every layer; a density of 1% where there is none."""
    for rule in rules:
        if isinstance(rule, gs.TopK):
            probe = simulator(task.model(options.seed), rule, options)
            # Top-k spends the same whatever the gradient is, so that one step tells.
            probe.step(torch.linspace(-1.0, 1.0, probe.layout.size).expand(options.workers, -1), lr=1.0)
            spent = probe.stats().total
            return Budget(spent.density, spent.bytes or math.inf)  # one worker alone sends nothing
    return Budget(DEFAULT_DENSITY)


def calibrate(task: Task, options: Options, budget: Budget, on_trial: Callable[[int], None]) -> Calibration:
    """Searches the smallest threshold that stays within ``budget`` on average.

    ``on_trial`` is told the number of each trial before it is run. With error feedback the cost falls about as
    1 / threshold: the search follows that line, and bisects in logarithms where the line leaves its bracket.
    """
    short = replace(options, epochs=_epochs(task, options))
    coordinates = sum(parameter.numel() for parameter in task.model(options.seed).parameters())
    published = threshold = threshold_from_k(max(1, math.floor(budget.density * coordinates)))
    too_low, enough = 0.0, math.inf
    for trial in range(1, _MAX_TRIALS + 1):
        on_trial(trial)
        spent = _spent(task, gs.HardThreshold(threshold), short, budget)
        if spent <= 1.0:
            enough = min(enough, threshold)
            if spent >= _CLOSE_ENOUGH and threshold == enough:
                break
        else:
            too_low = max(too_low, threshold)
        # Aims at a point just within the budget; a run that sent nothing must not send the threshold to zero.
        threshold *= max(spent, 0.1) * 1.01
        if not too_low < threshold < enough:
            threshold = math.sqrt(too_low * enough)
    met = enough < math.inf
    return Calibration(enough if met else too_low, published, budget, met, trial, short.epochs)


def _epochs(task: Task, options: Options) -> int:
    """How many epochs a trial has: all of a short run, else a compressed schedule of about 200 steps."""
    steps_per_epoch = task.steps_per_epoch(options.workers, options.recipe(task).batch_size)
    if options.epochs * steps_per_epoch <= _WHOLE_RUN_STEPS:
        return options.epochs
    return min(options.epochs, math.ceil(_SHORT_RUN_STEPS / steps_per_epoch))


def _spent(task: Task, rule: Rule, options: Options, budget: Budget) -> float:
    for training in train(task, rule, options):
        last = training
    return budget.spent(last.sieve.stats())
