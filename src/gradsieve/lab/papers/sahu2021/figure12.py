"""Figure 12: without feedback, at a density of 5%, neither top-k nor a threshold reaches uncompressed training."""

import numpy as np

from gradsieve.lab.papers.arm import Arm
from gradsieve.lab.papers.entry import Context, Outcome
from gradsieve.lab.papers.sahu2021 import cifar, curves
from gradsieve.lab.papers.sahu2021.cifar import arms, made
from gradsieve.lab.papers.summary import Comparison

TOPK = "topk:0.05"
DENSITY = 4.7
"""Of the paper's threshold, in percent. Its lambda is not printed."""

TRIED = (1e-4, 3e-4, 9e-4, 2.7e-3, 8.1e-3, 2.4e-2)
SHORTER = 10


def stages(context: Context) -> cifar.Stages:
    yield [*arms(context, "dense"), *arms(context, TOPK, feedback="none"), *_trials(context)]
    yield [_first_guess(context)]
    yield _threshold(context)


def run(context: Context) -> Outcome:
    cifar.make(context, stages(context))
    dense = made(context, arms(context, "dense"))
    top = made(context, arms(context, TOPK, feedback="none"))
    hard = made(context, _threshold(context))
    why = cifar.length(context)
    rows = Comparison("sahu2021/fig12")
    rows.against("baseline", dense.accuracy, why)
    rows.against("topk", top.density)
    rows.against(
        "threshold",
        hard.density,
        f"{hard.runs[0].about.rule}, from {len(TRIED)} trainings {SHORTER} times shorter and one of full length: the "
        "paper prints no lambda",
    )
    rows.alone(
        "hard threshold less top-k: points of accuracy",
        hard.accuracy - top.accuracy,
        "the paper: the threshold is better without feedback too",
    )
    for name, method in (("hard threshold", hard), ("top-k", top)):
        rows.alone(
            f"no compression less {name} without feedback: points of accuracy",
            dense.accuracy - method.accuracy,
            "the paper: the threshold does not reach the baseline at 5%, and does at 0.12% with feedback",
        )
    methods = {"hard threshold, no feedback": hard, "top-k, no feedback": top}
    figure = curves.draw(methods, cifar.note(context, dense), figures=["density"], baseline=dense)
    results = cifar.step_results({"no compression": dense, **methods})
    return Outcome(figure, rows.rows, results, cifar.data(dense), cifar.notes(context))


def _trials(context: Context) -> list[Arm]:
    return [_tried(context, value) for value in TRIED]


def _tried(context: Context, value: float) -> Arm:
    return _without_feedback(context, value, shorter=SHORTER)[0]


def _without_feedback(context: Context, value: float, *, shorter: int = 1) -> list[Arm]:
    return arms(context, f"threshold:{value:.2g}", feedback="none", shorter=shorter)


def _first_guess(context: Context) -> Arm:
    return _without_feedback(context, _at(context, DENSITY))[0]


def _threshold(context: Context) -> list[Arm]:
    """The threshold of about the paper's density. Short trainings are mostly warm-up, whose gradients are larger."""
    guess = _first_guess(context)
    off = made(context, [guess]).density / DENSITY
    return _without_feedback(context, _at(context, DENSITY / max(off, 1e-3)))


def _at(context: Context, density: float) -> float:
    """The threshold between those tried that has this density in a short training."""
    return between(TRIED, [made(context, [arm]).density for arm in _trials(context)], density)


def between(thresholds: tuple[float, ...], densities: list[float], wanted: float) -> float:
    """Where densities, which fall with the threshold, reach ``wanted``: on lines through them in logarithms.

    >>> round(between((0.001, 0.01, 0.1), [10.0, 1.0, 0.0], 1.0), 6)
    0.01
    """
    falling = np.log(np.maximum(densities, 1e-9))[::-1]
    return float(np.exp(np.interp(np.log(wanted), falling, np.log(thresholds)[::-1])))
