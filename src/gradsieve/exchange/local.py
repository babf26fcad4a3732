"""Virtual workers: all W are in this process, so every collective is the identity or a sum over rows."""

from collections.abc import Callable

import torch
from torch import Tensor

from gradsieve import ops


class Here:
    """An arrival that is complete."""

    def __init__(self, value: Tensor):
        self.value = value

    def then(self, use: Callable[[Tensor], Tensor]) -> "Here":
        return Here(use(self.value))

    def wait(self) -> Tensor:
        return self.value


class LocalLink:
    """W virtual workers in one process."""

    def __init__(self, workers: int):
        self.workers = workers
        self.ranks = range(workers)

    def gather(self, rows_LN: Tensor, into_WN: Tensor | None = None) -> Here:
        return Here(rows_LN)

    def sum(self, rows_LN: Tensor) -> Here:
        dtype = torch.promote_types(rows_LN.dtype, torch.float32)
        out_N = torch.empty(rows_LN.shape[1], dtype=dtype, device=rows_LN.device)
        return Here(ops.of(rows_LN).mean(rows_LN, out_N, 1.0))

    def scatter(self, parts_LWN: Tensor) -> Here:
        return Here(parts_LWN.transpose(0, 1).contiguous())

    def gather_varying(self, rows: list[Tensor], sizes_W: list[int]) -> Here:
        return Here(torch.cat(rows))

    def counts(self, count_L: Tensor) -> list[int]:
        counts: list[int] = count_L.tolist()
        return counts
