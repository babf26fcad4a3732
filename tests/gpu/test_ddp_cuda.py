"""The hook on CUDA tensors: one NCCL rank, and the promise that no device is waited for."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve as gs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def nccl(tmp_path):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(300, 400), nn.ReLU(), nn.Linear(400, 10)).cuda()


@pytest.mark.parametrize("rule", ["threshold:0.01", "topk:0.01", "gaussiank:0.01", "randomk:0.01", "blockrandomk:0.01"])
def test_a_rank_on_nccl_equals_the_simulator_on_the_cpu(nccl, rule):
    module = model()
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.2)
    gs.attach(ddp, gs.parse(rule), exchange="allgather", strict=True)
    sim = gs.Simulator(module, gs.parse(rule), workers=1, exchange="allgather", strict=True)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        x = torch.randn(8, 300, generator=generator).cuda()
        alone = torch.autograd.grad(module(x).square().mean(), list(module.parameters()))
        mean_n = sim.step(torch.cat([g.flatten() for g in alone])[None].cpu())
        ddp.zero_grad()
        ddp(x).square().mean().backward()
        found_n = torch.cat([p.grad.flatten() for p in module.parameters()]).cpu()
        torch.testing.assert_close(found_n, mean_n, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "rule",
    ["threshold:1e-6", "topk:0.01", "gaussiank:0.01", "sampledtopk:0.01", "randomk:0.01", "blockrandomk:0.01"],
)
def test_no_step_waits_for_the_device(nccl, rule):
    module = model()
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.2)
    sieve = gs.attach(ddp, gs.parse(rule), exchange="allgather")
    x = torch.randn(8, 300, device="cuda")
    for _ in range(5):  # buckets are rebuilt and sizes agreed on until counts are steady: those steps wait
        ddp.zero_grad()
        ddp(x).square().mean().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            ddp.zero_grad()
            ddp(x).square().mean().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sieve.stats().total.steps == 9


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_nothing_is_lost_of_parameters_that_rest(nccl, scope):
    """What rests is put aside and brought back on different streams, while the backward pass asks for memory."""
    module = Branching().to(device())
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.2, find_unused_parameters=True)
    sieve = gs.attach(ddp, gs.TopK(0.01), exchange="allgather", scope=scope)
    owed = {name: torch.zeros_like(p) for name, p in module.named_parameters()}
    for step in range(12):
        x = torch.randn(64, 300, device=device(), generator=generator_of(step))
        inner = nn.Linear(300, 300, device=device())  # its backward goes on after DDP's last bucket
        branch = step % 2
        alone = torch.autograd.grad(module(x, branch).square().sum(), list(module.parameters()), allow_unused=True)
        ddp.zero_grad()
        ddp(x + 0 * inner(x), branch).square().sum().backward()
        for (name, p), gradient in zip(module.named_parameters(), alone, strict=True):
            if gradient is not None:
                owed[name] += gradient - p.grad
    owed_n = torch.cat([owed[name].flatten() for name in owed])
    torch.testing.assert_close(memory_of(sieve), owed_n, rtol=1e-4, atol=1e-2, check_device=False)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(300, 400)
        self.branches = nn.ModuleList(nn.Linear(400, 300) for _ in range(2))

    def forward(self, x, branch):
        return self.branches[branch](self.first(x).relu())


def device():
    return torch.device("cuda")


def generator_of(seed):
    return torch.Generator(device()).manual_seed(seed)


def test_an_infinity_reaches_every_parameter_and_no_memory(nccl):
    module = model()
    ddp = DistributedDataParallel(module)
    sieve = gs.attach(ddp, gs.TopK(0.01), exchange="allgather")
    x = torch.randn(8, 300, device="cuda")
    for bad in (False, False, False, True, False):
        before = memory_of(sieve) if bad else None
        ddp.zero_grad()
        loss = ddp(x).square().mean()
        (loss * torch.inf if bad else loss).backward()
        finite = [bool(p.grad.isfinite().all()) for p in module.parameters()]
        assert finite == [not bad] * 4
        if bad:
            torch.testing.assert_close(memory_of(sieve), before, rtol=1e-5, atol=1e-7)


def memory_of(sieve):
    [memory] = [part for name, part in sieve.state_dict().items() if name.startswith("memory")]
    return torch.cat([kinds["memory"][0] for kinds in memory.values()])
