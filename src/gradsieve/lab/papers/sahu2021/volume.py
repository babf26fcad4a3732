"""Figures 2b and 2c: how good a training is against its average density."""

from dataclasses import dataclass

from gradsieve.lab.papers.entry import Context, Outcome
from gradsieve.lab.papers.sahu2021.benchmark import Benchmark, Judged
from gradsieve.lab.papers.sahu2021.figures2and11 import draw
from gradsieve.lab.papers.sahu2021.methods import Stages, data_of, epoch_results, make_all, ratio, waited
from gradsieve.lab.papers.summary import Comparison


@dataclass(frozen=True)
class Volume:
    """Thresholds, and then top-k at the densities that they came to."""

    key: str
    benchmark: Benchmark

    def stages(self, context: Context) -> Stages:
        run, rules = self.benchmark, self._thresholds(context)
        yield [arm for rule in ("dense", *rules) for arm in run.arms(context, rule)]
        yield [arm for rule in rules for arm in run.arms(context, run.equal_topk(context, rule))]

    def _thresholds(self, context: Context) -> list[str]:
        return [self.benchmark.threshold(context, printed) for printed in self.benchmark.thresholds]

    def __call__(self, context: Context) -> Outcome:
        make_all(context, self.stages(context))
        run, rules = self.benchmark, self._thresholds(context)
        dense = run.made(context, "dense")
        hard = [run.made(context, rule) for rule in rules]
        top = [run.made(context, run.equal_topk(context, rule)) for rule in rules]
        rows = Comparison(self.key)
        rows.against("parameters", dense.runs[0].about.parameters, run.why(context, dense))
        for printed, rule, method in zip(run.thresholds, rules, hard, strict=True):
            rows.against(f"density_{printed:g}", method.density, f"{rule}; {run.why(context, method)}")
        rows.alone(f"no compression: {run.measure}", dense.accuracy, run.why(context, dense))
        leads = [self._compare(rows, *pair, dense) for pair in zip(hard, top, strict=True)]
        self._claim(rows, leads)
        methods: dict[str, Judged] = {"no compression": dense}
        methods |= {f"hard {rule}": method for rule, method in zip(rules, hard, strict=True)}
        methods |= {f"top-k at the density of {rule}": method for rule, method in zip(rules, top, strict=True)}
        waited(rows, methods.values())
        figure = draw(dense, {"hard threshold": [*hard], "top-k": [*top]}, run.note(context, dense))
        figure.axes[0].set_ylabel(run.measure)
        pairs = zip(epoch_results(methods), self._values(methods), strict=True)
        results = [{**row, run.measure: value} for row, value in pairs]
        return Outcome(figure, rows.rows, results, data_of(dense), run.notes(dense))

    def _values(self, methods: dict[str, Judged]) -> list[float]:
        return [value for method in methods.values() for run in method.runs for value in method.judge(run.epochs)]

    def _compare(self, rows: Comparison, hard: Judged, top: Judged, dense: Judged) -> float:
        run, at = self.benchmark, f"at {hard.density:.3g}%"
        spread = f"standard deviations {hard.deviation:.2g} and {top.deviation:.2g}, {hard.label}"
        sent = f"top-k sent {top.density:.3g}%"
        lead = run.ahead(hard.accuracy, top.accuracy)
        rows.alone(f"hard threshold {at}: {run.measure}", hard.accuracy)
        rows.alone(f"hard threshold {at}: better than top-k by, {run.unit}", lead, f"{sent}; {spread}")
        rows.alone(
            f"hard threshold {at}: better than no compression by, {run.unit}",
            run.ahead(hard.accuracy, dense.accuracy),
        )
        if run.lower_is_better:
            rows.alone(
                f"hard threshold {at}: better than top-k by, {run.unit}, each at its best epoch",
                run.ahead(hard.best, top.best),
                f"{hard.best:.4g} and {top.best:.4g}; without compression {dense.best:.4g}",
            )
        rows.alone(f"total error {at}: top-k over hard threshold", ratio(top.error, hard.error))
        return lead

    def _claim(self, rows: Comparison, leads: list[float]) -> None:
        """The paper's sentence: of the lowest density for perplexity, of all densities for the hit rate."""
        if self.benchmark.lower_is_better:
            rows.against("ahead", leads[0])
        else:
            rows.against("ahead", min(leads), "the least over all densities")
