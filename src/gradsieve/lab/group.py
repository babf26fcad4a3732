"""The process group of a rank that the lab starts: left so that no thread of it outlives the rank's work.

A thread of the group that lets go of a tensor asks for the interpreter, and one that asks while the interpreter ends
aborts the process (pytorch/pytorch#190489). ``destroy_process_group`` joins the threads if nothing holds the group.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

# DDP imports it; imported when a group exists, its functions' defaults hold that group for good
import torch.distributed.nn.functional


@contextmanager
def in_group() -> Iterator[None]:
    """Decorate a rank's main function: what it made is gone when the group is left."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    yield
    dist.barrier()
    gc.collect()
    dist.destroy_process_group()
