"""Nothing is ever lost: what was sent and what waits add up to what came in, over 200 steps."""

import itertools

import pytest
import torch

import gradsieve as gs
from gradsieve import layout

pytestmark = pytest.mark.usefixtures("poison")

RULES = [
    "dense",
    "threshold:2",
    "topk:0.1",
    "randomk:0.1",
    "blockrandomk:0.1",
    "gaussiank:0.1",
    "sampledtopk:0.1,sample=0.2",
    "accordion:0.1,0.4,interval=20",
]
SCOPES = ["layer", "bucket", "global"]
VALUES = ["float32", "bfloat16", "float16"]
PARAMS = [torch.zeros(size) for size in (40, 1, 15, 8)]
STEPS, W, N = 200, 2, 64


@pytest.fixture(autouse=True)
def two_buckets(monkeypatch):
    """A small cap, so that bucket is neither layer nor global."""
    monkeypatch.setattr(layout, "BUCKET_BYTES", 4 * 41)
    assert [layout.layout_of(PARAMS).segments(scope).sizes for scope in SCOPES] == [(40, 1, 15, 8), (41, 23), (64,)]


def simulator(rule, **options):
    options = {"workers": W, "exchange": "allgather", **options}
    return gs.Simulator(PARAMS, gs.parse(rule), meter=gs.NullMeter(), **options)


def gradients(generator):
    return torch.randn(STEPS, W, N, generator=generator)


def memory_of(sim, part="memory"):
    return sim.channel.memory.tensors[part].double()


def relative_error(got, expected):
    return ((got - expected).norm() / expected.norm()).item()


def rates():
    """Warm-up, then steps down: all the ways in which a rate moves."""
    return [0.1 * min(1.0, (t + 1) / 20) * 0.3 ** (t // 70) for t in range(STEPS)]


each_case = pytest.mark.parametrize(("rule", "scope", "values"), list(itertools.product(RULES, SCOPES, VALUES)))


@each_case
def test_gradient_feedback(rule, scope, values, generator):
    """sum of means + mean memory = sum of mean gradients."""
    sim, grads_TWn = simulator(rule, scope=scope, values=values), gradients(generator)
    sent_n = sum(sim.step(grad_Wn).double() for grad_Wn in grads_TWn)
    assert relative_error(sent_n + memory_of(sim).mean(0), grads_TWn.double().mean(1).sum(0)) <= 1e-6


@each_case
def test_update_feedback(rule, scope, values, generator):
    """sum of lr mean + last lr x mean memory = sum of lr x mean gradient, while the rate moves."""
    sim, grads_TWn = simulator(rule, scope=scope, values=values, feedback="update"), gradients(generator)
    moved_n = sum(lr * sim.step(grad_Wn, lr=lr).double() for lr, grad_Wn in zip(rates(), grads_TWn, strict=True))
    came_n = torch.einsum("t,twn->n", torch.tensor(rates(), dtype=torch.float64), grads_TWn.double()) / W
    assert relative_error(moved_n + rates()[-1] * memory_of(sim).mean(0), came_n) <= 1e-6


@each_case
def test_momentum_feedback(rule, scope, values, generator):
    """sum of means + mean memory = sum of mean velocities, each made from what masking left of the one before."""
    sim, grads_TWn = simulator(rule, scope=scope, values=values, feedback="momentum"), gradients(generator)
    sent_n, velocities_n = torch.zeros(2, N, dtype=torch.float64)
    for grad_Wn in grads_TWn:
        velocities_n += (0.9 * memory_of(sim, "velocity") + grad_Wn.double()).mean(0)
        sent_n += sim.step(grad_Wn).double()
    assert relative_error(sent_n + memory_of(sim).mean(0), velocities_n) <= 1e-6


@each_case
def test_no_feedback(rule, scope, values, generator):
    """What is sent is of this gradient alone, and what is not is dropped. Without a memory 200 steps are no more
    than 200 gradients, so 200 workers take one each; a second step finds no trace of the first."""
    sim = simulator(rule, scope=scope, values=values, feedback="none", workers=STEPS)
    for _ in range(2):
        grad_Wn = torch.randn(STEPS, N, generator=generator)
        mean_n = sim.step(grad_Wn).double()
        dropped_Wn = memory_of(sim)
        assert relative_error(mean_n + dropped_Wn.mean(0), grad_Wn.double().mean(0)) <= 1e-6
        untouched_Wn = dropped_Wn == grad_Wn.double()
        assert (untouched_Wn | (dropped_Wn.abs() <= 2**-8 * grad_Wn.double().abs())).all()


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("options", [{}, {"strict": True}, {"exchange": "auto"}], ids=["allgather", "strict", "auto"])
def test_whole_numbers_are_conserved_exactly(rule, values, options, generator):
    """Sums of whole numbers round nowhere in float32, so not one unit may be missing: also across deferred
    elements, changes of capacity, and steps that go dense."""
    sim = simulator(rule, values=values, **options)
    came_n, sent_n = torch.zeros(2, N)
    for step in range(30):
        grad_Wn = torch.randint(-500, 500, (W, N), generator=generator).float() * (10 if step % 7 == 0 else 1)
        came_n += grad_Wn.sum(0)
        sent_n += sim.step(grad_Wn) * W
    assert torch.equal(sent_n + sim.channel.memory.memory_Ln.sum(0), came_n)


@pytest.mark.parametrize("rule", ["randomk:0.1", "blockrandomk:0.1"])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("feedback", ["gradient", "update"])
def test_shared_coordinates_added_on_the_way_lose_nothing(rule, scope, feedback, generator):
    sim = simulator(rule, scope=scope, feedback=feedback, exchange="allreduce")
    grads_TWn = gradients(generator)
    sent_n = sum(sim.step(grad_Wn, lr=0.1).double() for grad_Wn in grads_TWn)
    assert relative_error(sent_n + memory_of(sim).mean(0), grads_TWn.double().mean(1).sum(0)) <= 1e-6


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule != "dense"])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_owners_pass_on_or_keep_every_unit(rule, workers, generator):
    """Whole numbers again: what was delivered, what workers hold and what owners hold. The load is uneven, so that
    ranges move, and a state folds the owners' memory into the workers'."""
    sim = simulator(rule, workers=workers, exchange="owner")
    came_n, sent_n = torch.zeros(2, N)
    for step in range(40):
        grad_Wn = torch.randint(-50, 50, (workers, N), generator=generator).float()
        grad_Wn[:, : N // 4] *= 20 if step > 4 else 1
        came_n += grad_Wn.sum(0)
        sent_n += sim.step(grad_Wn) * workers
        if step == 20:
            sim.load_state_dict(sim.state_dict())
    held = sim.state_dict()["memory"]
    assert torch.equal(sent_n + torch.cat([held[name]["memory"].sum(0) for name in sim.layout.names]), came_n)


def test_what_float16_cannot_hold_waits_and_arrives_later():
    sim = gs.Simulator(1000, gs.TopK(0.001), workers=1, values="float16", exchange="allgather")
    grad_Wn = torch.zeros(1, 1000)
    grad_Wn[0, 3] = 200_000.0
    arrived = [sim.step(grad_Wn if step == 0 else torch.zeros(1, 1000))[3].item() for step in range(5)]
    assert arrived == [65504.0, 65504.0, 65504.0, 200_000.0 - 3 * 65504.0, 0.0]
