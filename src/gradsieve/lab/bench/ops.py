"""Every op against the floor that memory sets, ``e.add_(g)``, and against what peers do. Checks first, then times.

``gradsieve bench ops --device cpu --sizes 11200000 --densities 0.001 0.01 --out benchmarks/results/ops.jsonl``

All contenders of one size run in random order, again and again, memory restored before each; ratios are of medians
within one run. An op that does not agree with ``ops.reference`` gets no figure. On CUDA the device is kept busy while
launches queue up, as it is in a backward pass: times are the device's, and what a call takes on the host stands beside
them.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import accumulate
from math import prod
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor

from gradsieve import ops
from gradsieve.lab.bench.machine import machine
from gradsieve.lab.bench.shapes import resnet18
from gradsieve.ops import Ops, reference
from gradsieve.types import Pending, Segments

WORKERS = 8  # of a decode
KEY = 20_200_101


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


@dataclass
class Contender:
    """``run`` is timed, ``prepare`` before it is not; ``check`` says whether the op may report a figure."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    check: Callable[[], bool] = lambda: True
    against: str = "add"
    payload: int | None = None  # bytes
    times: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    extra: int | None = None


class Clock:
    """Seconds of one call: the device's, or else wall time, or the thread's own where neighbours share the cores."""

    def __init__(self, device: torch.device, kind: str) -> None:
        self.device = device
        self.now = time.thread_time if kind == "thread" else time.perf_counter

    def __call__(self, contender: Contender) -> None:
        if self.device.type == "cuda":
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(self.device)
            torch.cuda._sleep(3_000_000)  # type: ignore[no-untyped-call]
            start.record()
            began = self.now()
            contender.run()
            contender.host.append(self.now() - began)
            stop.record()
            stop.synchronize()
            contender.times.append(float(start.elapsed_time(stop)) / 1e3)
        else:
            began = self.now()
            contender.run()
            contender.times.append(self.now() - began)

    def weigh(self, contender: Contender) -> None:
        """The memory of one call at its peak, beyond what was there."""
        if self.device.type == "cuda" and contender.payload is not None:
            contender.prepare()
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            contender.run()
            contender.extra = torch.cuda.max_memory_allocated(self.device) - before + contender.payload


def resnet18_segments(size: int) -> Segments:
    """The 62 tensors of ResNet-18 for CIFAR, scaled so that they add up to ``size``."""
    bounds = list(accumulate((prod(shape) for shape in resnet18()), initial=0))
    return Segments(tuple(bound * size // bounds[-1] for bound in bounds), tuple(range(len(bounds) - 1)))


class Bench:
    """The contenders of one size and density on one device."""

    def __init__(self, module: Ops, size: int, density: float, device: torch.device, seed: int = 0) -> None:
        generator = torch.Generator(device).manual_seed(seed)
        self.module, self.size, self.device = module, size, device
        self.grad_Ln = torch.randn(1, size, generator=generator, device=device)
        self.start_Ln = torch.randn(1, size, generator=generator, device=device) * 0.1
        self.memory_Ln = self.start_Ln.clone()
        self.whole, self.layers = Segments((0, size), (0,)), resnet18_segments(size)
        self.k = max(1, round(size * density))
        self.threshold = float((self.start_Ln + self.grad_Ln).abs().flatten().topk(self.k).values[-1])
        self.into = reference.empty(1, size, self.k * 3 // 2 + 16, torch.float32, device)
        self.caches: dict[str, dict[str, Tensor]] = {}

    def restore(self) -> None:
        self.memory_Ln.copy_(self.start_Ln)

    def pending(self, name: str, segments: Segments, memory_Ln: Tensor) -> Pending:
        cache = self.caches.setdefault(name, {})
        return Pending(self.grad_Ln, memory_Ln, segments, into=self.into, cache=cache)

    def op(self, name: str, *arguments: object, segments: Segments | None = None, cold: bool = False) -> Contender:
        segments = segments or self.whole
        label = f"{name} {len(segments.keys)} {cold}"

        def prepare() -> None:
            self.restore()
            if cold:
                self.caches.pop(label, None)

        def run() -> object:
            return getattr(self.module, name)(self.pending(label, segments, self.memory_Ln), *arguments)

        def check() -> bool:
            return agree(name, self.pending(label, segments, self.start_Ln.clone()), self.module, arguments)

        parts = self.into.counts_LB, self.into.offsets_LK, self.into.values_LK
        return Contender(run, prepare, check, payload=sum(part.nbytes for part in parts))

    def contenders(self) -> dict[str, Contender]:
        layer_k = tuple(max(1, round(n * self.k / self.size)) if n else 0 for n in self.layers.sizes)
        span = torch.arange(self.size // 3, self.size // 3 + self.k, device=self.device)[None]
        keys_LS = torch.tensor([[KEY]], device=self.device)
        layered = self.op("threshold", self.threshold, segments=self.layers)
        layered.against = "threshold"
        return {
            "add": Contender(lambda: self.memory_Ln.add_(self.grad_Ln), self.restore),
            "peer threshold": Contender(self.plain_threshold, self.restore),
            "peer topk": Contender(self.plain_topk, self.restore),
            "threshold": self.op("threshold", self.threshold),
            "threshold layer-wise": layered,
            "topk cold": self.op("topk", (self.k,), cold=True),
            "topk repeated": self.op("topk", (self.k,)),
            "topk layer-wise repeated": self.op("topk", layer_k, segments=self.layers),
            "gaussiank repeated": self.op("gaussiank", (self.k,)),
            "sampledk repeated": self.op("sampledk", (self.k,), 100, 7),
            "gaussiank cold": self.op("gaussiank", (self.k,), cold=True),
            "sampledk cold": self.op("sampledk", (self.k,), 100, 7, cold=True),
            "randomk": self.op("randomk", (self.k,), keys_LS),
            "blockrandomk": self.op("take", span),
            **self.decoding(),
        }

    def plain_threshold(self) -> Tensor:
        """What peers do: accumulate, mask, nonzero, gather, zero."""
        memory_n = self.memory_Ln[0].add_(self.grad_Ln[0])
        index_K = (memory_n.abs() >= self.threshold).nonzero().squeeze(1)
        values_K = memory_n[index_K]
        memory_n[index_K] = 0.0
        return values_K

    def plain_topk(self) -> Tensor:
        memory_n = self.memory_Ln[0].add_(self.grad_Ln[0])
        index_K = memory_n.abs().topk(self.k, sorted=False).indices
        values_K = memory_n[index_K]
        memory_n[index_K] = 0.0
        return values_K

    def decoding(self) -> dict[str, Contender]:
        """Decode of 8 workers against zeroing the output."""
        out_n, expected_n = torch.empty(self.size, device=self.device), torch.empty(self.size, device=self.device)
        rows = [torch.randperm(self.size, device=self.device)[: self.k].sort().values for _ in range(WORKERS)]
        sparse = reference.empty(WORKERS, self.size, self.k, torch.float32, self.device)
        for worker, index_K in enumerate(rows):
            sparse.counts_LB[worker] = torch.bincount(index_K // 65_536, minlength=sparse.counts_LB.shape[1])
            sparse.offsets_LK[worker] = reference.to_int16(index_K % 65_536)
        sparse.values_LK.normal_()

        def check() -> bool:
            self.module.decode(sparse, out_n, float(WORKERS))
            return torch.equal(out_n, reference.decode(sparse, expected_n, float(WORKERS)))

        def run() -> Tensor:
            return self.module.decode(sparse, out_n, float(WORKERS))

        return {"zero": Contender(out_n.zero_), "decode 8": Contender(run, check=check, against="zero")}


def agree(name: str, pending: Pending, module: Ops, arguments: tuple[object, ...]) -> bool:
    """Whether the op does what ``reference`` does: to the bit, or in mass and count for estimated thresholds."""
    before_Ln = pending.memory_Ln.clone()
    sent = getattr(module, name)(pending, *arguments)
    ours_Ln = pending.memory_Ln.clone()
    module.give_back(pending.memory_Ln, sent)
    conserved = torch.equal(pending.memory_Ln, before_Ln + pending.grad_Ln)
    oracle = Pending(pending.grad_Ln, before_Ln, pending.segments)
    expected = getattr(reference, name)(oracle, *arguments)
    count = int(expected.counts_LB.sum())
    if name in ("gaussiank", "sampledk"):
        return conserved and abs(int(sent.counts_LB.sum()) - count) <= 1e-3 * count + 1
    same_values = torch.equal(sent.values_LK[:, :count], expected.values_LK)
    same_memory = torch.equal(ours_Ln, oracle.memory_Ln)
    return conserved and same_values and same_memory and torch.equal(sent.counts_LB, expected.counts_LB)


def training(size: int, device: torch.device, seed: int = 0) -> Iterator[tuple[Tensor, Callable[[Tensor], None]]]:
    """Real gradients of about ``size`` coordinates: a network with two hidden layers learns digits, without end.

    Yields a flat gradient and the function that takes the update to make of it.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32, device=device) / 16
    y = torch.tensor(digits.target, device=device)
    width = max(1, int(((77**2 + 4 * size) ** 0.5 - 77) / 2))
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
        torch.nn.Linear(width, 10),
    ).to(device)  # fmt: skip
    parameters = list(model.parameters())

    def update(step_n: Tensor) -> None:
        for parameter, part in zip(parameters, torch.split(step_n, [p.numel() for p in parameters]), strict=True):
            parameter.data.sub_(part.view_as(parameter), alpha=0.1)

    while True:
        batch = torch.randint(len(x), (32,), device=device)
        loss = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
        yield torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]), update


def sequence(
    name: str, extra: tuple[int, ...], module: Ops, size: int, density: float, device: torch.device, steps: int,
    clock: Clock,
) -> dict[str, Contender]:  # fmt: skip
    """A rule over a training with feedback: its average is what a user pays, hints from another step and all.

    Empty if it disagrees with ``reference``.
    """
    gradients = training(size, device)
    size = len(next(gradients)[0])
    segments, k = Segments((0, size), (0,)), max(1, round(size * density))
    memory_Ln, e_Ln = torch.zeros(1, size, device=device), torch.zeros(1, size, device=device)
    pending = Pending(e_Ln, memory_Ln, segments, into=reference.empty(1, size, 8 * k, torch.float32, device))
    mean_n = torch.empty(size, device=device)
    compiling = 3 if device.type == "cuda" else 0  # steps
    add = Contender(lambda: e_Ln.add_(pending.grad_Ln))
    rule = Contender(lambda: getattr(module, name)(pending, (k,), *extra))
    for step, (grad_n, update) in zip(range(steps), gradients, strict=False):
        pending.grad_Ln = grad_n[None]
        remembered = {key: t.clone() for key, t in pending.cache.items() if isinstance(t, Tensor)}
        copy = replace(pending, memory_Ln=memory_Ln.clone(), cache=remembered)
        if step == steps // 2 and not agree(name, copy, module, ((k,), *extra)):
            return {}
        for contender in (add, rule):
            clock(contender)
        assert pending.into is not None
        update(module.decode(pending.into, mean_n, 1.0))
    for contender in (add, rule):
        del contender.times[:compiling], contender.host[:compiling]
    return {"add": add, f"{name} sequence": rule}


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


def measure(size: int, density: float, device: torch.device, repeats: int, steps: int, clock_kind: str) -> list[Row]:
    module = ops.of(torch.empty(0, device=device))
    clock = Clock(device, clock_kind)
    common = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine(device.type),
        "torch": torch.__version__, "threads": torch.get_num_threads(), "clock": clock_kind, "n": size,
        "density": density, "triton": version("triton") if device.type == "cuda" else None,
    }  # fmt: skip
    contenders = Bench(module, size, density, device).contenders()
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
    for name, extra in rules.items() if steps else ():
        trained = sequence(name, extra, module, size, density, device, steps, clock)
        rows += [row for row in rows_of(trained, True, **common) if row.op != "add"]
        if not trained:
            print(f"{name} sequence: differs from the reference at n = {size}, density = {density}: no figure")
    return rows


def table(rows: Sequence[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{rows[0].machine}, threads: {rows[0].threads}"
    out = Table("op", "n", "density", "ms", "quartiles", "ratio", "to", title=title)
    for row in rows:
        out.add_row(row.op, f"{row.n:,}", f"{row.density:g}", f"{row.median_ms:.2f}",
                    f"{row.q1_ms:.2f} to {row.q3_ms:.2f}", f"{row.ratio:.2f}", row.against)  # fmt: skip
    Console().print(out)


def plot(rows: Sequence[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [name for name in dict.fromkeys(row.op for row in rows) if name not in ("add", "zero")]
    figure, axes = pyplot.subplots(figsize=(8, 0.4 * len(names) + 1.5))
    settings = sorted({(row.n, row.density) for row in rows})
    height = 0.8 / len(settings)
    for i, (n, density) in enumerate(settings):
        ratios = {row.op: row.ratio for row in rows if (row.n, row.density) == (n, density)}
        shown = [(y, ratios[name]) for y, name in enumerate(names) if name in ratios]
        axes.barh([y + i * height for y, _ in shown], [r for _, r in shown], height, label=f"n = {n:,}, {density:g}")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_yticks([y + 0.4 - height / 2 for y in range(len(names))], names)
    axes.set_xscale("log")
    axes.set_xlabel("time over its floor (e.add_(g); zeroing the output for decode; the flat call for layer-wise)")
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.07), ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1_000_000, 11_200_000])
    parser.add_argument("--densities", type=float, nargs="+", default=[0.001, 0.01])
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--steps", type=int, default=200, help="of the trainings with feedback; 0: none")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clock", default="wall", choices=["wall", "thread"], help="thread: on a shared machine")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/ops.jsonl"))
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    rows: list[Row] = []
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for size in options.sizes:
        for density in options.densities:
            new = measure(size, density, device, options.repeats, options.steps, options.clock)
            with options.out.open("a") as file:
                file.writelines(json.dumps(asdict(row)) + "\n" for row in new)
            rows += new
    table(rows)
    plot(rows, options.out.with_name(f"{options.out.stem}-{options.device}.png"))
    return rows


if __name__ == "__main__":
    main()
