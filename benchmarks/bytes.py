"""Bytes on the wire over the information-theoretic floor: ``python benchmarks/bytes.py``.

The floor of k of n private coordinates is log2(C(n, k)) bits for the positions and 16 bits (bfloat16) a value.
"""

import argparse
import math

import torch

import gradsieve as gs
from gradsieve.lab.bench.rank import Draws
from gradsieve.lab.bench.step import threshold_for

WORKERS = 2


def floor(size: int, kept: float) -> float:
    """Bytes that no code of the positions can do without."""
    choices = math.lgamma(size + 1) - math.lgamma(kept + 1) - math.lgamma(size - kept + 1)
    return choices / math.log(2) / 8 + 2 * kept


def ratio(rule: gs.HardThreshold | gs.TopK, size: int, *, strict: bool, steps: int) -> tuple[float, float]:
    """The mean density of the second half of a run, and its bytes over the floor."""
    sim = gs.Simulator(size, rule, workers=WORKERS, values="bfloat16", exchange="allgather", strict=strict)
    draws = [Draws(worker, size) for worker in range(WORKERS)]
    sent = least = kept = 0.0
    for step in range(steps):
        sim.step(torch.stack([draw(step) for draw in draws]))
        last = sim.stats().last
        if step >= steps // 2:
            sent, kept = sent + last.bytes / (WORKERS - 1), kept + last.kept
            least += floor(size, last.kept)
    return kept / (steps - steps // 2) / size, sent / least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=11_200_000)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    print("| rule | sizes | density | bytes over the floor |")
    print("| --- | --- | ---: | ---: |")
    for density in (0.001, 0.01):
        threshold = gs.HardThreshold(threshold_for(density, after=30))
        for rule, strict, sizes in (
            (gs.TopK(density), False, "known"),
            (threshold, True, "exact"),
            (threshold, False, "planned"),
        ):
            found, over = ratio(rule, options.size, strict=strict, steps=options.steps)
            print(f"| {type(rule).__name__} | {sizes} | {found:.3%} | {over:.3f} |", flush=True)


if __name__ == "__main__":
    main()
