"""results -> report.html: one file, no network, readable on a phone, by day and by night."""

import shlex
from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from gradsieve.lab.records import Run
from gradsieve.lab.report import charts
from gradsieve.lab.style import COLOURS
from gradsieve.lab.summary import Line, number, percent, seconds, size, summarise, times


def page(runs: Sequence[Run]) -> str:
    """The report of ``runs``; everything that comes from a result is escaped by the template."""
    environment = Environment(
        loader=PackageLoader("gradsieve.lab.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(percent=percent, size=size, times=times, number=number, seconds=seconds)
    lines = summarise(runs)
    return environment.get_template("report.html.j2").render(
        about=runs[0].about,
        title=runs[0].about.title or "comparison",
        lines=lines,
        headline=headline(lines),
        colours=COLOURS,
        legend=[(run.about.run, index % len(COLOURS), charts.dash(index) != "-") for index, run in enumerate(runs)],
        notes=[(line.name, line.note) for line in lines if line.note],
        unfinished=[line for line in lines if not line.finished],
        # matplotlib writes the SVG, and no run's name is in it.
        charts=[(chart, Markup(charts.drawing(chart, runs))) for chart in charts.CHARTS],
        command=command(runs),
    )


def headline(lines: Sequence[Line]) -> str:
    """The result in a sentence: the most accurate of the rules that sent at least 10x fewer bytes than dense."""
    dense = next((line for line in lines if line.rule.startswith("Dense")), None)
    thrifty = [line for line in lines if line.accuracy is not None and (line.times_less or 0.0) >= 10.0]
    if not thrifty:
        return ""
    best = max(thrifty, key=lambda line: (line.accuracy or 0.0, line.times_less or 0.0))
    sentence = f"{best.name} sent {times(best.times_less)} fewer bytes than dense and reached {percent(best.accuracy)}"
    if dense is None or dense.accuracy is None:
        return sentence + "."
    return f"{sentence}, where dense reached {percent(dense.accuracy)}."


def command(runs: Sequence[Run]) -> str:
    """The command line that runs this comparison again."""
    about = runs[0].about
    parts = ["gradsieve", "compare", "--task", about.task, "--workers", str(about.workers)]
    for run in runs:
        parts += ["--rule", run.about.run]
    parts += ["--epochs", str(about.epochs), "--seed", str(about.seed), "--batch-size", str(about.batch_size)]
    parts += ["--lr", f"{about.lr:g}", "--scope", about.scope, "--feedback", about.feedback]
    parts += ["--exchange", about.exchange, "--values", about.values]
    parts += [] if about.strict else ["--no-strict"]
    parts += [] if about.launch == "virtual" else ["--launch", about.launch]
    parts += [] if about.device == "cpu" else ["--device", about.device]
    parts += ["--compile"] if about.compiled else []
    return shlex.join(parts)
