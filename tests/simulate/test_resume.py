"""A run that was saved and resumed goes on as if it had not stopped."""

import copy
import io

import pytest
import torch

import gradsieve as gs

pytestmark = pytest.mark.usefixtures("any_ops", "poison")

PARAMS = [torch.zeros(size) for size in (300, 1, 99)]
RULES = [
    ("dense", {}),
    ("threshold:1.5", {"strict": True}),
    ("topk:0.05", {}),
    ("randomk:0.05", {}),
    ("blockrandomk:0.05", {}),
    ("gaussiank:0.05", {"strict": True}),
    ("sampledtopk:0.05,sample=0.1", {"strict": True}),
    ("accordion:0.02,0.2,interval=4", {}),
]


def simulator(rule, **options):
    return gs.Simulator(PARAMS, gs.parse(rule), workers=2, **options)


def through_a_file(state):
    """What a checkpoint does to it; nothing but tensors and plain values may be inside."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("feedback", ["gradient", "update", "momentum"])
@pytest.mark.parametrize(("rule", "options"), RULES, ids=[rule for rule, _ in RULES])
def test_thirty_steps_after_resuming_are_bit_equal(rule, options, feedback, generator):
    straight = simulator(rule, feedback=feedback, exchange="allgather", **options)
    for step in range(10):
        straight.step(torch.randn(2, 400, generator=generator), lr=1 / (1 + step))
    resumed = simulator(rule, feedback=feedback, exchange="allgather", **options)
    resumed.load_state_dict(through_a_file(straight.state_dict()))
    for step in range(10, 40):
        grad_Wn = torch.randn(2, 400, generator=generator)
        one_n, other_n = (sim.step(grad_Wn, lr=1 / (1 + step)) for sim in (straight, resumed))
        assert torch.equal(one_n, other_n)
    for part, tensor in straight.channel.memory.tensors.items():
        assert torch.equal(tensor, resumed.channel.memory.tensors[part])


@pytest.mark.parametrize("exchange", ["allgather", "auto"])
def test_a_planned_capacity_is_learnt_again_and_loses_nothing(exchange, generator):
    """The slots come from the last counts, which a state does not hold: what a resumed run sends may come a step
    earlier than in the straight one, but all that came in is sent or waits in both."""
    straight = simulator("threshold:300", exchange=exchange)
    resumed = simulator("threshold:300", exchange=exchange)
    totals = torch.zeros(2, 400)
    for step in range(40):
        grad_Wn = torch.randint(-500, 500, (2, 400), generator=generator).float() * (step % 9 == 0)
        if step == 10:
            resumed.load_state_dict(through_a_file(straight.state_dict()))
            totals[1] = totals[0]
        totals[0] += straight.step(grad_Wn) * 2
        if step >= 10:
            totals[1] += resumed.step(grad_Wn) * 2
    waiting = torch.stack([sim.channel.memory.memory_Ln.sum(0) for sim in (straight, resumed)])
    assert torch.equal((totals + waiting)[0], (totals + waiting)[1])
    assert straight.stats().total.deferred > 0 or exchange == "auto"


def test_a_state_is_a_copy():
    sim = simulator("topk:0.05", exchange="allgather")
    sim.step(torch.ones(2, 400))
    state = sim.state_dict()
    before = copy.deepcopy(state)
    sim.step(torch.ones(2, 400))
    for name, parts in before["memory"].items():
        assert torch.equal(parts["memory"], state["memory"][name]["memory"])


def test_what_a_state_lacks_starts_afresh(generator):
    """A head that the saved run did not have: not with the memory of whatever ran here before."""
    saved, sim = simulator("topk:0.05", exchange="allgather"), simulator("topk:0.05", exchange="allgather")
    for each in (saved, sim):
        each.step(torch.randn(2, 400, generator=generator))
    state = saved.state_dict()
    del state["memory"]["2"]
    sim.load_state_dict(state)
    assert torch.equal(sim.state_dict()["memory"]["0"]["memory"], state["memory"]["0"]["memory"])
    assert not sim.state_dict()["memory"]["2"]["memory"].any()
