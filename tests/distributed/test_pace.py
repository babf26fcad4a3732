"""Above a few percent, ``auto`` asks the clock: all ranks take the same way, and nothing is lost where it changes."""

import pytest
import torch
from given import Given, drive, memory_of, size_of
from torch.nn.parallel import DistributedDataParallel

import gradsieve as gs
from gradsieve.exchange import pace

SHAPES = ((400, 500), (100_000,))


def paced(rank, workers, rule, seconds, steps):
    """Train with the time that coding took set from outside, on one rank only; which steps went dense, and the mass."""
    module = Given(SHAPES)
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.5)
    sieve = gs.attach(ddp, gs.parse(rule))
    grads_Tn = torch.randn(steps, size_of(module), generator=torch.Generator().manual_seed(rank))
    means, dense = [], []
    for grad_n in grads_Tn:
        for channel in sieve._channels.values():
            channel.busy = seconds if rank == workers - 1 else 0.0
        means.append(drive(ddp, grad_n.unsqueeze(0))[0])
        dense.append(sieve._dense)
    return torch.stack(means), memory_of(sieve), grads_Tn.double().sum(0), dense


@pytest.mark.parametrize(("rule", "seconds", "expected"), [
    ("topk:0.1", 100.0, True),
    ("threshold:1", 100.0, True),
    ("topk:0.1", 0.0, False),
    ("topk:0.01", 100.0, False),
])  # fmt: skip
def test_the_slowest_rank_decides_for_all(rule, seconds, expected, ranks):
    results = ranks(2, paced, rule, seconds, pace.LOOK + 6)
    for _, _, _, dense in results:
        assert dense == [False] * pace.LOOK + [expected] * 6
    assert torch.equal(results[0][0], results[1][0])
    came_n = sum(gradient_n for _, _, gradient_n, _ in results)
    there_n = 2 * results[0][0].double().sum(0) + sum(memory_n.double() for _, memory_n, _, _ in results)
    assert (there_n - came_n).norm() <= 1e-6 * came_n.norm()
    assert any(bool(memory_n.any()) for _, memory_n, _, _ in results) != expected


def test_it_looks_again(ranks):
    for _, _, _, dense in ranks(2, looking_often, 12):
        assert dense == ([False] * pace.LOOK + [True] * 4) * 2


def looking_often(rank, workers, every):
    pace.EVERY = every
    try:
        return paced(rank, workers, "topk:0.1", 100.0, 2 * every)
    finally:
        pace.EVERY = 1000
