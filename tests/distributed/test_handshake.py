"""Before anything is exchanged the ranks compare notes: a difference is the same error on all of them."""

import time

import pytest
import torch
from given import Given, drive, memory_of, numbers, same_bits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsieve as gs

USUAL = {"rule": "randomk:0.1,seed=1", "scope": "layer", "values": "float32", "exchange": "allgather"}

CASES = {  # what one rank has instead, and the field that the error names
    "rule": ({"rule": "blockrandomk:0.1,seed=1"}, "rule: rank 0 has RandomK, rank 1 has BlockRandomK"),
    "density": ({"rule": "randomk:0.2,seed=1"}, "rule's density: rank 0 has 0.1, rank 1 has 0.2"),
    "seed": ({"rule": "randomk:0.1,seed=2"}, "rule's seed: rank 0 has 1, rank 1 has 2"),
    "scope": ({"scope": "global"}, "scope: rank 0 has layer, rank 1 has global"),
    "precision": ({"values": "bfloat16"}, "values: rank 0 has torch.float32, rank 1 has torch.bfloat16"),
    "exchange": ({"exchange": "allreduce"}, "exchange: rank 0 has allgather, rank 1 has allreduce"),
    "feedback": ({"feedback": "none"}, "feedback: rank 0 has Feedback(kind='gradient')"),
    "strict": ({"strict": True}, "strict: rank 0 has False, rank 1 has True"),
    "version": ({"version": "9.9.9"}, "rank 1 has 9.9.9"),
    "model": ({"model": "other"}, "model: rank 0 has 5 parameters, 586 elements"),
}


class Other(nn.Module):
    """The same shapes under other names, which DDP itself does not notice."""

    def __init__(self):
        super().__init__()
        self.body = Given()

    def forward(self, grad_n):
        return self.body(grad_n)


def setting(rank, odd):
    """A DDP module and the arguments of ``attach``: the usual ones, or ``odd`` on rank 1."""
    options = {**USUAL, **(odd if rank == 1 else {})}
    ddp = DistributedDataParallel(Other() if options.pop("model", None) else Given())
    version = options.pop("version", None)
    if version:
        gs.version.__version__ = version
    return ddp, gs.parse(options.pop("rule")), options


def differing(rank, workers, odd):
    ours = gs.version.__version__
    try:
        ddp, rule, options = setting(rank, odd)
        start = time.monotonic()
        with pytest.raises(ValueError) as caught:
            gs.attach(ddp, rule, **options)
        seconds = time.monotonic() - start
        gs.version.__version__ = ours
        gs.attach(ddp, gs.TopK(0.1))  # what failed left nothing behind
        return type(caught.value).__name__, str(caught.value), seconds
    finally:
        gs.version.__version__ = ours


@pytest.mark.parametrize("case", [case for case in CASES if case != "model"])
def test_a_difference_is_the_same_error_on_all_ranks(case, ranks):
    """Row 25."""
    odd, names = CASES[case]
    results = ranks(3, differing, odd)
    for kind, text, seconds in results:
        assert kind == "DisagreementError"
        assert text == results[0][1]
        assert names in text
        assert seconds < 5


def other_model(rank, workers):
    ddp, rule, options = setting(rank, CASES["model"][0])
    with pytest.raises(ValueError) as caught:
        gs.attach(ddp, rule, **options)
    return str(caught.value)


def test_another_model_is_noticed_where_ddp_does_not(ranks):
    """Row 25: the shapes agree, the names do not, and the memory goes by name."""
    results = ranks(3, other_model)
    assert len(set(results)) == 1
    assert "ranks disagree on model: rank 0 has 5 parameters, 586 elements" in results[0]


def lazily(rank, workers, odd):
    """As a trainer does that knows no process group yet."""
    module = Given()
    options = {**USUAL, **(odd if rank == 1 else {})}
    sieve = gs.Sieve(module, gs.parse(options.pop("rule")), **options)
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.0005)
    ddp.register_comm_hook(sieve, gs.hook)
    start = time.monotonic()
    try:
        means_Tn = drive(ddp, numbers(10, workers, 586)[:, rank])
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match="ranks disagree"):
            sieve.state_dict()
        return str(error), time.monotonic() - start
    return means_Tn, memory_of(sieve)


def test_a_lazy_sieve_compares_notes_at_its_first_bucket(ranks):
    for text, seconds in ranks(2, lazily, CASES["seed"][0]):
        assert "ranks disagree on rule's seed: rank 0 has 1, rank 1 has 2" in text
        assert seconds < 5


def attached(rank, workers):
    ddp = DistributedDataParallel(Given(), bucket_cap_mb=0.0005)
    sieve = gs.attach(ddp, gs.parse(USUAL["rule"]), exchange="allgather")
    return drive(ddp, numbers(10, workers, 586)[:, rank]), memory_of(sieve)


def test_a_lazy_sieve_does_what_an_attached_one_does(ranks):
    for one, other in zip(ranks(2, lazily, {}), ranks(2, attached), strict=True):
        assert all(same_bits(a, b) for a, b in zip(one, other, strict=True))


def in_a_group(rank, workers):
    """DDP over ranks 1 and 2 of three."""
    group = torch.distributed.new_group([1, 2])
    if rank == 0:
        return None
    ddp = DistributedDataParallel(Given(), process_group=group)
    gs.attach(ddp, gs.TopK(0.1), exchange="allgather")
    return drive(ddp, numbers(10, 3, 586)[:, rank])


def lazily_in_a_group(rank, workers):
    groups = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2])]
    group = groups[rank // 2]
    ddp = DistributedDataParallel(Given(), process_group=group)
    ddp.register_comm_hook(gs.Sieve(ddp.module, gs.TopK(1.0), exchange="allgather", group=group), gs.hook)
    return drive(ddp, torch.full((1, 586), float(rank)))[0, 0].item()


def test_a_lazy_sieve_meets_the_group_that_it_was_given(ranks):
    assert ranks(3, lazily_in_a_group) == [0.5, 0.5, 2.0]


def test_a_module_over_some_ranks_meets_only_these(ranks):
    _, one_Tn, other_Tn = ranks(3, in_a_group)
    sim = gs.Simulator(Given(), gs.TopK(0.1), workers=2, exchange="allgather")
    expected_Tn = torch.stack([sim.step(grad_Wn[1:]) for grad_Wn in numbers(10, 3, 586)])
    assert same_bits(one_Tn, expected_Tn)
    assert same_bits(other_Tn, expected_Tn)
