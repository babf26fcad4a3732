"""Figure 3: accuracy, error and density by iteration, ResNet-18 on CIFAR-10, lambda = 0.0072 against top-k."""

from gradsieve.lab.papers.entry import Context, Outcome
from gradsieve.lab.papers.sahu2021 import cifar, curves
from gradsieve.lab.papers.sahu2021.cifar import arms, equal_topk, made
from gradsieve.lab.papers.sahu2021.methods import Method, Stages, data_of, make_all, ratio, step_results, waited
from gradsieve.lab.papers.summary import Comparison

THRESHOLD = "threshold:0.0072"
EARLY = 1200 / 7200
"""The part of the training in which the paper sees top-k's error pile up."""


def stages(context: Context) -> Stages:
    yield arms(context, THRESHOLD)
    yield equal_topk(context, THRESHOLD)


def run(context: Context) -> Outcome:
    make_all(context, stages(context))
    hard, top = made(context, arms(context, THRESHOLD)), made(context, equal_topk(context, THRESHOLD))
    rows = Comparison("sahu2021/fig3")
    why = cifar.reasons(context)
    rows.against("parameters", hard.runs[0].about.parameters)
    rows.against("threshold", hard.accuracy, why)
    rows.against("topk", top.accuracy, f"at {top.density:.3g}%{why and f'; {why}'}")
    rows.against("density", hard.density, why)
    rows.alone(
        "hard threshold less top-k: points of accuracy", hard.accuracy - top.accuracy, "the paper's: 93.9 - 91.1 = 2.8"
    )
    early_top, late_top = _errors(top)
    early_hard, late_hard = _errors(hard)
    rows.alone(
        "total error: top-k over hard threshold",
        ratio(top.error, hard.error),
        "the paper: significantly lower for the threshold",
    )
    rows.alone(
        "error of the first sixth of the training: top-k over hard threshold",
        ratio(early_top, early_hard),
        "the paper: top-k's piles up in the first 1,200 of 7,200 iterations",
    )
    rows.alone("error of the rest: top-k over hard threshold", ratio(late_top, late_hard))
    rows.alone("share of top-k's total error that is of the first sixth", ratio(early_top, early_top + late_top))
    waited(rows, [hard, top])
    methods = {"hard threshold": hard, "top-k": top}
    figure = curves.draw(methods, cifar.note(context, hard), figures=["error", "density"])
    return Outcome(figure, rows.rows, step_results(methods), data_of(hard), cifar.notes(context))


def _errors(method: Method) -> tuple[float, float]:
    """The sum over the recorded steps of the error: of the early part, and of the rest."""
    step_P, error_PS = method.by_step("error")
    early_P = step_P <= max(EARLY * step_P[-1], step_P[0])
    return float(error_PS[early_P].sum()), float(error_PS[~early_P].sum())
