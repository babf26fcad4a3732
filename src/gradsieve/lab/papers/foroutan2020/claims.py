"""What section 4.2.1 says of Table 1, counted: on ours as on the paper's own numbers."""

from collections.abc import Mapping

from gradsieve.lab.papers.foroutan2020.configurations import (
    ALL,
    BLOCK_GATHER,
    BLOCK_REDUCE,
    RANDOM_GATHER,
    RANDOM_REDUCE,
    SCOPES,
    SGD,
    SPARSE,
    TOPK,
    WORKERS,
)

Cell = tuple[str, str, int]
"""A configuration's key, a scope and a number of workers."""

CELLS: tuple[Cell, ...] = tuple((kind.key, scope, count) for kind in ALL for scope in SCOPES for count in WORKERS)


def number(cell: Cell) -> str:
    """The name of a cell in published.csv. Scope is nothing to standard SGD: both halves of its row are one.

    >>> number(("sgd", "global", 2)), number(("topk", "global", 2))
    ('sgd-2', 'topk-global-2')
    """
    key, scope, workers = cell
    return f"{key}-{workers}" if key == SGD.key else f"{key}-{scope}-{workers}"


def layer_above_global(accuracy: Mapping[Cell, float]) -> int:
    """In how many of the 20 pairs of sparse cells the layer-wise one is the better."""
    return sum(
        accuracy[kind.key, "layer", count] > accuracy[kind.key, "global", count] for kind in SPARSE for count in WORKERS
    )


def topk_best(accuracy: Mapping[Cell, float]) -> int:
    """In how many of the 8 columns no other sparse configuration is better than top-k."""
    return sum(
        accuracy[TOPK.key, scope, count] >= max(accuracy[kind.key, scope, count] for kind in SPARSE)
        for scope in SCOPES
        for count in WORKERS
    )


def held(accuracy: Mapping[Cell, float], key: str, scope: str) -> float:
    """The accuracy with the most workers over that with one."""
    return accuracy[key, scope, WORKERS[-1]] / accuracy[key, scope, WORKERS[0]]


def random_apart(accuracy: Mapping[Cell, float]) -> float:
    """The largest difference that the exchange makes to random-k, in points."""
    return max(
        abs(accuracy[RANDOM_GATHER.key, scope, count] - accuracy[RANDOM_REDUCE.key, scope, count])
        for scope in SCOPES
        for count in WORKERS
    )


def all_of(accuracy: Mapping[Cell, float]) -> dict[str, float]:
    """Each claim's number by its name in published.csv."""
    return {
        "layer": layer_above_global(accuracy),
        "topk-best": topk_best(accuracy),
        **{
            f"{kind.key}-{scope}-held": held(accuracy, kind.key, scope)
            for kind in (BLOCK_REDUCE, BLOCK_GATHER)
            for scope in SCOPES
        },
        "random-apart": random_apart(accuracy),
    }
