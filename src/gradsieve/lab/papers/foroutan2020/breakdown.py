"""The parts of a training step of each configuration, in milliseconds, from real processes."""

from statistics import median, quantiles
from typing import NamedTuple

from gradsieve.lab.bench.start import LOOPBACK, links, run_ranks
from gradsieve.lab.papers.foroutan2020.rank import PARTS

ADDED = ("coding", "exchange", "decoding")
LINK = "10gbit"
LIMIT = 5400.0  # seconds: eight ranks may share two cores


class Breakdown(NamedTuple):
    """One configuration: milliseconds by part, the median over steps, and the quartiles of what the hook adds."""

    parts: dict[str, float]
    low: float
    high: float

    @property
    def computing(self) -> float:
        return self.parts["forward"] + self.parts["backward"]

    @property
    def added(self) -> float:
        """What the exchange of gradients adds to a step. Waiting is for the ranks' uneven computing: not in it."""
        return sum(self.parts[part] for part in ADDED)


def link(quick: bool) -> tuple[str, str]:
    """The paper's link where test hosts can be made, and why it is another one."""
    if quick:
        return LOOPBACK, "a quick run goes over loopback"
    (first, *_), reason = links([LINK])
    return first, f"no shaped links here ({reason})" if reason else ""


def measure(net: str, workers: int, batch: int, rounds: int, over: str) -> dict[str, Breakdown]:
    """Start the ranks and time all configurations, and a step without exchange, by key."""
    job = {"net": net, "batch": batch, "rounds": rounds}
    samples = run_ranks("gradsieve.lab.papers.foroutan2020.rank", job, workers, over, limit=LIMIT)
    return {name: of_steps(steps) for name, steps in samples.items()}


def of_steps(steps: list[list[float]]) -> Breakdown:
    """From seconds by part, a list for each step.

    >>> of_steps([[1, 2, 0, 9, 1, 0], [1, 2, 0, 9, 3, 0], [1, 2, 0, 9, 2, 0]])[1:]
    (1000.0, 3000.0)
    """
    by_part = dict(zip(PARTS, zip(*steps, strict=True), strict=True))
    added = [sum(parts) for parts in zip(*(by_part[part] for part in ADDED), strict=True)]
    low, _, high = quantiles(added, n=4)
    return Breakdown({part: 1e3 * median(seconds) for part, seconds in by_part.items()}, 1e3 * low, 1e3 * high)
