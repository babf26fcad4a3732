"""The rules: one a file, each a frozen value that says which coordinates are sent."""

from gradsieve.compressors.accordion import Accordion
from gradsieve.compressors.blockrandomk import BlockRandomK
from gradsieve.compressors.dense import Dense
from gradsieve.compressors.gaussiank import GaussianK
from gradsieve.compressors.randomk import RandomK
from gradsieve.compressors.sampledtopk import SampledTopK
from gradsieve.compressors.text import parse
from gradsieve.compressors.threshold import HardThreshold
from gradsieve.compressors.topk import TopK

__all__ = [
    "Accordion",
    "BlockRandomK",
    "Dense",
    "GaussianK",
    "HardThreshold",
    "RandomK",
    "SampledTopK",
    "TopK",
    "parse",
]
