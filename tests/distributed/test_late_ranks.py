"""Row 5: many buckets on ranks that are late at random, for long. Nothing hangs, nothing differs."""

import random
import time

import pytest
import torch
from given import Given, drive, numbers, size_of
from torch.nn.parallel import DistributedDataParallel

import gradsieve as gs


def hurried(rank, workers, buckets, repetition, steps):
    """Many buckets, each rank now and then late, and as many elements as it happens to have."""
    module = Given(((300,),) * buckets)
    ddp = DistributedDataParallel(module, bucket_cap_mb=300 / 2**20)
    sieve = gs.attach(ddp, gs.HardThreshold(4.0))
    late = random.Random(100 * repetition + rank)
    for p in module.parameters():
        p.register_hook(lambda grad: time.sleep(late.uniform(0, 0.02)) if late.random() < 2 / buckets else None)
    grads_Tn = numbers(steps, workers, size_of(module), seed=repetition)[:, rank]
    scale_T = torch.rand(steps, generator=torch.Generator().manual_seed(rank)) * 3
    means_Tn = drive(ddp, grads_Tn * scale_T.unsqueeze(1))
    return means_Tn, len(sieve._channels), sieve.stats().total.deferred


CROWDS = [(8, 2), (8, 3), (8, 4), (12, 4), (16, 2), (16, 3), (24, 3), (32, 2), (48, 2), (64, 2)]


@pytest.mark.parametrize(("repetition", "buckets", "workers"), [(i, *crowd) for i, crowd in enumerate(CROWDS)])
def test_many_buckets_and_late_ranks_neither_hang_nor_differ(repetition, buckets, workers, ranks):
    results = ranks(workers, hurried, buckets, repetition, 200)
    for means_Tn, channels, deferred in results:
        assert torch.equal(means_Tn, results[0][0])
        assert channels == buckets
        assert deferred > 0  # counts varied
