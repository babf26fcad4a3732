"""Where bytes alone do not tell which is faster, a sparse step or a dense one, the clock is asked.

A sparse step pays with coding and decoding for every byte that it saves. Up to a few percent of the coordinates that
is always a bargain; beyond, it is one over a slow link and a loss over a fast one. How much of either is hidden behind
the backward pass only whole steps can tell: both kinds are tried, unless the link is so slow that dense steps are out
of the question.
"""

import statistics
import time
from collections.abc import Collection

import torch

from gradsieve.step import Channel
from gradsieve.types import Link

EVERY = 1000  # steps from one trial to the next
SPARSE, DENSE = 8, 7  # steps of each kind in a trial, of which the last five count
BARGAIN = 0.02  # of the coordinates
SMALL = 1 << 18  # coordinates: of a smaller model neither takes long
PROBE = 1 << 18  # float32 numbers that are sent to see how fast the link is
HOPELESS = 4.0  # a dense exchange that takes so many times the coding of a sparse one is not tried


class Pace:
    """Tries now and then and goes by what it saw. All ranks count and decide alike: the slowest rank's times count."""

    def __init__(self, link: Link):
        self.link = link
        self.dense = False
        self._steps = 0
        self._started = 0.0
        self._seconds: list[float] = []  # of the steps since the trial began

    def next_step(self, channels: Collection[Channel]) -> bool:
        """Before the first bucket of a step: whether the step goes dense."""
        now, moment = time.perf_counter(), self._steps % EVERY
        self._seconds.append(now - self._started)
        self._started = now
        self._steps += 1
        if moment == 0:
            self.dense, self._seconds = False, []
        elif moment == SPARSE:
            self.dense = _in_doubt(channels) and not self._is_hopeless(channels)
        elif moment == SPARSE + DENSE and self.dense:
            sparse, dense = self._seconds[:SPARSE], self._seconds[SPARSE:]
            self.dense = self._second_is_less(statistics.median(sparse[-5:]), statistics.median(dense[-5:]))
        return self.dense

    def _is_hopeless(self, channels: Collection[Channel]) -> bool:
        dense = self._seconds_a_byte() * sum(channel.plan.dense_step_bytes for channel in channels)
        return self._second_is_less(dense, HOPELESS * sum(channel.busy for channel in channels))

    def _second_is_less(self, first: float, second: float) -> bool:
        """On the rank where each is the longest."""
        times_W2 = self.link.gather(torch.tensor([[first, second]], dtype=torch.float64, device="cpu")).wait()
        return float(times_W2[:, 1].max()) < float(times_W2[:, 0].max())

    def _seconds_a_byte(self) -> float:
        """Of an all-reduce, for each byte that a rank sends in it; the second of two, since the first may connect."""
        probe_LN = torch.zeros(1, PROBE, dtype=torch.float32, device="cpu")
        for _ in range(2):
            started = time.perf_counter()
            self.link.sum(probe_LN).wait()
        sent = 2 * (self.link.workers - 1) * 4 * PROBE / self.link.workers
        return (time.perf_counter() - started) / max(sent, 1.0)


def _in_doubt(channels: Collection[Channel]) -> bool:
    """The same on all ranks: sizes, and counts that all of them saw."""
    size = sum(channel.layout.size for channel in channels)
    return size >= SMALL and sum(channel.plan.expected for channel in channels) > BARGAIN * size
