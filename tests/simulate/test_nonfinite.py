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
                torch.testing.assert_close(sim.channel.memory.tensors[part], tensor, rtol=1e-6, atol=1e-6)
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
