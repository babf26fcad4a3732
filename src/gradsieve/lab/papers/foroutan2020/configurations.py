"""The six configurations of both tables: what is kept, and how it is brought to all."""

from dataclasses import dataclass

DENSITY = 0.01
WORKERS = (1, 2, 4, 8)
SCOPES = ("layer", "global")


@dataclass(frozen=True)
class Configuration:
    """A row of a table; ``key`` names its numbers in published.csv."""

    key: str
    name: str
    rule: str
    exchange: str


SGD = Configuration("sgd", "Standard SGD", "dense", "dense")
TOPK = Configuration("topk", "Top-k", f"topk:{DENSITY}", "allgather")
RANDOM_GATHER = Configuration("random-gather", "Random-k (allGather)", f"randomk:{DENSITY}", "allgather")
RANDOM_REDUCE = Configuration("random-reduce", "Random-k (allReduce)", f"randomk:{DENSITY}", "allreduce")
BLOCK_GATHER = Configuration("block-gather", "Block-random-k (allGather)", f"blockrandomk:{DENSITY}", "allgather")
BLOCK_REDUCE = Configuration("block-reduce", "Block-random-k (allReduce)", f"blockrandomk:{DENSITY}", "allreduce")

SPARSE = (TOPK, RANDOM_GATHER, RANDOM_REDUCE, BLOCK_GATHER, BLOCK_REDUCE)
ALL = (SGD, *SPARSE)
