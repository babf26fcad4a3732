"""Gradients move to where their mean lands: nothing is copied, and nobody can tell."""

from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from given import drive, numbers, same_bits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve as gs
from gradsieve import sieve as handle
from gradsieve.landing import Landing

SHAPES = ((7,), (40, 30), (8, 16, 3, 3), (20, 20))  # two buckets: the last two, and the first two
SIZE = 7 + 1200 + 1152 + 400


class Parts(nn.Module):
    """As ``Given``, and one of its parameters lies in memory as channels last."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(shape) for shape in SHAPES)
        self.parts[2] = nn.Parameter(torch.zeros(SHAPES[2]).to(memory_format=torch.channels_last))

    def forward(self, grad_n):
        pieces = torch.split(grad_n, [p.numel() for p in self.parts])
        return sum((p * piece.view_as(p)).sum() for p, piece in zip(self.parts, pieces, strict=True))


class Buffer:
    """The landing of those who want copies: the bucket itself."""

    _flat_n = None

    def __init__(self, parameters):
        pass

    def room(self, buffer_n):
        return buffer_n

    def move_in(self, mean_n):
        return mean_n


def homes_of(sieve):
    return [landing._flat_n for landing in sieve._landings.values() if landing._flat_n is not None]


def moved(sieve, ddp):
    """Which parameters' gradients live where the mean landed."""
    homes = {home.data_ptr() for home in homes_of(sieve)}
    return [p.grad.untyped_storage().data_ptr() in homes for p in ddp.module.parts]


def attached(rule, **options):
    ddp = DistributedDataParallel(Parts(), bucket_cap_mb=0.005, **options)
    return ddp, gs.attach(ddp, gs.parse(rule))


def as_with_copies(rank, workers, rule, crowded, set_to_none):
    grads_Tn = numbers(6, workers, SIZE)[:, rank]
    results, home = [], []
    for landing in (Landing, Buffer):
        ddp, sieve = attached(rule)
        means = []
        for grad_n in grads_Tn:
            sieve._crowded = crowded
            ddp.zero_grad(set_to_none=set_to_none)
            with patch.object(handle, "Landing", landing):
                ddp(grad_n).backward()
            means += [p.grad.clone() for p in ddp.module.parts]
        results.append(means)
        home.append(moved(sieve, ddp))
    same = [same_bits(a, b) and a.stride() == b.stride() for a, b in zip(*results, strict=True)]
    return all(same), home[0]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("crowded", [True, False])
@pytest.mark.parametrize("rule", ["topk:0.01", "topk:1", "dense"])
def test_gradients_are_as_if_copied_and_live_in_the_mean(rule, crowded, set_to_none, ranks):
    for same, home in ranks(2, as_with_copies, rule, crowded, set_to_none):
        assert same
        assert (home[0], home[1], home[3]) == (False, True, True)  # the small one is copied
        assert home[2] or not crowded  # whoever completes a bucket is copied if the mean is there at once


def held(rank, workers):
    ddp, _ = attached("topk:0.05")
    grads_Tn = numbers(8, workers, SIZE)[:, rank]
    kept, views = [], []
    for grad_n in grads_Tn:
        drive(ddp, grad_n[None])
        kept.append([(p.grad, p.grad.clone()) for p in ddp.module.parts])
        views.append([(p.grad[1:], p.grad[1:].clone()) for p in ddp.module.parts[1:3]])
    return all(torch.equal(a, b) for step in (*kept, *views) for a, b in step)


def test_a_gradient_that_somebody_holds_never_changes(ranks):
    """DDP makes new ones a step; so does this, as long as old ones are in use."""
    assert ranks(2, held) == [True, True]


def steady(rank, workers, hold):
    ddp, sieve = attached("topk:0.05")
    homes, last = [], None
    for grad_n in numbers(8, workers, SIZE)[:, rank]:
        drive(ddp, grad_n[None])
        if hold:
            last = [
                part.grad[1:] for part in ddp.module.parts[1:]
            ]  # of the step before: gone when the next one is over
        homes.append(tuple(home.data_ptr() for home in homes_of(sieve)))
    del last
    return homes[3:]


def test_the_same_memory_serves_every_step(ranks):
    for homes in ranks(2, steady, False):
        assert len(set(homes)) == 1
    for homes in ranks(2, steady, True):
        assert all(not set(before) & set(after) for before, after in pairwise(homes))


def elsewhere(rank, workers, kind):
    options = {"gradient_as_bucket_view": kind == "bucket views", "find_unused_parameters": kind == "unused"}
    ddp, sieve = attached("topk:0.05", **options)
    own_n = torch.zeros(SIZE)
    if kind == "own memory":  # as flat optimizers have it
        for p, part_n in zip(ddp.module.parts, torch.split(own_n, [p.numel() for p in ddp.module.parts]), strict=True):
            p.grad = part_n.as_strided(p.size(), p.stride())
    for grad_n in numbers(4, workers, SIZE)[:, rank]:
        ddp.zero_grad(set_to_none=False)
        ddp(grad_n).backward()
    return moved(sieve, ddp), bool(own_n.count_nonzero())


@pytest.mark.parametrize("kind", ["bucket views", "unused", "own memory"])
def test_gradients_that_live_elsewhere_stay_there(kind, ranks):
    for home, filled in ranks(2, elsewhere, kind):
        assert not any(home)
        assert filled == (kind == "own memory")


def accumulated(rank, workers):
    """Over several steps without being cleared: what DDP does with the sum of means and new gradients."""
    results = []
    for landing in (Landing, Buffer):
        ddp, _ = attached("topk:0.05")
        for i, grad_n in enumerate(numbers(6, workers, SIZE)[:, rank]):
            if i == 4:
                ddp.module.parts[1].grad = None  # one of them made anew, the others not
            with patch.object(handle, "Landing", landing):
                ddp(grad_n).backward()
        results.append([p.grad for p in ddp.module.parts])
    return all(same_bits(a, b) for a, b in zip(*results, strict=True))


def test_gradients_that_are_not_cleared_add_up(ranks):
    assert ranks(2, accumulated) == [True, True]
