"""Tasks by name: what to train, on what data, with which defaults."""

from collections.abc import Callable
from pathlib import Path

from gradsieve.lab.errors import LabError
from gradsieve.lab.tasks import cifar, digits, language, recommendation
from gradsieve.lab.tasks.base import Batch, Evaluation, Recipe, Task

__all__ = ["Batch", "Evaluation", "Recipe", "Task", "get", "names"]

_TASKS: dict[str, Callable[..., Task]] = {
    "cifar": cifar.task,
    "cifar-googlenet": cifar.inception,
    "cifar-resnet18": cifar.resnet,
    "cifar-senet18": cifar.senet,
    "cifar-wide": cifar.wide,
    "digits": digits.task,
    "digits-wide": digits.wide,
    "movielens-ncf": recommendation.task,
    "movielens-ncf-apart": recommendation.apart,
    "movielens-ncf-small": recommendation.small,
    "wikitext-lstm": language.task,
    "wikitext-lstm-small": language.small,
}


def names() -> list[str]:
    """The accepted task names, in alphabetical order."""
    return sorted(_TASKS)


def get(name: str, *, data_dir: Path | None = None, cache_dir: Path | None = None) -> Task:
    """The task called ``name``, with its data loaded.

    >>> get("digits").name
    'digits'
    """
    if name not in _TASKS:
        raise LabError(f"unknown task {name!r}; accepted: {', '.join(names())}")
    return _TASKS[name](data_dir=data_dir, cache_dir=cache_dir)
