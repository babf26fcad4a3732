"""Slots and forms: every rank comes to the same plan, and it is never dearer than dense."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradsieve as gs
from gradsieve.exchange.plan import COUNT_BYTES, LONGEST_REST, Plan


def plan_of(size=100_000, workers=4, fixed=None, values=torch.float32, **options):
    return Plan(size=size, values=values, workers=workers, layout=1, fixed=fixed, **options)


@given(size=st.integers(0, 5000), workers=st.integers(1, 20))
def test_most_is_where_a_gather_gets_dearer_than_dense(size, workers):
    plan = plan_of(size, workers)
    assert -1 <= plan.most <= size
    affordable = plan.dense_bytes - (workers - 1) * COUNT_BYTES
    if plan.most >= 0:
        assert plan.gather_bytes(plan.format(plan.most)) <= affordable
    if plan.most < size:
        assert plan.gather_bytes(plan.format(plan.most + 1)) > affordable


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("rule", ["threshold:0.1", "topk:0.5", "gaussiank:0.5", "dense", "randomk:0.01"])
@pytest.mark.parametrize("size", [0, 1, 5, 40, 3000])
def test_auto_never_sends_more_than_dense(rule, size, workers, generator):
    """Also for a model too small for any header."""
    sim = gs.Simulator(size, gs.parse(rule), workers=workers)
    for _ in range(6):
        sim.step(torch.randn(workers, size, generator=generator))
        assert sim.stats().last.bytes <= sim.stats().last.dense_bytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("density", [0.2, 0.45, 0.6, 1.0])
def test_dense_is_what_ddp_would_send_of_such_gradients(density, dtype, generator):
    """Not of float32 ones: 60% of a bfloat16 gradient are more bytes than all of it."""
    sim = gs.Simulator(3000, gs.TopK(density), workers=2, dtype=dtype)
    for _ in range(3):
        sim.step(torch.randn(2, 3000, generator=generator).to(dtype))
        assert sim.stats().last.bytes <= 3000 * dtype.itemsize


@pytest.mark.parametrize("density", [0.6, 0.9])
def test_a_dense_step_with_a_memory_to_deliver_costs_float32(density, generator):
    """Momentum always has one: going dense for the 16 bits of a gradient would send more than the elements do."""
    sent = {}
    for exchange in ("auto", "allgather"):
        sim = gs.Simulator(
            3000, gs.TopK(density), workers=2, dtype=torch.bfloat16, feedback="momentum", exchange=exchange
        )
        for _ in range(3):
            sim.step(torch.randn(2, 3000, generator=generator).bfloat16())
        sent[exchange] = sim.stats().last.bytes
    assert sent["auto"] == sent["allgather"] < 4 * 3000


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_dense_float64_gradients_stay_exact(workers, generator):
    """As float32 values in the packed form they would be fewer bytes, and rounded."""
    sim = gs.Simulator(3000, gs.Dense(), workers=workers, dtype=torch.float64)
    grad_Wn = torch.randn(workers, 3000, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(sim.step(grad_Wn), grad_Wn.mean(0), rtol=1e-15, atol=1e-15)
    assert not sim.channel.memory.memory_Ln.any()


def test_a_fixed_rule_knows_its_slots_and_learns_nothing():
    plan = plan_of(fixed=100)
    plan.learn(5000)
    assert plan.slots == 100
    assert not plan.dense
    assert plan_of(fixed=99_999).dense
    assert not plan_of(fixed=99_999, may_go_dense=False).dense


def test_slots_follow_the_last_count():
    plan = plan_of()
    assert plan.slots is None
    plan.learn(1000)
    assert plan.slots is None  # one count says nothing of the next
    plan.learn(1000)
    first = plan.slots
    assert 1000 < first <= 1.2 * 1000
    plan.learn(first)
    assert plan.slots == first  # enough: no change
    plan.learn(first + 1)
    assert plan.slots > first  # too few
    plan.learn(200)
    assert 200 < plan.slots < 300  # far too many
    assert plan.slots % 16 == 0


def test_while_counts_leap_sizes_are_agreed_on():
    """Planned slots would defer half of each of these steps, first and foremost of the last layers."""
    plan = plan_of()
    for wanted in (100, 200, 400, 800, 1600):
        plan.learn(wanted)
        assert plan.slots is None
    plan.learn(1700)
    assert plan.slots >= 1700
    plan.learn(30)
    plan.learn(60)
    assert plan.slots is not None  # a leap of a few elements is no burst


def test_a_burst_is_late_by_a_step_at_most(generator):
    """Counts double at every step from the twelfth on."""
    sim = gs.Simulator(20_000, gs.HardThreshold(3.0), workers=2, exchange="allgather")
    for step in range(18):
        grads_Wn = 0.1 * torch.randn(2, 20_000, generator=generator)
        grads_Wn[:, -100 * 2 ** max(0, step - 11) :] = 5.0
        sim.step(grads_Wn)
        late = sim.channel.memory.memory_Ln.abs().ge(3.0).any()
        assert bool(late) == (step == 12)


def test_strict_agrees_anew_each_time():
    plan = plan_of(strict=True)
    plan.learn(1000)
    assert plan.slots is None


def test_too_many_elements_go_dense_for_longer_and_longer():
    plan = plan_of()
    rests = []
    for _ in range(10):
        plan.learn(plan.most + 1)
        rests.append(0)
        while plan.dense:
            rests[-1] += 1
            plan.went_dense()
    assert rests[:4] == [1, 2, 4, 8]
    assert max(rests) == rests[-1] == LONGEST_REST
    plan.learn(10)
    plan.learn(plan.most + 1)
    assert plan.rest == 1


def test_a_step_after_the_rest_is_sparse_again(generator):
    sim = gs.Simulator(3000, gs.HardThreshold(1.0), workers=4)
    densities = []
    for step in range(8):
        sim.step(torch.randn(4, 3000, generator=generator) * (100.0 if step < 2 else 0.0))
        densities.append(sim.stats().last.density)
    assert 1.0 in densities
    assert densities[-1] == 0.0
    assert not sim.channel.memory.memory_Ln.abs().ge(1.0).any()


@pytest.mark.parametrize(("density", "known", "planned"), [(0.001, 1.25, 1.45), (0.01, 1.40, 1.45)])
def test_bytes_are_near_the_floor(density, known, planned):
    """Positions of k of n coordinates need log2(C(n, k)) bits, a bfloat16 value 16."""
    size = 11_200_000
    k = int(density * size)
    choices = math.lgamma(size + 1) - math.lgamma(k + 1) - math.lgamma(size - k + 1)
    floor = choices / math.log(2) / 8 + 2 * k
    plan = plan_of(size=size, values=torch.bfloat16)
    assert plan.format(k).bytes <= known * floor
    plan.learn(k)
    plan.learn(k)
    assert plan.format(plan.slots).bytes <= planned * floor
