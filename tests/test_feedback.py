"""The memory on its own: how it joins a gradient, and when momentum counts."""

import math

import pytest
import torch

import gradsieve as gs
from gradsieve.feedback import Feedback, Memory
from gradsieve.ops import reference
from gradsieve.types import Pending, Segments

ONE = Segments((0, 4), (0,))
CPU = torch.device("cpu")


def memory_of(feedback, dtype=torch.float32):
    return Memory(feedback, 2, 4, CPU, dtype)


def correct(memory, grad_Ln, **options):
    return memory.correct(grad_Ln, ONE, **{"gain": 1.0, "lr_ratio": 1.0, "workers": 2, **options})


@pytest.mark.parametrize(
    ("kind", "decay"), [("gradient", 1.0), ("update", 0.25), ("none", 0.0)], ids=["gradient", "update", "none"]
)
def test_how_a_memory_joins_a_gradient(kind, decay):
    grad_Ln = torch.ones(2, 4)
    pending = correct(memory_of(Feedback(kind)), grad_Ln, gain=0.5, lr_ratio=0.25)
    assert (pending.decay, pending.gain) == (decay, 0.5)
    assert pending.grad_Ln is grad_Ln


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float64)],
    ids=str,
)
def test_a_memory_is_at_least_float32(dtype, kept):
    memory = memory_of(gs.Momentum(), dtype)
    assert {tensor.dtype for tensor in memory.tensors.values()} == {kept}


def test_momentum_counts_only_once_it_is_settled():
    """A step that is undone leaves the velocity as it was."""
    memory = memory_of(gs.Momentum(beta=0.5, masking=False))
    for _ in range(3):
        assert torch.equal(correct(memory, torch.ones(2, 4)).grad_Ln, torch.ones(2, 4))
    memory.settle(None)
    assert torch.equal(correct(memory, torch.ones(2, 4)).grad_Ln, torch.full((2, 4), 1.5))
    memory.settle(None)
    memory.settle(None)  # nothing waits
    assert torch.equal(memory.tensors["velocity"], torch.full((2, 4), 1.5))


def test_masking_clears_the_momentum_of_what_was_sent():
    memory = memory_of(gs.Momentum(beta=0.5))
    pending = correct(memory, torch.tensor([[4.0, 1, 1, 1], [1, 1, 1, 4]]))
    memory.settle(reference.topk(pending, (1,)))
    assert memory.tensors["velocity"].tolist() == [[0, 1, 1, 1], [1, 1, 1, 0]]


def test_momentum_works_in_unscaled_units():
    """A loss scale of 4 and a gain of 1/4 change nothing."""
    plain, scaled = (memory_of(gs.Momentum(beta=0.5, clip=1.0)) for _ in range(2))
    grad_Ln = torch.randn(2, 4)
    one, other = correct(plain, grad_Ln), correct(scaled, 4 * grad_Ln, gain=0.25)
    assert torch.equal(one.grad_Ln, other.grad_Ln)
    assert other.gain == 1.0


def test_clipping_bounds_each_worker_and_leaves_small_and_zero_gradients_alone():
    memory = memory_of(gs.Momentum(clip=2.0))
    grad_Ln = torch.tensor([[30.0, 40, 0, 0], [0.3, 0.4, 0, 0]])
    clipped_Ln = correct(memory, grad_Ln).grad_Ln
    assert clipped_Ln[0].norm().item() == pytest.approx(2 / math.sqrt(2))
    assert torch.equal(clipped_Ln[1], grad_Ln[1])
    assert torch.equal(correct(memory, torch.zeros(2, 4)).grad_Ln, torch.zeros(2, 4))


def test_clipping_bounds_gradients_whose_square_overflows():
    clipped_Ln = correct(memory_of(gs.Momentum(clip=2.0)), torch.full((2, 4), 1e20)).grad_Ln
    torch.testing.assert_close(clipped_Ln, torch.full((2, 4), 1 / math.sqrt(2)))


def test_warm_up_never_goes_below_the_target():
    densities = [gs.Momentum(warmup=5).density(step, 0.05) for step in range(6)]
    assert densities == [0.25, 0.0625, 0.05, 0.05, 0.05, 0.05]
    assert gs.Momentum().density(0, 0.05) == 0.05


def test_give_back_is_the_inverse_of_sending(generator):
    p_Ln = torch.randn(2, 4, generator=generator)
    memory_Ln = torch.zeros(2, 4)
    sparse = reference.topk(Pending(p_Ln, memory_Ln, ONE, values=torch.bfloat16), (2,))
    assert not torch.equal(memory_Ln, p_Ln)
    reference.give_back(memory_Ln, sparse)
    assert torch.equal(memory_Ln, p_Ln)
