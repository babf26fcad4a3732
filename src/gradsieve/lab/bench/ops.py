"""Every op against the floor that memory sets, e.add_(g), and against what peers do. Checks first, then times.

    gradsieve bench ops --device cpu --sizes 11200000 --densities 0.001 0.01 --out benchmarks/results/ops.jsonl
    gradsieve bench ops --device cuda --sizes 124000000 --networks ResNet-50 'GPT-2 small'

All contenders of one size run in random order, again and again, memory restored before each; ratios are of medians
within one run. An op that does not agree with ops.reference gets no figure. On CUDA the device is kept busy while
launches queue up, as it is in a backward pass: times are the device's, and what a call takes on the host stands beside
them.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any, NoReturn

import torch
from matplotlib import colormaps, rc_context
from matplotlib.figure import Figure

from gradsieve import ops
from gradsieve.lab.bench.clock import Clock
from gradsieve.lab.bench.contenders import Bench, Contender
from gradsieve.lab.bench.machine import machine
from gradsieve.lab.bench.sequence import UNTIMED, sequence
from gradsieve.lab.bench.shapes import NETWORKS, tensors
from gradsieve.lab.style import LOOK


@dataclass(frozen=True)
class Row:
    """One figure: ``ratio`` is the median over that of ``against``, in the same run."""

    date: str
    machine: str
    torch: str
    threads: int
    clock: str
    op: str
    n: int
    density: float
    against: str
    median_ms: float
    q1_ms: float
    q3_ms: float
    ratio: float
    host_ms: float | None = None  # of one call, on CUDA
    extra_bytes: float | None = None  # on CUDA: scratch and payload at most, a coordinate
    triton: str | None = None
    network: str | None = None  # whose tensors these are


def rows_of(contenders: dict[str, Contender], average: bool, **common: Any) -> list[Row]:
    """Medians; averages where single steps differ by what they have to do."""
    rows = []
    middle = (lambda times: sum(times) / len(times)) if average else median
    for name, contender in contenders.items():
        q1, _, q3 = quantiles(contender.times, n=4)
        rows.append(
            Row(
                op=name,
                against=contender.against,
                median_ms=1e3 * middle(contender.times),
                q1_ms=1e3 * q1,
                q3_ms=1e3 * q3,
                ratio=middle(contender.times) / middle(contenders[contender.against].times),
                host_ms=1e3 * median(contender.host) if contender.host else None,
                extra_bytes=None if contender.extra is None else contender.extra / common["n"],
                **common,
            )
        )
    return rows


def measure(
    size: int,
    density: float,
    device: torch.device,
    repeats: int,
    steps: int,
    clock_kind: str,
    network: str | None = None,
) -> list[Row]:
    """All ops at one size, or those by layers over the tensors of a network."""
    module = ops.of(torch.empty(0, device=device))
    clock = Clock(device, clock_kind)
    common = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine(device.type),
        "torch": torch.__version__, "threads": torch.get_num_threads(), "clock": clock_kind, "n": size,
        "density": density, "triton": ops.triton_version() if device.type == "cuda" else None, "network": network,
    }  # fmt: skip
    bench = Bench(module, size, density, device, layers=tensors(network) if network else None)
    contenders = bench.layer_wise() if network else bench.contenders()
    for name in [name for name, contender in contenders.items() if not contender.check()]:
        print(f"{name}: differs from the reference at n = {size}, density = {density}: no figure")
        del contenders[name]
    for contender in contenders.values():
        clock.weigh(contender)
    order = Random(0)  # what ran before leaves caches and pages behind
    for _ in range(repeats):
        for contender in order.sample(list(contenders.values()), len(contenders)):
            contender.prepare()
            clock(contender)
    rows = rows_of(contenders, False, **common)
    rules: dict[str, tuple[int, ...]] = {"topk": (), "gaussiank": (), "sampledk": (100, 7)}
    for name, extra in rules.items() if steps and not network else ():
        trained = sequence(name, extra, module, size, density, device, steps, clock)
        rows += [row for row in rows_of(trained, True, **common) if row.op != "add"]
        if not trained:
            print(f"{name} sequence: differs from the reference at n = {size}, density = {density}: no figure")
    return rows


def table(rows: Sequence[Row]) -> None:
    """One for each size and density, narrow enough for 80 columns."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console.print(f"{rows[0].machine}, threads: {rows[0].threads}")
    for n, network, density in dict.fromkeys((row.n, row.network, row.density) for row in rows):
        of = f"n = {n:,}" if network is None else f"the tensors of {network}"
        out = Table(title=f"{of}, density {density:g}", title_justify="left", box=SIMPLE_HEAD)
        for heading in ("op", "ms", "quartiles", "ratio", "to"):
            out.add_column(heading, justify="left" if heading in ("op", "to") else "right")
        for row in rows:
            if (row.n, row.network, row.density) == (n, network, density):
                quartiles = f"{row.q1_ms:.2f} to {row.q3_ms:.2f}"
                out.add_row(row.op, f"{row.median_ms:.2f}", quartiles, f"{row.ratio:.2f}", row.against)
        console.print(out)


@rc_context(LOOK)
def plot(rows: Sequence[Row], path: Path) -> None:
    """A row an op, a point a size or network, a panel a density."""
    names = [name for name in dict.fromkeys(row.op for row in rows) if name not in ("add", "zero")]
    densities = sorted({row.density for row in rows})
    sizes = sorted({(row.network or "", row.n) for row in rows})
    shades = colormaps["viridis"].resampled(len(sizes) + 1)
    figure = Figure(figsize=(3 + 3.5 * len(densities), 0.3 * len(names) + 2), layout="constrained")
    panels = figure.subplots(1, len(densities), sharey=True, squeeze=False)[0]
    for axes, density in zip(panels, densities, strict=True):
        for i, (network, n) in enumerate(sizes):
            key = network or None, n, density
            shown = [row for row in rows if (row.network, row.n, row.density) == key and row.op in names]
            ratios, heights = [row.ratio for row in shown], [names.index(row.op) for row in shown]
            marker, label = "D" if network else "o", network or f"n = {n:,}"
            axes.plot(ratios, heights, marker, color=shades(i), label=label, markersize=5, alpha=0.85)
        axes.axvline(1.0, color="black", linewidth=0.8)
        axes.set(title=f"density {density:g}", xscale="log", xlabel="time over its floor")
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    floor = "floor: e.add_(g); for decode, zeroing its output; for a threshold by layers, the flat call"
    figure.supxlabel(floor, fontsize=8)
    figure.savefig(path, dpi=150)


class _Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Examples as they stand, and every default."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"gradsieve: {message}\n")


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"takes a whole number of at least {least}, not {text!r}")
        return int(text)

    return number


def density(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"takes a number above 0 and up to 1, not {text!r}")
    return value


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="gradsieve bench ops", description=__doc__, formatter_class=_Help)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where the ops run")
    parser.add_argument("--sizes", type=at_least(1), nargs="+", default=[1_000_000, 11_200_000], help="coordinates")
    parser.add_argument(
        "--networks", nargs="+", default=[], choices=list(NETWORKS), help="their tensors, layer by layer"
    )
    parser.add_argument("--densities", type=density, nargs="+", default=[0.001, 0.01], help="shares that are kept")
    parser.add_argument("--repeats", type=at_least(2), default=25, help="of every op, in random order")
    parser.add_argument("--steps", type=at_least(0), default=200, help="of the trainings with feedback; 0: none")
    parser.add_argument("--threads", type=at_least(1), default=1, help="of the CPU")
    parser.add_argument("--clock", default="wall", choices=["wall", "thread"], help="thread: on a shared machine")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ops.jsonl"),
                        help="rows are appended here, and drawn beside it")  # fmt: skip
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("device cuda: PyTorch finds no GPU here")
    least = UNTIMED[options.device] + 2
    if 0 < options.steps < least:
        parser.error(f"argument --steps: takes 0 or at least {least} on {options.device}, not {options.steps}")
    return options


def main(argv: Sequence[str] | None = None) -> list[Row]:
    options = parsed(argv)
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    rows: list[Row] = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    jobs: list[tuple[int, str | None]] = [(size, None) for size in options.sizes]
    jobs += [(tensors(network).size, network) for network in options.networks]
    for size, network in jobs:
        for density in options.densities:
            new = measure(size, density, device, options.repeats, options.steps, options.clock, network)
            with options.out.open("a") as file:
                file.writelines(json.dumps(asdict(row)) + "\n" for row in new)
            rows += new
    table(rows)
    plot(rows, options.out.with_name(f"{options.out.stem}-{options.device}.png"))
    return rows


if __name__ == "__main__":
    main()
