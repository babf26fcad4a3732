"""A flat vector seen as parameters: n coordinates in the order of ``parameters()``, each as it lies in memory."""

from collections.abc import Iterable

from torch import Tensor


def shaped(flat_n: Tensor, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Views of ``flat_n``, one a parameter, with its shape and its strides.

    A channels-last weight thus lies in the vector as it lies in memory, and copies between the two are plain.

    >>> import torch
    >>> [view.tolist() for view in shaped(torch.arange(5), [torch.empty(2, 2).t(), torch.empty(1)])]
    [[[0, 2], [1, 3]], [4]]
    """
    views, start = [], 0
    for parameter in parameters:
        part_n = flat_n[start : start + parameter.numel()]
        views.append(part_n.as_strided(parameter.shape, parameter.stride()))
        start += parameter.numel()
    return views
