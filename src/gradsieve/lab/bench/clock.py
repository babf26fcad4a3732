"""How long one call takes, and how much memory."""

import time

import torch

from gradsieve.lab.bench.contenders import Contender


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
