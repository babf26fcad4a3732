"""Figures 2a and 11: accuracy against average density, ResNet-18 on CIFAR-10; layer-wise and entire-model top-k."""

from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from gradsieve.lab.papers import plots
from gradsieve.lab.papers.entry import Context, Outcome
from gradsieve.lab.papers.sahu2021 import cifar
from gradsieve.lab.papers.sahu2021.cifar import arms, equal_topk, made
from gradsieve.lab.papers.sahu2021.methods import Method, Stages, data_of, epoch_results, make_all, ratio, waited
from gradsieve.lab.papers.summary import Comparison

THRESHOLDS = (0.012, 0.0072, 0.005)  # of Table 2, for 0.03%, 0.06%, 0.12%
MUCH = "topk:0.0075"  # with which the paper compares the last of them: six times the data


@dataclass(frozen=True)
class View:
    """What differs between the two figures: what top-k chooses from."""

    key: str
    scope: str
    name: str

    def stages(self, context: Context) -> Stages:
        thresholds = [arm for value in THRESHOLDS for arm in arms(context, f"threshold:{value}")]
        much = arms(context, MUCH) if self.scope == "layer" else []
        yield [*arms(context, "dense"), *thresholds, *much]
        yield [arm for value in THRESHOLDS for arm in equal_topk(context, f"threshold:{value}", self.scope)]

    def __call__(self, context: Context) -> Outcome:
        make_all(context, self.stages(context))
        dense = made(context, arms(context, "dense"))
        hard = {value: made(context, arms(context, f"threshold:{value}")) for value in THRESHOLDS}
        top = {value: made(context, equal_topk(context, f"threshold:{value}", self.scope)) for value in THRESHOLDS}
        rows = Comparison(self.key)
        rows.against("parameters", dense.runs[0].about.parameters)
        rows.against("baseline", dense.accuracy, cifar.reasons(context))
        for value in THRESHOLDS:
            rows.against(f"density_{value}", hard[value].density, cifar.reasons(context))
        for value in THRESHOLDS:
            self._compare(rows, hard[value], top[value], first=value == THRESHOLDS[0])
        named = {"no compression": dense}
        named |= {f"hard threshold {value}": method for value, method in hard.items()}
        named |= {f"{self.name} at the density of {value}": method for value, method in top.items()}
        densest = hard[THRESHOLDS[-1]]
        rows.alone(
            f"no compression less hard threshold at {densest.density:.3g}%: points of accuracy",
            dense.accuracy - densest.accuracy,
            'at the paper\'s 0.12% the threshold "almost achieves the baseline accuracy"',
        )
        shown = [*top.values()]
        if self.scope == "layer":
            much = named["top-k 0.75%"] = made(context, arms(context, MUCH))
            shown.append(much)
            rows.alone(
                f"hard threshold at {densest.density:.3g}% less top-k at {much.density:.3g}%: points of accuracy",
                densest.accuracy - much.accuracy,
                "the paper: better at 0.12% than top-k with 6 times the data",
            )
        waited(rows, named.values())
        figure = draw(dense, {"hard threshold": [*hard.values()], self.name: shown}, cifar.note(context, dense))
        return Outcome(figure, rows.rows, epoch_results(named), data_of(dense), cifar.notes(context))

    def _compare(self, rows: Comparison, hard: Method, top: Method, *, first: bool) -> None:
        spread = f"standard deviations {hard.deviation:.2f} and {top.deviation:.2f}, {hard.label}"
        sent = f"top-k sent {top.density:.3g}%"
        if first and self.scope == "global":
            rows.against("ahead", hard.accuracy - top.accuracy, f"at {hard.density:.3g}%; {sent}; {spread}")
        else:
            rows.alone(
                f"hard threshold less {self.name} at {hard.density:.3g}%: points of accuracy",
                hard.accuracy - top.accuracy,
                f"the paper: above top-k at every density; {sent}; {spread}",
            )
        rows.alone(
            f"total error at {hard.density:.3g}%: {self.name} over hard threshold",
            ratio(top.error, hard.error),
        )


def draw(dense: Method, methods: Mapping[str, list[Method]], note: str) -> Figure:
    with plots.style():
        bars = "; bars: standard deviation over seeds" if len(dense.runs) > 1 else ""
        figure, (axes,) = plots.panels(1, note + bars, height=4.2)
        axes.axhline(dense.accuracy, linestyle="--", color=plots.BASELINE, label="no compression")
        for (name, unordered), colour in zip(methods.items(), plots.COLOURS, strict=False):
            points = sorted(unordered, key=lambda method: method.density)
            axes.errorbar(
                [point.density for point in points],
                [point.accuracy for point in points],
                [point.deviation for point in points],
                marker="o",
                capsize=3,
                color=colour,
                label=name,
            )
        axes.set(xlabel="average density (%)", ylabel="test accuracy (%)")
        densities(axes, [point.density for points in methods.values() for point in points])
        return plots.finish(figure, [axes])


def densities(axes: Axes, found: list[float]) -> None:
    """A log axis with the densities of the points as its ticks, less those that would overlap."""
    ticks: list[float] = []
    for density in sorted(found):
        if not ticks or density > 1.3 * ticks[-1]:
            ticks.append(density)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
