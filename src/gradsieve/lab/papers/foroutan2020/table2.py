"""Table 2: where the time of a training step goes, layer scope, eight real processes."""

from collections.abc import Mapping
from statistics import median

from matplotlib.figure import Figure

from gradsieve.lab.bench.machine import machine
from gradsieve.lab.papers import plots
from gradsieve.lab.papers.entry import Context, Outcome
from gradsieve.lab.papers.foroutan2020.breakdown import ADDED, Breakdown, link, measure
from gradsieve.lab.papers.foroutan2020.configurations import ALL, DENSITY, SGD, SPARSE
from gradsieve.lab.papers.foroutan2020.rank import ALONE, PARTS
from gradsieve.lab.papers.summary import Comparison

KEY = "foroutan2020/table2"
NAMES = {ALONE: "No exchange"} | {kind.key: kind.name for kind in ALL}


def run(context: Context) -> Outcome:
    net, workers, batch, rounds = ("a small net", 2, 4, 3) if context.quick else ("ResNet-18", 8, 128, 5)
    over, reason = link(context.quick)
    context.track("ranks", 0, 1, f"{workers} processes, {over}")
    found = measure(net, workers, batch, rounds, over)
    context.track("ranks", 1, 1, f"{workers} processes, {over}")
    note = f"{net}, {batch} examples a worker, layer scope, k = 1%; {machine()}, {workers} gloo processes, {over}"
    rows = compare(found, workers, batch)
    return Outcome(draw(found, note), rows.rows, _results(found), "drawn images", [note, *filter(None, [reason])])


def compare(found: Mapping[str, Breakdown], workers: int, batch: int) -> Comparison:
    """The claims. Computing is the same work in all: its median over all makes a step, so that its noise does not."""
    rows = Comparison(KEY)
    rows.against("workers", workers)
    rows.against("batch", batch)
    rows.against("density", DENSITY)
    computing = {key: own.computing for key, own in found.items()}
    common = median(computing.values())
    step = {kind.key: common + found[kind.key].added for kind in ALL}
    most = 100 * found[SGD.key].added / step[SGD.key]
    for kind in SPARSE:
        why = f"of a step of standard SGD {most:.1f}% is what the exchange adds: no configuration can save more here"
        rows.against(kind.key, step[kind.key] / step[SGD.key], why)
    rows.against(
        "constant", max(computing.values()) / min(computing.values()), "the noise of processes that share cores"
    )
    for kind in ALL:
        own = found[kind.key]
        coding = (own.parts["coding"] + own.parts["decoding"]) / step[kind.key]
        rows.alone(f"{kind.name}: share of forward and backward", common / step[kind.key])
        rows.alone(f"{kind.name}: share of the exchange", own.parts["exchange"] / step[kind.key])
        rows.alone(f"{kind.name}: share of coding and decoding", coding)
        why = f"{own.added:.3g} ms, quartiles {own.low:.3g} to {own.high:.3g}"
        rows.alone(f"{kind.name}: what it adds to computing, over Standard SGD", own.added / found[SGD.key].added, why)
    return rows


def _results(found: Mapping[str, Breakdown]) -> list[dict[str, float | int | str]]:
    return [
        {
            "configuration": NAMES[key],
            "part": part,
            "milliseconds": own.parts[part],
            "added_quartile_1": own.low,
            "added_quartile_3": own.high,
        }
        for key, own in found.items()
        for part in PARTS
    ]


def draw(found: Mapping[str, Breakdown], note: str) -> Figure:
    """Stacked bars: a whole step, and what is added to computing, which may dwarf it."""
    shown = tuple(part for part in PARTS if part != "waiting")
    colours = dict(zip(shown, plots.COLOURS, strict=False))
    names = [kind.name for kind in ALL]
    with plots.style():
        figure, axes = plots.panels(2, note, columns=2, height=4.0)
        for panel, parts in zip(axes, (shown, ADDED), strict=True):
            left = [0.0] * len(names)
            for part in parts:
                widths = [found[kind.key].parts[part] for kind in ALL]
                panel.barh(names, widths, 0.7, left=left, color=colours[part], label=part)
                left = [start + width for start, width in zip(left, widths, strict=True)]
            panel.invert_yaxis()
            panel.set_xlabel("ms a step")
        axes[0].set_title("a step")
        axes[1].set_title("of it: coding, exchange, decoding")
        axes[1].set_yticklabels([])
        return plots.finish(figure, axes)
