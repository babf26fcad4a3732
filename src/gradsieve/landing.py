"""Where the mean of a bucket lands: in memory that its gradients then live in, so that nobody has to copy it there.

DDP copies each result from the bucket to the gradients, one more pass over all of them, unless the two are the same
memory. So the result is written into a flat tensor, and the gradients that the backward pass has just made, which
share their memory with nothing, move in. The tensor serves again once only DDP and this module refer to it.
"""

import torch
from torch import Tensor

SMALL = 256  # elements: fewer are copied as fast as they are moved
_ARRANGED = 2  # steps after which DDP's buckets stay as they are

_tensors_in = getattr(torch._C, "_storage_Use_Count", None)  # the handle that asks is one of them


class Landing:
    """Of one bucket of parameters, laid out as DDP does."""

    def __init__(self, parameters: list[Tensor]):
        self._parameters = parameters
        starts, start = [], 0
        for p in parameters:
            dense = p.is_contiguous() or (p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last))
            if dense and p.numel() >= SMALL:
                starts.append((p, start))
            start += p.numel()
        self._starts = starts
        self._can_move = _tensors_in is not None and bool(starts) and parameters[0].is_cpu
        self._flat_n: Tensor | None = None
        self._places: list[tuple[Tensor, Tensor]] = []  # a parameter, and the view that its gradient moves to
        self._uses = 0

    def room(self, buffer_n: Tensor) -> Tensor:
        """For the mean of this step: the bucket's own buffer at first, where gradients live there, or on a device."""
        self._uses += 1
        if self._uses <= _ARRANGED or not self._can_move or self._live_in(buffer_n):
            return buffer_n
        if self._flat_n is None or self._is_held(self._flat_n):
            flat_n = self._flat_n = torch.empty_like(buffer_n)
            self._places = [(p, flat_n.as_strided(p.size(), p.stride(), start)) for p, start in self._starts]
        return self._flat_n

    def move_in(self, mean_n: Tensor) -> Tensor:
        """The mean is there: gradients move to it. Those that cannot get a copy from DDP."""
        if mean_n is self._flat_n:
            for parameter, place in self._places:
                grad = parameter.grad
                if grad is not None and _may_move(grad, place):
                    grad.set_(place)  # type: ignore[call-overload]
        return mean_n

    def _live_in(self, buffer_n: Tensor) -> bool:
        """Whether gradients are views of the bucket: all are, or none."""
        grad = self._parameters[0].grad
        return grad is not None and grad.untyped_storage().data_ptr() == buffer_n.untyped_storage().data_ptr()

    def _is_held(self, flat_n: Tensor) -> bool:
        """Whether somebody still has a gradient of the step before, and would see it change."""
        here = sum(p.grad is not None and p.grad.data_ptr() == place.data_ptr() for p, place in self._places)
        if here == len(self._places):  # gradients that are not made anew change in place, as under DDP
            return False
        ours = 2 + len(self._places) + len(self._parameters)  # the tensor, this handle, views here and in DDP
        assert _tensors_in is not None
        return bool(_tensors_in(flat_n.untyped_storage()._cdata) > ours + here)


def _may_move(grad: Tensor, place: Tensor) -> bool:
    """Whether it is an ordinary tensor, alone in its memory, that would look the same there.

    Of the gradient that completes a bucket autograd has a second tensor until the hook returns.
    """
    assert _tensors_in is not None
    return (
        type(grad) is Tensor
        and not grad.requires_grad
        and grad.layout == torch.strided
        and grad.dtype == place.dtype
        and grad.size() == place.size()
        and grad.stride() == place.stride()
        and _tensors_in(grad.untyped_storage()._cdata) == 2
    )
