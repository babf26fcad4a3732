"""The constants of the convex problems beside the authors': L, step size, f(x*), f(x0)."""

import math
from functools import cache

from gradsieve.lab.papers.summary import Comparison
from gradsieve.lab.tasks.logistic import Logistic

SHIFT = {"madelon": 0.0001, "gisette": 0.005}


def madelon(problem: Logistic, rows: Comparison) -> None:
    """L, the step size and f* to the last digit; f(x0) as far as the authors' x* defines it."""
    start = problem.minimiser + SHIFT["madelon"]
    rows.against("smoothness", problem.smoothness)
    rows.against("lr", problem.lr)
    rows.against("minimum", problem.minimum)
    ours = problem.value(start[None]).item()
    rows.against("start", ours, why=_why_start(problem, rows.value("start") - ours))


@cache
def _why_start(problem: Logistic, difference: float) -> str:
    """How far f(x0) moves when x* is as inexact as the authors' own solver leaves it."""
    theirs = problem.lbfgs(start=1.0, tolerance=1e-10)  # the call in their notebook
    excess = problem.value(theirs[None]).item() - problem.minimum
    slope = problem.gradient(problem.minimiser + SHIFT["madelon"])
    # The largest change of f(x0) over all x* whose f is no more than that above the minimum.
    reach = math.sqrt(2 * excess * (slope @ problem.hessian(problem.minimiser).inverse() @ slope).item())
    again = problem.value(theirs[None] + SHIFT["madelon"]).item()
    return (
        f"x0 hangs on x*: the solver call of the authors' notebook stops {excess:.2g} above the minimum, which leaves "
        f"f(x0) open by up to {reach:.2g}, and the difference is {difference:.2g}; the same call gives {again:.9f} here"
    )


def gisette(problem: Logistic, rows: Comparison) -> None:
    why = "generated data: gisette's shape and scale, and not its examples" if problem.generated else ""
    start = problem.minimiser + SHIFT["gisette"]
    rows.against("smoothness", problem.smoothness, why)
    rows.against("row", problem.features_Nd.square().sum(1).mean().item() / 4, why)
    rows.against("minimum", problem.minimum, why)
    rows.against("start", problem.value(start[None]).item(), why)
