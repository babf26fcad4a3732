"""Real workers: a torch.distributed process group, one worker a process. The only file that calls its collectives."""

import os
import socket
import weakref
import zlib
from collections.abc import Callable
from functools import reduce

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future


class Coming:
    """An arrival over the network. All that is done with it is one callback: each fights for the interpreter."""

    def __init__(self, work: dist.Work, result: Tensor, uses: tuple[Callable[[Tensor], Tensor], ...] = ()):
        self._work, self._result, self._uses = work, result, uses

    def then(self, use: Callable[[Tensor], Tensor]) -> "Coming":
        return Coming(self._work, self._result, (*self._uses, use))

    def future(self, on_error: Callable[[Exception], Exception] = lambda error: error) -> "Future[Tensor]":
        """Of the last result; an error on the way is what ``on_error`` makes of it. Ask once: it does all there is."""
        result, uses = self._result, self._uses  # and not the work, which holds this callback

        def arrived(done: "Future[object]") -> Tensor:
            try:
                done.value()  # raises what the backend did
                with torch.cuda.device_of(result):  # type: ignore[no-untyped-call]  # gloo's threads have the first
                    return _use(result, uses)
            except Exception as error:
                raise on_error(error) from error

        return self._work.get_future().then(arrived)

    def wait(self) -> Tensor:
        """The last result, here and now."""
        self._work.wait()
        return _use(self._result, self._uses)


def _use(result: Tensor, uses: tuple[Callable[[Tensor], Tensor], ...]) -> Tensor:
    return reduce(lambda value, use: use(value), uses, result)


class GroupLink:
    """One of W ranks. Collectives are issued in program order, never inside a callback.

    A callback holds this link in a thread of the group. It must not be the last to hold the group itself, which
    joins its threads when it goes: a thread that joins itself aborts the process.
    """

    def __init__(self, group: dist.ProcessGroup):
        self._group = weakref.ref(group)
        self.workers = dist.get_world_size(group)
        rank = dist.get_rank(group)
        self.ranks = range(rank, rank + 1)
        kinds = group._device_types
        self.device = torch.device("cpu") if torch.device("cpu") in kinds else kinds[0]  # for its small messages

    @property
    def group(self) -> dist.ProcessGroup:
        group = self._group()
        if group is None:
            raise RuntimeError("the process group of this sieve was destroyed")
        return group

    def gather(self, rows_LN: Tensor, into_WN: Tensor | None = None) -> Coming:
        out_WN = rows_LN.new_empty(self.workers, rows_LN.shape[1]) if into_WN is None else into_WN
        return Coming(_all_gather(out_WN.view(-1), rows_LN.view(-1), self.group), out_WN)

    def sum(self, rows_LN: Tensor) -> Coming:
        work = dist.all_reduce(rows_LN, group=self.group, async_op=True)
        return Coming(work, rows_LN.view(-1))

    def scatter(self, parts_LWN: Tensor) -> Coming:
        out_WN = torch.empty_like(parts_LWN[0])
        work = dist.all_to_all_single(out_WN, parts_LWN[0].contiguous(), group=self.group, async_op=True)
        return Coming(work, out_WN.unsqueeze(0))

    def gather_varying(self, rows: list[Tensor], sizes_W: list[int]) -> Coming:
        """An all-to-all in which every rank sends all others the same: backends gather equal sizes only."""
        out = rows[0].new_empty(sum(sizes_W))
        copies = rows[0].repeat(self.workers)
        work = dist.all_to_all_single(
            out, copies, sizes_W, [rows[0].numel()] * self.workers, group=self.group, async_op=True
        )
        return Coming(work, out)

    def counts(self, count_L: Tensor) -> list[int]:
        counts: list[int] = self.gather(count_L.long().view(1, 1).to(self.device)).wait().view(-1).tolist()
        return counts

    def crowded(self) -> bool:
        """Whether the ranks of this host keep all its cores busy."""
        host = zlib.crc32(socket.gethostname().encode())
        neighbours = self.counts(torch.tensor([host], device="cpu")).count(host)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return neighbours * torch.get_num_threads() >= cores


def _all_gather(out: Tensor, mine: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """The single-tensor gather under its new name where torch has it, else under its old one."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work = gather(out, mine, group=group, async_op=True)
    return work
