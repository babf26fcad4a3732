"""The owner exchange on real ranks."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve as gs


def delivered_and_remembered(rank, workers, rule, values):
    """Sixty steps: what arrived, what this rank was given, what it and its owner still hold."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(40, 30))
    sieve = gs.attach(ddp, gs.parse(rule), exchange="owner", values=values)
    generator = torch.Generator().manual_seed(rank)
    given = delivered = 0
    for _ in range(60):
        x = torch.randn(4, 40, generator=generator)
        alone = torch.autograd.grad(ddp.module(x).square().mean(), list(ddp.module.parameters()))
        given = given + torch.cat([g.flatten() for g in alone]).double()
        ddp.zero_grad()
        ddp(x).square().mean().backward()
        delivered = delivered + torch.cat([p.grad.flatten() for p in ddp.parameters()]).double()
    [memory] = [part for name, part in sieve.state_dict().items() if name.startswith("memory")]
    kept = torch.cat([memory[name]["memory"][0].double() for name, _ in ddp.module.named_parameters()])
    return delivered, given, kept


def test_nothing_is_lost_and_all_ranks_get_the_same(ranks):
    for rule, values in (("topk:0.05", "float32"), ("threshold:0.01", "bfloat16")):
        results = ranks(3, delivered_and_remembered, rule, values)
        arrived = [delivered for delivered, _, _ in results]
        assert all(torch.equal(arrived[0], other) for other in arrived[1:])
        found = 3 * arrived[0] + sum(kept for _, _, kept in results)
        given = sum(given for _, given, _ in results)
        assert ((found - given).norm() / given.norm()).item() < 1e-6
