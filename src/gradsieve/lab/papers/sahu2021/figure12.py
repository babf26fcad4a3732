"""Figure 12: without feedback, at a density of 5%, neither top-k nor a threshold reaches uncompressed training."""

import numpy as np

from gradsieve.lab.papers.arm import Arm
from gradsieve.lab.papers.entry import Context, Outcome
from gradsieve.lab.papers.sahu2021 import cifar, curves
from gradsieve.lab.papers.sahu2021.cifar import arms, made
from gradsieve.lab.papers.sahu2021.methods import Stages, data_of, make_all, step_results
from gradsieve.lab.papers.summary import Comparison

TOPK = "topk:0.05"
DENSITY = 4.7
"""Of the paper's threshold, in percent. Its lambda is not printed."""

TRIED = (1e-4, 5.5e-4)
"""Of full length: short trainings are mostly warm-up, whose gradients are larger."""


def stages(context: Context) -> Stages:
    yield [*arms(context, "dense"), *arms(context, TOPK, feedback="none"), *_trials(context)]
    yield _threshold(context)


def run(context: Context) -> Outcome:
    make_all(context, stages(context))
    dense = made(context, arms(context, "dense"))
    top = made(context, arms(context, TOPK, feedback="none"))
    hard = made(context, _threshold(context))
    why = cifar.reasons(context)
    rows = Comparison("sahu2021/fig12")
    rows.against("parameters", dense.runs[0].about.parameters)
    rows.against("baseline", dense.accuracy, why)
    rows.against("topk", top.density)
    rows.against(
        "threshold",
        hard.density,
        f"{hard.runs[0].about.rule}, from what {TRIED[0]:g} and {TRIED[1]:g} come to: the paper prints no lambda",
    )
    rows.alone(
        "hard threshold less top-k: points of accuracy",
        hard.accuracy - top.accuracy,
        "the paper: the threshold is better without feedback too",
    )
    for name, method in (("hard threshold", hard), ("top-k", top)):
        rows.alone(
            f"no compression less {name} without feedback, at {method.density:.3g}%: points of accuracy",
            dense.accuracy - method.accuracy,
            "the paper: neither reaches the baseline at 5%; the threshold does at 0.12% with feedback",
        )
    methods = {"hard threshold, no feedback": hard, "top-k, no feedback": top}
    figure = curves.draw(methods, cifar.note(context, dense), figures=["density"], baseline=dense)
    results = step_results({"no compression": dense, **methods})
    return Outcome(figure, rows.rows, results, data_of(dense), cifar.notes(context))


def _trials(context: Context) -> list[Arm]:
    return [_without_feedback(context, value)[0] for value in TRIED]


def _without_feedback(context: Context, value: float) -> list[Arm]:
    return arms(context, f"threshold:{value:.2g}", feedback="none")


def _threshold(context: Context) -> list[Arm]:
    """The threshold of about the paper's density."""
    found = [made(context, [arm]).density for arm in _trials(context)]
    return _without_feedback(context, through(TRIED, found, DENSITY))


def through(tried: tuple[float, float], densities: list[float], wanted: float) -> float:
    """Where the line through two points, in logarithms, has the density ``wanted``; at most ten times outside of them.

    >>> round(through((0.001, 0.1), [10.0, 0.1], 1.0), 6)
    0.01
    """
    near, far = np.log(np.maximum(densities, 1e-9))
    if near <= far:
        return tried[0]
    first, last = np.log(tried)
    at = first + (last - first) * (near - np.log(wanted)) / (near - far)
    return float(np.exp(np.clip(at, first - np.log(10), last + np.log(10))))
