"""``gradsieve bench step``: every way to exchange gradients, over links of several speeds, as a table and a plot."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import cycle
from pathlib import Path

from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.table import Table

from gradsieve.lab.bench.start import links
from gradsieve.lab.bench.step import OURS, Row, measure
from gradsieve.lab.bench.ways import PEERS, check
from gradsieve.lab.errors import LabError
from gradsieve.lab.style import LOOK

LINKS = ("unshaped", "1gbit", "100mbit", "10mbit")


def run(
    workers: Sequence[int],
    wanted: Sequence[str],
    out: Path,
    tell: Callable[[str], None],
    *,
    ways: Sequence[str] = (*PEERS, *OURS),
    rounds: int = 8,
    seconds: float = 20.0,
    bucket_view: bool = False,
) -> list[Row]:
    """Measure all ways for each number of workers over each link; rows are appended to ``out`` as they come."""
    possible, reason = links(wanted)
    for way in ways:
        check(way)
    if reason:
        tell(f"no shaped links here ({reason}); measuring loopback")
    rows: list[Row] = []
    for count in workers:
        for link in possible:
            tell(f"{count} workers, {link}: {len(ways)} ways")
            found = measure(count, link, ways, rounds=rounds, seconds=seconds, bucket_view=bucket_view)
            append(found, out)
            rows += found
    return rows


def append(rows: Sequence[Row], path: Path) -> None:
    """Results are appended, never overwritten: machine and date stand in each row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(asdict(row)) + "\n")


def read(path: Path) -> list[Row]:
    """The newest row of each way and setting."""
    newest: dict[tuple[str, str], Row] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise LabError(f"cannot read {path}: {error.strerror}") from error
    for line in lines:
        row = Row(**json.loads(line))
        newest[row.setting, row.way] = row
    return list(newest.values())


def tables(rows: Sequence[Row]) -> list[Table]:
    """One table for each setting, narrow enough for 80 columns. ``x nothing``: over ``no exchange``."""
    shown = []
    for setting in dict.fromkeys(row.setting for row in rows):
        table = Table(title=f"{setting}: ms a step", title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
        for heading in ("way", "ms", "quartiles", "kB sent", "density", "x dense", "x nothing"):
            table.add_column(heading, justify="left" if heading == "way" else "right", no_wrap=True)
        for row in rows:
            if row.setting == setting:
                table.add_row(*_cells(row))
        shown.append(table)
    return shown


def markdown(rows: Sequence[Row]) -> str:
    """The same as Markdown, for a document."""
    parts = []
    for setting in dict.fromkeys(row.setting for row in rows):
        parts += [f"**{setting}**", ""]
        parts.append("| way | ms a step | quartiles | kB sent | density | x dense | x no exchange |")
        parts.append("| --- " + "| ---: " * 6 + "|")
        chosen = [row for row in rows if row.setting == setting]
        parts += ["| " + " | ".join(_cells(row)) + " |" for row in chosen] + [""]
    return "\n".join(parts)


def profile(rows: Sequence[Row]) -> str:
    """Where a step's time goes, as Markdown: each phase as a part of the dense step of the same run.

    If nothing overlapped, a step would take the sum of ``no exchange`` and its phases; ``hidden`` is the share of
    the phases that the backward pass covers.
    """
    parts = []
    for setting in dict.fromkeys(row.setting for row in rows):
        chosen = {row.way: row for row in rows if row.setting == setting}
        if not {"dense", "no exchange"} <= chosen.keys():
            continue
        dense, alone = chosen["dense"].ms, chosen["no exchange"].ms
        parts += [f"**{setting}** (dense: {dense:.1f} ms)", ""]
        parts.append("| way | backward | coding | exchange | decoding | step | hidden |")
        parts.append("| --- " + "| ---: " * 6 + "|")
        for way, row in chosen.items():
            if row.phases:
                phases = [row.phases[phase] for phase in ("coding", "exchange", "decoding")]
                hidden = 1 - (row.ms - alone) / sum(phases)
                cells = [f"{ms / dense:.3f}" for ms in (alone, *phases, row.ms)]
                parts.append(f"| {way} | " + " | ".join(cells) + f" | {hidden:.0%} |")
        parts.append("")
    return "\n".join(parts)


@rc_context(LOOK)
def plot(rows: Sequence[Row], path: Path) -> None:
    """Milliseconds a step over the link's speed, a line a way, a panel for each number of workers and layout."""
    ways = list(dict.fromkeys(row.way for row in rows))
    paired = colormaps["tab20"].colors  # type: ignore[attr-defined]
    colours = dict(zip(ways, cycle([*paired[::2], *paired[1::2]]), strict=False))
    panels = list(dict.fromkeys((row.workers, row.bucket_view) for row in rows))
    reached = list(dict.fromkeys(row.link for row in rows))
    figure = Figure(figsize=(6 * len(panels), 4.5), layout="constrained")
    for panel, (workers, bucket_view) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), panel + 1)
        for way in ways:
            chosen = [row for row in rows if (row.way, row.workers, row.bucket_view) == (way, workers, bucket_view)]
            of_way = {row.link: row for row in sorted(chosen, key=lambda row: reached.index(row.link))}
            ours = way not in PEERS
            axes.plot(
                [reached.index(link) for link in of_way],
                [row.ms for row in of_way.values()],
                color=colours[way],
                marker="o" if ours else "s",
                linewidth=2.0 if ours else 1.0,
                linestyle="-" if ours else "--",
                label=way,
            )
        axes.set_yscale("log")
        axes.set_xticks(range(len(reached)), reached)
        axes.set_title(f"{workers} workers{', gradients as bucket views' if bucket_view else ''}")
        axes.set_xlabel("link")
        axes.set_ylabel("ms a step")
    figure.axes[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)


def _milliseconds(value: float) -> str:
    return f"{value:.1f}" if value < 1000 else f"{value:,.0f}"


def _cells(row: Row) -> list[str]:
    def shown(value: float | None, form: str) -> str:
        return "" if value is None else format(value, form)

    return [
        row.way,
        _milliseconds(row.ms),
        f"{_milliseconds(row.low)} to {_milliseconds(row.high)}",
        f"{row.sent / 1e3:,.0f}",
        shown(row.density, ".2%"),
        shown(row.over_dense, ".3f"),
        shown(row.over_nothing, ".2f" if (row.over_nothing or 0) < 100 else ",.0f"),
    ]
