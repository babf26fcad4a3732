"""A gradient that is not finite on one worker, once: everyone sees it, nobody remembers it."""

import math

import pytest
import torch

import gradsieve as gs

pytestmark = pytest.mark.usefixtures("any_ops", "poison")

N = 400
RULES = [
    "dense",
    "threshold:1.5",
    "topk:0.05",
    "randomk:0.05",
    "blockrandomk:0.05",
    "gaussiank:0.05",
    "sampledtopk:0.05,sample=0.1",
    "accordion:0.02,0.2,interval=2",
]
CASES = [(rule, exchange) for rule in RULES for exchange in ("allgather", "dense")]
CASES += [("randomk:0.05", "allreduce"), ("blockrandomk:0.05", "allreduce"), ("topk:0.05", "auto")]


@pytest.mark.parametrize("feedback", ["gradient", "update", "momentum", "none"])
@pytest.mark.parametrize(("rule", "exchange"), CASES)
def test_a_bad_step_is_seen_and_leaves_no_trace(rule, exchange, feedback, generator):
    """Beside a twin that never saw it: memories agree to rounding, and so does what comes after."""
    sim, twin = (
        gs.Simulator(N, gs.parse(rule), workers=2, exchange=exchange, feedback=feedback, strict=True) for _ in range(2)
    )
    for bad in (math.inf, -math.inf, math.nan):
        grad_Wn = torch.randn(2, N, generator=generator)
        sim.step(grad_Wn, lr=0.4)
        twin.step(grad_Wn, lr=0.4)
        grad_Wn = torch.randn(2, N, generator=generator)
        grad_Wn[1, 123] = bad
        assert not sim.step(grad_Wn, lr=0.1).isfinite().all()
        if feedback != "none":
            for part, tensor in twin.channel.memory.tensors.items():
                units = 0.1 / 0.4 if feedback == "update" else 1.0  # the memory has followed the rate
                torch.testing.assert_close(sim.channel.memory.tensors[part] * units, tensor, rtol=1e-6, atol=1e-6)
        for part, tensor in twin.channel.state.items():
            torch.testing.assert_close(sim.channel.state[part], tensor, rtol=1e-6, atol=0, equal_nan=True)
        sim._steps = twin._steps  # random rules draw by the step
    grad_Wn = torch.randn(2, N, generator=generator)
    one_n, other_n = sim.step(grad_Wn, lr=0.2), twin.step(grad_Wn, lr=0.2)
    torch.testing.assert_close(one_n, other_n, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_every_parameter_shows_it(scope):
    """The user may look at any one gradient; GradScaler looks at all."""
    sim = gs.Simulator([torch.zeros(30), torch.zeros(20)], gs.TopK(0.1), workers=2, exchange="allgather", scope=scope)
    grad_Wn = torch.ones(2, 50)
    grad_Wn[0, 3] = math.inf
    first_n, second_n = sim.step(grad_Wn).split([30, 20])
    assert not first_n.isfinite().all()
    assert not second_n.isfinite().all()


@pytest.mark.parametrize("feedback", ["gradient", "update"])
def test_a_finite_mean_that_float16_cannot_hold_loses_nothing(feedback):
    """What was sent for a step that nobody can take is back in the memory, in the units of that step."""
    sim = gs.Simulator(4, gs.TopK(0.5), workers=2, exchange="allgather", feedback=feedback, dtype=torch.float16)
    grad_n = torch.tensor([60_000.0, 59_008.0, 57_984.0, 1.0]).half()
    given_n, delivered_n, finite = torch.zeros(4).double(), torch.zeros(4).double(), []
    for lr in (1.0, 1.0, 0.5, 0.25, 0.25):
        mean_n = sim.step(grad_n.expand(2, -1), lr=lr)
        grad_n = torch.ones(4).half() if len(finite) > 1 else grad_n
        scale = lr if feedback == "update" else 1.0
        given_n += scale * (torch.tensor([60_000.0, 59_008.0, 57_984.0, 1.0]) if len(finite) < 3 else torch.ones(4))
        finite.append(bool(mean_n.isfinite().all()))
        if finite[-1]:
            delivered_n += scale * mean_n.double()
        memory_n = sim.channel.memory.memory_Ln[0].double() * scale
        torch.testing.assert_close(delivered_n + memory_n, given_n, rtol=1e-3, atol=1.0)
    assert not all(finite)


def test_what_float16_cannot_hold_is_nothing_to_learn_from():
    sim = gs.Simulator(4, gs.Accordion(0.25, 0.5, interval=1), workers=2, exchange="allgather", dtype=torch.float16)
    for _ in range(4):
        sim.step(torch.tensor([60_000.0, 59_008.0, 57_984.0, 57_000.0]).half().expand(2, -1))
        assert all(not tensor.isinf().any() for tensor in sim.channel.state.values())
    assert bool(sim.channel.bad)
