"""Sparse gradient exchange for data-parallel training: sends what matters, remembers the rest."""

from gradsieve.compressors import (
    Accordion,
    BlockRandomK,
    Dense,
    GaussianK,
    HardThreshold,
    RandomK,
    SampledTopK,
    TopK,
    parse,
)
from gradsieve.ddp import attach, hook
from gradsieve.feedback import Momentum
from gradsieve.meter import Meter, NullMeter, Stats
from gradsieve.sieve import Sieve
from gradsieve.simulate import Simulator
from gradsieve.state import reshard
from gradsieve.version import __version__

__all__ = [
    "Accordion",
    "BlockRandomK",
    "Dense",
    "GaussianK",
    "HardThreshold",
    "Meter",
    "Momentum",
    "NullMeter",
    "RandomK",
    "SampledTopK",
    "Sieve",
    "Simulator",
    "Stats",
    "TopK",
    "__version__",
    "attach",
    "hook",
    "parse",
    "reshard",
]
