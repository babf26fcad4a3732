"""The phases of any DDP hook, told from its collectives: in flight is exchange, before it coding, after it decoding."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from gradsieve.meter import Meter

Hook = Callable[[Any, GradBucket], Future[Tensor]]


@dataclass
class Trip:
    """A bucket on its way through a hook."""

    started: float = field(default_factory=time.perf_counter)
    exchange: float = 0.0
    landed: float = 0.0  # when its last collective ended

    def land(self, issued: float) -> None:
        self.landed = time.perf_counter()
        self.exchange += self.landed - issued


class Watch:
    """Stands before a hook and gives a meter its phases. A hook with collectives in its callbacks has one bucket."""

    def __init__(self, hook: Hook, meter: Meter):
        self.hook, self.meter = hook, meter
        self._trip = Trip()
        self._step = 0

    def watched(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        self._trip = Trip()
        done = self.hook(state, bucket).then(partial(self._done, self._trip, self._step))
        self._step += bucket.is_last()
        return done

    @contextmanager
    def collectives(self) -> Iterator[None]:
        """While this lasts, all-reduces are timed from issue to end."""
        all_reduce = dist.all_reduce

        def timed(*args: Any, **options: Any) -> Any:
            trip, issued = self._trip, time.perf_counter()
            work = all_reduce(*args, **options)
            work.get_future().add_done_callback(lambda _: trip.land(issued))
            return work

        dist.all_reduce = timed
        try:
            yield
        finally:
            dist.all_reduce = all_reduce

    def _done(self, trip: Trip, step: int, future: Future[Tensor]) -> Tensor:
        result, now = future.value(), time.perf_counter()
        decoding = now - trip.landed
        coding = now - trip.started - trip.exchange - decoding
        self.meter.spent(step, coding=coding, exchange=trip.exchange, decoding=decoding)
        return result
