"""Figure 4: seconds of an operator by the size of the vector, as published and ours."""

from datetime import UTC, datetime

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gradsieve import ops
from gradsieve.lab.bench.clock import Clock
from gradsieve.lab.bench.contenders import Bench
from gradsieve.lab.bench.machine import machine
from gradsieve.lab.bench.ops import Row, rows_of
from gradsieve.lab.papers import plots
from gradsieve.lab.papers.entry import Context, Outcome
from gradsieve.lab.papers.shi2019.gradients import DENSITY
from gradsieve.lab.papers.shi2019.operators import COLD, OURS, PUBLISHED, YARDSTICK, contenders, kept
from gradsieve.lab.papers.summary import Comparison

Timed = dict[tuple[int, str], Row]
Kept = dict[tuple[int, str], int]


def sizes(context: Context) -> list[int]:
    """A GPU is busy only with vectors that a CPU takes too long for."""
    if context.quick:
        return [1 << 14, 1 << 16]
    low, high = (20, 28) if context.device == "cuda" else (16, 24)
    return [1 << power for power in range(low, high + 1, 2)]


def figure4(context: Context) -> Outcome:
    timed: Timed = {}
    counts: Kept = {}
    notes: list[str] = []
    wanted = sizes(context)
    for done, size in enumerate(wanted, start=1):
        rows, found, wrong = measure(size, context)
        timed |= {(size, row.op): row for row in rows}
        counts |= {(size, name): count for name, count in found.items()}
        notes += [f"{name}: differs from the reference at n = {size:,}, no figure" for name in wrong]
        context.track("operators", done, len(wanted), f"n = {size:,}")
    where = machine(context.device) + ("" if context.device == "cuda" else "; the paper's figure is of a GPU")
    note = f"k = 0.001 n, Gaussian vector; memory + gradient, selection, memory's update; {where}"
    return Outcome(
        draw(timed, note), compare(timed, counts).rows, _results(timed, counts), "drawn vectors", [note, *notes]
    )


def measure(size: int, context: Context) -> tuple[list[Row], dict[str, int], list[str]]:
    """Times of all that agree with the reference, what each sends, and the names of those that do not agree."""
    device = torch.device(context.device)
    clock = Clock(device, "wall")
    everyone = contenders(Bench(ops.of(torch.empty(0, device=device)), size, DENSITY, device))
    wrong = [name for name, contender in everyone.items() if not contender.check()]
    timed = {name: contender for name, contender in everyone.items() if name not in wrong}
    counts = {name: kept(contender) for name, contender in timed.items() if name != YARDSTICK}
    for _ in range(3 if context.quick else 25):
        for contender in timed.values():
            contender.prepare()
            clock(contender)
    rows = rows_of(
        timed,
        False,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine(context.device),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        clock="events" if device.type == "cuda" else "wall",
        n=size,
        density=DENSITY,
        triton=ops.triton_version() if device.type == "cuda" else None,
    )
    return rows, counts, wrong


def compare(timed: Timed, counts: Kept) -> Comparison:
    """The claims, at the largest size."""
    rows = Comparison("shi2019/fig4")
    rows.against("density", DENSITY)
    size = max(n for n, _ in timed)
    ms = {name: row.median_ms for (n, name), row in timed.items() if n == size}
    rows.against("faster", ms["top-k"] / ms["Gaussian-k"], f"both as published, n = {size:,}")
    rows.alone("time: DGC-k over Gaussian-k, both as published", ms["DGC-k"] / ms["Gaussian-k"])
    for name in PUBLISHED:
        rows.alone(f"time: {name} as published over e.add_(g)", ms[name] / ms[YARDSTICK], _sends(name, size, counts))
    for ours, theirs in zip(OURS, PUBLISHED, strict=True):
        for name in (ours, ours + COLD):
            if name in ms:
                rows.alone(f"time: {name} over e.add_(g)", ms[name] / ms[YARDSTICK], _sends(name, size, counts))
                rows.alone(f"time: {theirs} as published over {name}", ms[theirs] / ms[name])
    return rows


def _sends(name: str, size: int, counts: Kept) -> str:
    return f"sends {counts[size, name] / max(1, round(size * DENSITY)):.2f} k"


def _results(timed: Timed, counts: Kept) -> list[dict[str, float | int | str]]:
    return [
        {
            "operator": name,
            "elements": size,
            "seconds": row.median_ms / 1e3,
            "quartile_1": row.q1_ms / 1e3,
            "quartile_3": row.q3_ms / 1e3,
            "over_add": row.ratio,
            "host_seconds": "" if row.host_ms is None else row.host_ms / 1e3,
            "sent_over_k": "" if name == YARDSTICK else counts[size, name] / max(1, round(size * DENSITY)),
            "machine": row.machine,
            "clock": row.clock,
        }
        for (size, name), row in timed.items()
    ]


def draw(timed: Timed, note: str) -> Figure:
    with plots.style():
        figure, axes = plots.panels(2, note, columns=2, height=4.2)
        for part, title in zip(axes, ("as published", "ours"), strict=True):
            _line(part, timed, YARDSTICK, "e.add_(g)", plots.BASELINE, ":")
            part.set(title=title, xlabel="number of elements", ylabel="seconds", xscale="log")
            plots.logarithmic(part)
        for name, own, colour in zip(PUBLISHED, OURS, plots.COLOURS, strict=False):
            _line(axes[0], timed, name, name, colour, "-")
            _line(axes[1], timed, own, own, colour, "-")
            _line(axes[1], timed, own + COLD, own + COLD, colour, "--")
        axes[1].sharey(axes[0])
        return plots.finish(figure, axes)


def _line(axes: Axes, timed: Timed, name: str, label: str, colour: str, dash: str) -> None:
    points = sorted((size, row.median_ms / 1e3) for (size, op), row in timed.items() if op == name)
    if points:
        axes.plot(*zip(*points, strict=True), dash, marker=".", color=colour, label=label)
