"""Above a few percent, ``auto`` asks the clock: all ranks take the same way, and nothing is lost where it changes."""

import time

import pytest
import torch
from given import Given, drive, memory_of, size_of
from torch.nn.parallel import DistributedDataParallel

import gradsieve as gs
from gradsieve import pace
from gradsieve.pace import DENSE, SPARSE

SHAPES = ((400, 500), (100_000,))
TRIAL = SPARSE + DENSE


def paced(rank, workers, rule, coding, slower, steps, every=1000):
    """Train while the last rank says how long it coded, and is slow in one kind of step.

    The means, the memory, the sum of the gradients, and which steps went dense.
    """
    pace.EVERY = every
    module = Given(SHAPES)
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.5)
    sieve = gs.attach(ddp, gs.parse(rule))
    grads_Tn = torch.randn(steps, size_of(module), generator=torch.Generator().manual_seed(rank))
    means, dense = [], []
    for grad_n in grads_Tn:
        for channel in sieve._channels.values():
            channel.busy = coding
        means.append(drive(ddp, grad_n.unsqueeze(0))[0])
        dense.append(sieve._dense)
        if rank == workers - 1 and slower is not None and sieve._dense == (slower == "dense"):
            time.sleep(0.2)
    pace.EVERY = 1000
    return torch.stack(means), memory_of(sieve), grads_Tn.double().sum(0), dense


@pytest.mark.parametrize(("rule", "coding", "slower", "tried", "chosen"), [
    ("topk:0.1", 100.0, "sparse", True, True),
    ("threshold:1", 100.0, "sparse", True, True),
    ("topk:0.1", 100.0, "dense", True, False),
    ("topk:0.1", 0.0, None, False, False),
    ("topk:0.01", 100.0, None, False, False),
])  # fmt: skip
def test_the_slowest_rank_decides_for_all(rule, coding, slower, tried, chosen, ranks):
    results = ranks(2, paced, rule, coding, slower, TRIAL + 4)
    for _, _, _, dense in results:
        assert dense == [False] * SPARSE + [tried] * DENSE + [chosen] * 4
    assert torch.equal(results[0][0], results[1][0])
    came_n = sum(gradient_n for _, _, gradient_n, _ in results)
    there_n = 2 * results[0][0].double().sum(0) + sum(memory_n.double() for _, memory_n, _, _ in results)
    assert (there_n - came_n).norm() <= 1e-6 * came_n.norm()
    assert any(bool(memory_n.any()) for _, memory_n, _, _ in results) != chosen


def test_it_tries_again(ranks):
    every = TRIAL + 3
    for _, _, _, dense in ranks(2, paced, "topk:0.1", 100.0, "sparse", 2 * every, every):
        assert dense == ([False] * SPARSE + [True] * (DENSE + 3)) * 2
