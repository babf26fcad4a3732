"""From the host to a device, without waiting for it."""

import torch
from torch import Tensor


def sent_ahead(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on ``device`` that is there for all that is launched after; the tensor itself where it lies there.

    From memory that the system may move a copy is made in pieces, and the host waits for them.
    """
    if not tensor.is_cpu or device.type != "cuda":
        return tensor.to(device)
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)
