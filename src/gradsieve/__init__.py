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
from gradsieve.feedback import Momentum
from gradsieve.meter import Meter, NullMeter, Stats
from gradsieve.simulate import Simulator

__version__ = "0.1.0"

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
    "Simulator",
    "Stats",
    "TopK",
    "parse",
]
