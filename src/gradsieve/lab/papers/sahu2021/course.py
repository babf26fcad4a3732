"""Figures 5 and 6: how good a training is, its error and its density as it goes on."""

from dataclasses import dataclass

from gradsieve.lab.papers import plots
from gradsieve.lab.papers.entry import Context, Outcome
from gradsieve.lab.papers.sahu2021 import curves
from gradsieve.lab.papers.sahu2021.benchmark import Benchmark, Judged
from gradsieve.lab.papers.sahu2021.methods import Result, Stages, data_of, make_all, ratio, step_results, waited
from gradsieve.lab.papers.summary import Comparison


@dataclass(frozen=True)
class Course:
    """One threshold, and then top-k at the density that it came to."""

    key: str
    benchmark: Benchmark
    printed: float
    by_epoch: bool = False

    def stages(self, context: Context) -> Stages:
        run, rule = self.benchmark, self.benchmark.threshold(context, self.printed)
        yield run.arms(context, rule)
        yield run.arms(context, run.equal_topk(context, rule))

    def __call__(self, context: Context) -> Outcome:
        make_all(context, self.stages(context))
        run, rule = self.benchmark, self.benchmark.threshold(context, self.printed)
        hard, top = run.made(context, rule), run.made(context, run.equal_topk(context, rule))
        rows = Comparison(self.key)
        rows.against("parameters", hard.runs[0].about.parameters, run.why(context, hard))
        rows.against("density", hard.density, f"{rule}; {run.why(context, hard)}")
        rows.alone(f"hard threshold: {run.measure}", hard.accuracy, run.why(context, hard))
        rows.alone(f"top-k: {run.measure}", top.accuracy, f"at {top.density:.3g}%")
        rows.alone(
            f"hard threshold: better than top-k by, {run.unit}",
            run.ahead(hard.accuracy, top.accuracy),
            "the paper: better, without a number",
        )
        rows.alone(
            "total error: top-k over hard threshold",
            ratio(top.error, hard.error),
            "the paper: smaller for the threshold",
        )
        peaks = [float(method.by_step("error")[1].max()) for method in (top, hard)]
        rows.alone("largest error of a recorded step: top-k over hard threshold", ratio(*peaks))
        waited(rows, [hard, top])
        methods = {"hard threshold": hard, "top-k": top}
        figure = curves.draw(methods, run.note(context, hard), figures=["error", "density"], by_epoch=self.by_epoch)
        figure.axes[0].set_ylabel(run.measure)
        if run.lower_is_better:  # it starts at many times of where it ends
            plots.logarithmic(figure.axes[0])
        results = _with(step_results(methods), methods, run.measure)
        return Outcome(figure, rows.rows, results, data_of(hard), run.notes(hard))


def _with(rows: list[Result], methods: dict[str, Judged], measure: str) -> list[Result]:
    """The rows of the steps, with what a training is judged by where an epoch ends."""
    judged = {
        (name, run.about.seed, epoch.step): value
        for name, method in methods.items()
        for run in method.runs
        for epoch, value in zip(run.epochs, method.judge(run.epochs), strict=True)
    }
    return [{**row, measure: judged.get((str(row["method"]), int(row["seed"]), int(row["step"])), "")} for row in rows]
