"""Where bytes alone do not tell which is faster, a sparse step or a dense one, the clock is asked.

A sparse step pays with coding and decoding for every byte that it saves. Up to a few percent of the coordinates that
is always a bargain; beyond, it is one over a slow link and a loss over a fast one.
"""

import time
from collections.abc import Collection

import torch

from gradsieve.step import Channel
from gradsieve.types import Link

EVERY = 1000  # steps between two looks
LOOK = 8  # sparse steps before each
BARGAIN = 0.02  # of the coordinates
SMALL = 1 << 18  # coordinates: of a smaller model neither takes long
PROBE = 1 << 18  # float32 numbers that are sent to see how fast the link is


class Pace:
    """Looks now and then and goes by what it saw. All ranks count and decide alike: the slowest rank's times count."""

    def __init__(self, link: Link):
        self.link = link
        self.dense = False
        self._steps = 0

    def next_step(self, channels: Collection[Channel]) -> bool:
        """Before the first bucket of a step: whether the step goes dense."""
        moment = self._steps % EVERY
        self._steps += 1
        if moment == 0:
            self.dense = False
        if moment == LOOK:
            self.dense = _in_doubt(channels) and self._dense_is_faster(channels)
        return self.dense

    def _dense_is_faster(self, channels: Collection[Channel]) -> bool:
        plans = [channel.plan for channel in channels]
        pace = self._seconds_a_byte()
        sparse = pace * sum(plan.gather_bytes(plan.format(plan.expected)) for plan in plans)
        sparse += sum(channel.busy for channel in channels)
        dense = pace * sum(plan.dense_bytes for plan in plans)
        times_W2 = self.link.gather(torch.tensor([[sparse, dense]], dtype=torch.float64)).wait()
        return float(times_W2[:, 1].max()) < float(times_W2[:, 0].max())

    def _seconds_a_byte(self) -> float:
        """Of an all-reduce, for each byte that a rank sends in it; the second of two, since the first may connect."""
        probe_LN = torch.zeros(1, PROBE)
        for _ in range(2):
            started = time.perf_counter()
            self.link.sum(probe_LN).wait()
        sent = 2 * (self.link.workers - 1) * 4 * PROBE / self.link.workers
        return (time.perf_counter() - started) / max(sent, 1.0)


def _in_doubt(channels: Collection[Channel]) -> bool:
    """The same on all ranks: sizes, and counts that all of them saw."""
    size = sum(channel.layout.size for channel in channels)
    return size >= SMALL and sum(channel.plan.expected for channel in channels) > BARGAIN * size
