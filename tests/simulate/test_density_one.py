"""At density 1 every rule is plain data-parallel training, bit for bit."""

import functools
import operator

import pytest
import torch

import gradsieve as gs

pytestmark = pytest.mark.usefixtures("any_ops", "poison")

RULES = [
    "threshold:0",
    "topk:1",
    "randomk:1",
    "blockrandomk:1",
    "gaussiank:1",
    "sampledtopk:1",
    "accordion:1,1,interval=3",
]
PARAMS = [torch.zeros(size) for size in (300, 1, 99)]


def run(rule, grads_TWn, **options):
    sim = gs.Simulator(PARAMS, gs.parse(rule), workers=grads_TWn.shape[1], **options)
    return torch.stack([sim.step(grad_Wn, lr=0.1) for grad_Wn in grads_TWn])


@pytest.mark.parametrize("workers", [1, 2, 4, 7])
@pytest.mark.parametrize("exchange", ["allgather", "auto"])
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_dense(rule, exchange, workers, generator):
    grads_TWn = torch.randn(5, workers, 400, generator=generator)
    dense_Tn = run("dense", grads_TWn, exchange=exchange)
    assert torch.equal(run(rule, grads_TWn, exchange=exchange).view(torch.int32), dense_Tn.view(torch.int32))


@pytest.mark.parametrize("workers", [1, 2, 4, 7])
@pytest.mark.parametrize("exchange", ["allgather", "auto", "dense"])
def test_dense_is_the_mean_in_rank_order(exchange, workers, generator):
    grads_TWn = torch.randn(5, workers, 400, generator=generator)
    plain_Tn = functools.reduce(operator.add, grads_TWn.unbind(1)) / workers
    assert torch.equal(run("dense", grads_TWn, exchange=exchange), plain_Tn)


@pytest.mark.parametrize("feedback", ["update", "momentum", "none"])
@pytest.mark.parametrize("rule", RULES)
def test_under_every_feedback(rule, feedback, generator):
    grads_TWn = torch.randn(5, 2, 400, generator=generator)
    dense_Tn = run("dense", grads_TWn, exchange="allgather", feedback=feedback)
    assert torch.equal(run(rule, grads_TWn, exchange="allgather", feedback=feedback), dense_Tn)


@pytest.mark.parametrize("rule", ["randomk:1", "blockrandomk:1"])
def test_shared_coordinates_added_on_the_way(rule, generator):
    grads_TWn = torch.randn(5, 4, 400, generator=generator)
    dense_Tn = run("dense", grads_TWn, exchange="allgather")
    assert torch.equal(run(rule, grads_TWn, exchange="allreduce"), dense_Tn)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_mean_has_the_gradients_dtype(dtype, generator):
    grad_Wn = torch.randint(-8, 8, (2, 400), generator=generator).to(dtype)
    sim = gs.Simulator(400, gs.TopK(1.0), workers=2, exchange="allgather", dtype=dtype)
    mean_n = sim.step(grad_Wn)
    assert mean_n.dtype == dtype
    assert torch.equal(mean_n, grad_Wn.sum(0) / 2)
