"""What sparsification adds to a step in one process: coding and decoding of real networks' gradients, layer by layer.

``python benchmarks/coding.py --device cuda --density 0.001``: ratios to ``e.add_(g)``, in one interleaved run.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

import gradsieve as gs
from gradsieve import ops
from gradsieve.lab.bench.machine import machine
from gradsieve.lab.bench.shapes import NETWORKS, tensors
from gradsieve.ops.reference import empty
from gradsieve.types import Pending, Segments, Turn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/coding.jsonl"))
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.set_num_threads(1)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    for model in NETWORKS:
        segments = tensors(model)
        for row in measure(segments, arguments.density, device, arguments.repeats):
            row |= {
                "date": datetime.now(UTC).date().isoformat(),
                "machine": machine(arguments.device),
                "torch": torch.__version__,
            }
            row |= {"model": model, "tensors": len(segments.keys), "n": segments.size, "density": arguments.density}
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            print(
                f"{model:12} {row['rule']:14} coding {row['coding_ms']:8.3f} ms ({row['coding']:.2f}x), "
                f"decoding {row['decoding_ms']:7.3f} ms ({row['decoding']:.2f}x), kept {row['kept']:.3%}",
                flush=True,
            )


def measure(segments: Segments, density: float, device: torch.device, repeats: int) -> list[dict[str, object]]:
    """Medians of all rules, in turns; the memory is carried from step to step, as in training."""
    n = segments.size
    long_n = torch.randn(n + (1 << 20), device=device).mul_(torch.randn(n + (1 << 20), device=device).exp_())
    add_n, out_n = torch.zeros(n, device=device), torch.empty(n, device=device)
    rules = {
        "threshold": gs.HardThreshold(quantile(long_n, density)),
        "topk": gs.TopK(density),
        "gaussiank": gs.GaussianK(density),
        "sampledtopk": gs.SampledTopK(density),
        "randomk": gs.RandomK(density),
        "blockrandomk": gs.BlockRandomK(density),
    }
    memory_Ln = {name: torch.zeros(1, n, device=device) for name in rules}
    cache: dict[str, dict[str, Tensor]] = {name: {} for name in rules}
    into = {name: empty(1, n, int(8 * density * n) + 1024, torch.bfloat16, device) for name in rules}
    times: dict[str, list[float]] = {}
    for step in range(repeats + 10):
        start = (step * 7919 * 16) % (1 << 20)
        grad_Ln = long_n[None, start : start + n]
        timed = {"add": seconds(device, lambda g=grad_Ln: add_n.add_(g[0]))}
        for name, rule in rules.items():
            pending = Pending(grad_Ln, memory_Ln[name], segments, values=torch.bfloat16)
            pending.into, pending.cache = into[name], cache[name]
            turn = Turn(step, range(1))
            timed[f"{name} coding"] = seconds(device, lambda r=rule, p=pending, t=turn: r(p, t))
            sparse = into[name]
            timed[f"{name} decoding"] = seconds(device, lambda s=sparse: ops.of(out_n).decode(s, out_n, 1.0))
        if step >= 10:
            for name, spent in timed.items():
                times.setdefault(name, []).append(spent)
    add = statistics.median(times["add"])
    rows: list[dict[str, object]] = []
    for name in rules:
        coding, decoding = (statistics.median(times[f"{name} {phase}"]) for phase in ("coding", "decoding"))
        rows.append(
            {
                "rule": name,
                "add_ms": 1e3 * add,
                "coding_ms": 1e3 * coding,
                "decoding_ms": 1e3 * decoding,
                "coding": coding / add,
                "decoding": decoding / add,
                "kept": int(into[name].counts_LB.sum()) / n,
            }
        )
    return rows


def quantile(sample_n: Tensor, density: float) -> float:
    """A magnitude that about this share of the sample exceeds."""
    some = sample_n[:: max(1, len(sample_n) // 1_000_000)].abs()
    return float(some.sort(descending=True).values[max(0, int(density * len(some)) - 1)])


def seconds(device: torch.device, run: Callable[[], object]) -> float:
    if device.type == "cuda":
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)  # the device is busy while launches queue up, as it is in a backward pass
        first.record()
        run()
        last.record()
        last.synchronize()
        return first.elapsed_time(last) / 1e3
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
