"""Saved states: keyed by name, checked whole before anything changes."""

import copy

import pytest
import torch

import gradsieve as gs

PARAMS = [torch.zeros(6), torch.zeros(4)]


def simulator(rule="topk:0.2", params=PARAMS, **options):
    return gs.Simulator(params, gs.parse(rule), **{"workers": 2, "exchange": "allgather", **options})


def after_a_step(**options):
    sim = simulator(**options)
    sim.step(torch.arange(20.0).view(2, 10), lr=0.5)
    return sim


def plain(value):
    """Whether a value is made of tensors and plain values only."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and plain(part) for key, part in value.items())
    return value is None or type(value) in (torch.Tensor, int, float, str)


@pytest.mark.parametrize("feedback", ["gradient", "update", "momentum", "none"])
def test_a_state_is_by_parameter_name_and_plain(feedback):
    state = after_a_step(rule="accordion:0.2,0.4", feedback=feedback).state_dict()
    assert plain(state)
    assert {name: tuple(parts["memory"].shape) for name, parts in state["memory"].items()} == {"0": (2, 6), "1": (2, 4)}
    assert (state["step"], state["lr"], state["feedback"]) == (1, 0.5, feedback)


BAD = {
    "nothing": lambda state: None,
    "a list": lambda state: [state],
    "another version": lambda state: {**state, "version": 99},
    "another feedback": lambda state: {**state, "feedback": "momentum"},
    "a parameter too many": lambda state: {**state, "memory": {**state["memory"], "2": state["memory"]["1"]}},
    "another size": lambda state: {**state, "memory": {**state["memory"], "1": state["memory"]["0"]}},
    "three workers": lambda state: {
        **state,
        "memory": {name: {"memory": parts["memory"].repeat(2, 1)[:3]} for name, parts in state["memory"].items()},
    },
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_refused_and_changes_nothing(case):
    sim = after_a_step()
    before = copy.deepcopy(sim.state_dict())
    with pytest.raises(ValueError, match="state"):
        sim.load_state_dict(BAD[case](copy.deepcopy(before)))
    after = sim.state_dict()
    assert after["step"] == before["step"]
    for name, parts in before["memory"].items():
        assert torch.equal(after["memory"][name]["memory"], parts["memory"])


def test_a_memory_finds_its_parameter_in_another_scope():
    saved = after_a_step().state_dict()
    sim = simulator(scope="global")
    sim.load_state_dict(saved)
    assert torch.equal(sim.channel.memory.memory_Ln, torch.cat([saved["memory"][n]["memory"] for n in "01"], dim=1))


def test_a_loaded_memory_is_delivered_by_a_dense_step():
    """A dense step sends a gradient as it lies only where nothing waits; a loaded memory waits."""
    saved = after_a_step().state_dict()
    sim = simulator(exchange="dense")
    sim.load_state_dict(saved)
    waiting_n = torch.cat([saved["memory"][name]["memory"] for name in "01"], dim=1).mean(0)
    assert torch.equal(sim.step(torch.zeros(2, 10)), waiting_n)
    assert not sim.channel.memory.memory_Ln.any()


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_resharding_keeps_what_is_owed(workers):
    """Results are means, so every new worker holds the mean memory of the old ones."""
    old = after_a_step(workers=2)
    owed_n = old.channel.memory.memory_Ln.mean(0)
    new = simulator(workers=workers)
    new.load_state_dict(gs.reshard([old.state_dict()], workers))
    assert new.channel.memory.memory_Ln.shape[0] == workers
    assert torch.equal(new.channel.memory.memory_Ln.mean(0), owed_n)


def test_resharding_nothing_is_an_error():
    with pytest.raises(ValueError, match="states takes the saved states of all old ranks"):
        gs.reshard([], 2)


@pytest.mark.parametrize(
    ("states", "workers", "said"),
    [(3, 2, "all 4 old ranks, not of 3"), (1, 2, "not of 1"), (4, 0, "workers takes")],
)
def test_a_part_of_the_old_ranks_would_lose_what_the_others_owe(states, workers, said):
    old = {**after_a_step().state_dict(), "workers": 4}
    ranks = [{**old, f"memory of rank {rank}": old["memory"]} for rank in range(states)]
    for state in ranks:
        del state["memory"]
    with pytest.raises(ValueError, match=said):
        gs.reshard(ranks, workers)


def test_another_rule_takes_the_memory_and_leaves_what_accordion_remembers():
    saved = after_a_step(rule="accordion:0.2,0.4").state_dict()
    sim = simulator(rule="topk:0.2")
    sim.load_state_dict(saved)
    assert torch.equal(sim.state_dict()["memory"]["1"]["memory"], saved["memory"]["1"]["memory"])


def by_rank(steps=(3, 3)):
    """The states of two ranks."""
    states = []
    for rank, step in enumerate(steps):
        state = {**after_a_step().state_dict(), "step": step}
        states.append({**state, f"memory of rank {rank}": state.pop("memory")})
        del states[-1]["memory"]
    return states


def test_a_rank_twice_or_ranks_of_two_steps_are_refused():
    one, other = by_rank()
    assert gs.reshard([one, other], 1)["step"] == 3
    with pytest.raises(ValueError, match="one is there twice"):
        gs.reshard([one, one], 1)
    with pytest.raises(ValueError, match="not of steps 3, 9"):
        gs.reshard(by_rank((3, 9)), 1)


@pytest.mark.parametrize("name", ["feedback", "step", "lr", "rule"])
def test_a_state_in_pieces_is_refused(name):
    saved = after_a_step().state_dict()
    del saved[name]
    with pytest.raises(ValueError, match=f"the state lacks {name}"):
        simulator().load_state_dict(saved)
