"""What it cost and what it saved: density, true bytes, total error, time by phase."""

import copy
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

PHASES = ("forward", "backward", "coding", "exchange", "decoding")


@dataclass
class Tally:
    """Figures of one step, or of all: per worker, the mean over the workers that this process knows of.

    ``bytes`` is what a worker sends, headers, counts and padding included; ``dense_bytes`` what it would send in
    a dense all-reduce of its gradients (in global scope, of float32). ``error`` is the sum over steps of the squared
    norm of the workers' memory; what owners hold (``exchange="owner"``) is not in it.
    """

    steps: int = 0
    coordinates: float = 0
    kept: float = 0
    deferred: float = 0
    bytes: float = 0
    dense_bytes: float = 0
    error: float = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def density(self) -> float:
        """Kept elements over coordinates: what was sent, not the padding."""
        return self.kept / self.coordinates if self.coordinates else 0.0

    @property
    def saved(self) -> float:
        """How many times fewer bytes than dense."""
        return self.dense_bytes / self.bytes if self.bytes else float("inf")

    def add(self, other: "Tally") -> None:
        self.coordinates += other.coordinates
        self.kept += other.kept
        self.deferred += other.deferred
        self.bytes += other.bytes
        self.dense_bytes += other.dense_bytes
        self.error += other.error
        for phase, seconds in other.seconds.items():
            self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds


@dataclass(frozen=True)
class Stats:
    """``last`` step and ``total`` of all."""

    last: Tally
    total: Tally

    def __str__(self) -> str:
        total = self.total
        spent = ", ".join(f"{phase} {1e3 * s / max(total.steps, 1):.2f}" for phase, s in total.seconds.items())
        return (
            f"{total.steps} steps, density {total.density:.3%}, {total.bytes / 1e6:.2f} MB sent a worker "
            f"({total.saved:.1f}x less than dense), deferred {total.deferred:.0f}, total error {total.error:.4g}"
            + (f"; ms a step: {spent}" if spent else "")
        )


class Meter:
    """Counts every exchange. ``error=True`` also measures the memory's norm, which the ops fuse into their pass."""

    def __init__(self, *, error: bool = True):
        self.error = error
        self._step = -1
        self._lock = threading.Lock()  # arrivals are recorded from the backend's threads
        self._last = Tally()
        self._total = Tally()

    def record(self, step: int, **figures: float) -> None:
        """One channel's exchange at one step: fields of a ``Tally``."""
        self._add(step, Tally(**figures))  # type: ignore[arg-type]

    @contextmanager
    def phase(self, step: int, name: str) -> Iterator[None]:
        """Time what runs inside under one of the phases."""
        start = time.perf_counter()
        yield
        self.spent(step, **{name: time.perf_counter() - start})

    def spent(self, step: int, **seconds: float) -> None:
        """Seconds by phase."""
        self._add(step, Tally(seconds=seconds))

    def stats(self) -> Stats:
        """The figures so far: a copy, which later steps leave alone."""
        with self._lock:
            return Stats(copy.deepcopy(self._last), copy.deepcopy(self._total))

    def go_on(self, total: Tally) -> None:
        """After these figures, of a run that was stopped."""
        with self._lock:
            self._step, self._last, self._total = -2, Tally(), copy.deepcopy(total)

    def rewind(self) -> None:
        """A state was loaded: whatever step comes next is a new one."""
        with self._lock:
            self._step = -2

    def _add(self, step: int, tally: Tally) -> None:
        with self._lock:
            if step not in (self._step, self._step - 1):
                self._step, self._last = step, Tally(steps=1)
                self._total.steps += 1
            if step == self._step:  # of the step before figures may come late from a device
                self._last.add(tally)
            self._total.add(tally)


class NullMeter(Meter):
    """Counts nothing and costs nothing."""

    def __init__(self) -> None:
        super().__init__(error=False)

    def record(self, step: int, **figures: float) -> None:
        pass

    def phase(self, step: int, name: str) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()

    def spent(self, step: int, **seconds: float) -> None:
        pass
