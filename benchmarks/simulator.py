"""How far virtual workers go: one step of W workers against ``e.add_(g)`` over the same [W, n] tensors, in one run.

``python benchmarks/simulator.py --workers 256 --size 1000000 --density 0.001``
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import gradsieve as gs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--size", type=int, default=1_000_000)
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    grad_Wn = torch.randn(arguments.workers, arguments.size)
    sum_Wn = torch.zeros_like(grad_Wn)
    threshold = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(1 - arguments.density / 2)).item()
    meter = gs.Meter(error=False)
    simulator = gs.Simulator(arguments.size, gs.HardThreshold(threshold), workers=arguments.workers, meter=meter)
    simulator.step(grad_Wn)
    add, step = [], []
    for _ in range(arguments.repeats):
        simulator.channel.memory.memory_Ln.zero_()  # the same elements pass in every repeat
        add.append(seconds(lambda: sum_Wn.add_(grad_Wn)))
        step.append(seconds(lambda: simulator.step(grad_Wn)))
    ratio = statistics.median(step) / statistics.median(add)
    low, _, high = statistics.quantiles([s / a for s, a in zip(step, add, strict=True)], n=4)
    print(
        f"{arguments.workers} workers x {arguments.size:,}, {torch.get_num_threads()} threads: "
        f"add {1e3 * statistics.median(add):.1f} ms, step {1e3 * statistics.median(step):.1f} ms at density "
        f"{simulator.stats().last.density:.3%}: {ratio:.2f}x (quartiles {low:.2f} to {high:.2f})"
    )


def seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
