"""Figure 7: madelon at extreme sparsification, 20 workers, one example a worker a step.

Runs top-1 and the threshold that the paper prints, and then the threshold that spends what top-1 spends: the paper sets
out to compare at the same volume, and its own threshold spends less.
"""

from collections.abc import Callable

from matplotlib.figure import Figure
from torch import Tensor

import gradsieve as gs
from gradsieve.lab.papers import plots
from gradsieve.lab.papers.entry import Context, Outcome
from gradsieve.lab.papers.sahu2021 import constants
from gradsieve.lab.papers.sahu2021.convex import Curves, Stochastic, follow
from gradsieve.lab.papers.summary import Comparison
from gradsieve.lab.tasks.logistic import madelon
from gradsieve.theory import threshold_for_precision
from gradsieve.types import Rule

WORKERS = 20
EARLY = 500
NAMES = ("SGD, no compression", "top-1", "hard threshold of the printed precision", "hard threshold of top-1's volume")
_SEARCHES = 8


def run(context: Context) -> Outcome:
    problem = madelon(context.data_dir)
    steps = 100 if context.quick else 3000
    start_d = problem.minimiser + constants.SHIFT["madelon"]
    gradients = Stochastic(problem, WORKERS, context.seeds, steps)
    top1 = gs.TopK(1 / problem.size)
    printed = gs.HardThreshold(threshold_for_precision(1.25e-4, problem.size, problem.lr))

    def trial(rules: list[Rule], name: str) -> Curves:
        checkpoint = context.checkpoint(name, seeds=context.seeds, steps=steps, rules=str(rules))
        return follow(
            problem,
            rules,
            gradients,
            start_d,
            seeds=context.seeds,
            steps=steps,
            checkpoint=checkpoint,
            track=context.track,
            part=name,
        )

    main = trial([gs.Dense(), top1, printed], "printed")
    spent = main.elements_PRS[-1, 2].mean().item()
    matched, curves = _matched(trial, float(steps), printed.threshold, spent, 2 if context.quick else _SEARCHES)
    rows = Comparison("sahu2021/fig7")
    constants.madelon(problem, rows)
    _compare(rows, main, curves, printed.threshold, matched, steps)
    parts = [(main, 1), (main, 2), (curves, 0)]  # SGD's bits are 500 times theirs: off every axis
    note = f"madelon, 2,000 x 500; {WORKERS} workers, batch 1; mean and range of {context.seeds} seeds"
    results = main.results(NAMES[:3]) + curves.results(NAMES[3:])
    return Outcome(_draw(parts, note), rows.rows, results, problem.name)


def _matched(
    trial: Callable[[list[Rule], str], Curves], budget: float, printed: float, spent: float, searches: int
) -> tuple[float, Curves]:
    """The lowest threshold found, by bisection, that spends no more elements than ``budget`` on the mean over seeds.

    The printed one ``spent`` more or less than that, and so says on which side of it to look.
    """
    low, high = (printed / 4, printed) if spent <= budget else (printed, 4 * printed)
    best: tuple[float, Curves] | None = None
    for search in range(searches):
        middle = (low + high) / 2
        curves = trial([gs.HardThreshold(middle)], f"search-{search + 1}")
        if curves.elements_PRS[-1].mean() <= budget:
            high, best = middle, (middle, curves)
        else:
            low = middle
    return best if best is not None else (high, trial([gs.HardThreshold(high)], "search-0"))


def _compare(rows: Comparison, main: Curves, matched: Curves, printed: float, threshold: float, steps: int) -> None:
    top_S, hard_S = main.elements_PRS[-1, 1], main.elements_PRS[-1, 2]
    top = top_S.mean().item()
    rows.against("threshold", printed, "d gamma^2 lambda^2 = 1.25e-4, solved with all digits of gamma")
    rows.against(
        "volume",
        hard_S.mean().item() / top,
        f"it sends fewer elements than top-1 in {int((hard_S < top_S).sum())} of {len(top_S)} seeds; the rows below "
        "compare at this threshold and at the one that spends what top-1 does",
    )
    for name, curves, rule in (("printed precision", main, 2), ("top-1's volume", matched, 0)):
        error_S, base_S = curves.total_error_RS[rule], main.total_error_RS[1]
        early, base = _early(curves, rule), _early(main, 1)
        rows.alone(f"{name}: elements sent over top-1's", curves.elements_PRS[-1, rule].mean().item() / top)
        rows.alone(f"{name}: total error of top-1 over its own (means)", (base_S.mean() / error_S.mean()).item())
        rows.alone(
            f"{name}: share of seeds in which its total error is smaller", (error_S < base_S).double().mean().item()
        )
        rows.alone(f"{name}: mean f - f* over the first {min(EARLY, steps)} steps", early.mean().item())
        rows.alone(f"{name}: that of top-1 over it", (base.mean() / early.mean()).item())
        late = curves.above_PRS[-EARLY:, rule].mean() / main.above_PRS[-EARLY:, 1].mean()
        rows.alone(f"{name}: mean f - f* over the last {min(EARLY, steps)} steps, over that of top-1", late.item())
        rows.alone(f"{name}: share of iterations in which no worker sends", _silent(curves, rule))
    rows.alone("threshold that spends what top-1 does", threshold)


def _early(curves: Curves, rule: int) -> Tensor:
    return curves.above_PRS[1 : EARLY + 1, rule].mean(0)


def _silent(curves: Curves, rule: int) -> float:
    return (curves.kept_PRS[1:, rule] == 0).double().mean().item()


def _draw(parts: list[tuple[Curves, int]], note: str) -> Figure:
    colours = (plots.COLOURS[1], plots.COLOURS[0], plots.COLOURS[4])
    with plots.style():
        figure, axes = plots.panels(3, note)
        for (curves, rule), name, colour in zip(parts, NAMES[1:], colours, strict=True):
            bits_PS, above_PS, kept_PS = curves.bits_PRS[:, rule], curves.above_PRS[:, rule], curves.kept_PRS[:, rule]
            plots.curve(axes[0], _per(10, bits_PS).mean(-1), _per(10, above_PS), name, colour, shade=False)
            plots.curve(axes[1], _per(50, curves.iteration_P[:, None].double())[:, 0], _per(50, kept_PS), name, colour)
            plots.curve(axes[2], curves.iteration_P[1:], curves.error_PRS[1:, rule], name, colour)
        axes[0].set(title="(a) means of 10 steps", xlabel="bits sent by a worker", ylabel="f(x) - f*")
        axes[1].set(title="(b) means of 50 steps", xlabel="iteration", ylabel="elements a worker sends a step")
        axes[2].set(title="(c)", xlabel="iteration", ylabel="mean over workers of |e|²")
        plots.logarithmic(axes[0])
        plots.logarithmic(axes[2])
        axes[2].set_ylim(bottom=3e-6)  # the first steps come from zero
        return plots.finish(figure, axes)


def _per(width: int, values_PS: Tensor) -> Tensor:
    """Means of ``width`` points each, without the point before the first step."""
    whole = (len(values_PS) - 1) // width * width
    return values_PS[1 : whole + 1].view(-1, width, values_PS.shape[1]).mean(1)
