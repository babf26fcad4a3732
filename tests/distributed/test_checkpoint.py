"""The memory outlives the process: saved, resumed, resharded, detached and attached again."""

import io

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from given import Given, drive, memory_of, numbers, same_bits
from torch.distributed.checkpoint.stateful import Stateful
from torch.nn.parallel import DistributedDataParallel

import gradsieve as gs

BEFORE, AFTER = 20, 50
RATES = [0.1 * 0.8 ** (t // 5) * (1 + t % 3) for t in range(BEFORE + AFTER)]


def sieved(rule, options):
    """A new DDP module of several buckets, its sieve, and an optimizer that only holds the rate."""
    ddp = DistributedDataParallel(Given(), bucket_cap_mb=0.0005)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=RATES[0])
    return ddp, gs.attach(ddp, gs.parse(rule), optimizer=optimizer, **options), optimizer


def through_a_file(state):
    """``torch.save`` and the loader that runs no code."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def go_on(ddp, optimizer, grads_Tn, rates):
    means = []
    for grad_n, lr in zip(grads_Tn, rates, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        means.append(drive(ddp, grad_n[None]))
    return torch.cat(means)


def resumed(rank, workers, rule, options, way, folder):
    grads_Tn = numbers(BEFORE + AFTER, workers, 586)[:, rank]
    ddp, sieve, optimizer = sieved(rule, options)
    go_on(ddp, optimizer, grads_Tn[:BEFORE], RATES[:BEFORE])
    if way == "dcp":
        dcp.save({"sieve": sieve}, checkpoint_id=folder)
    else:
        saved = through_a_file(sieve.state_dict())
    memory_n = memory_of(sieve)
    expected_Tn = go_on(ddp, optimizer, grads_Tn[BEFORE:], RATES[BEFORE:])

    again, other, its_optimizer = sieved(rule, options)
    if way == "dcp":
        dcp.load({"sieve": other}, checkpoint_id=folder)
    else:
        other.load_state_dict(saved)
    loaded = same_bits(memory_of(other), memory_n), other.step
    got_Tn = go_on(again, its_optimizer, grads_Tn[BEFORE:], RATES[BEFORE:])
    return loaded, same_bits(got_Tn, expected_Tn), same_bits(memory_of(other), memory_of(sieve)), memory_n


CASES = {
    "topk": ("topk:0.1", {}),
    "threshold": ("threshold:2", {"strict": True}),
    "global": ("topk:0.05", {"scope": "global", "exchange": "allgather"}),
    "randomk": ("randomk:0.1", {"values": "bfloat16", "exchange": "allgather"}),
    "allreduce": ("randomk:0.1", {"exchange": "allreduce"}),
    "accordion": ("accordion:0.05,0.2,interval=6", {"exchange": "allgather"}),
    "momentum": ("topk:0.1", {"feedback": "momentum", "exchange": "allgather"}),
    "update": ("topk:0.1", {"feedback": "update", "exchange": "allgather"}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", ["file", "dcp"])
def test_a_resumed_run_goes_on_bit_for_bit(case, way, ranks, tmp_path):
    """Row 21."""
    rule, options = CASES[case]
    results = ranks(2, resumed, rule, options, way, str(tmp_path))
    for loaded, same_means, same_memory, _ in results:
        assert loaded == (True, BEFORE)
        assert same_means
        assert same_memory
    assert not torch.equal(results[0][3], results[1][3])  # each rank has its own


def saved_by(rank, workers):
    ddp, sieve, _ = sieved("topk:0.05", {"exchange": "allgather"})
    drive(ddp, numbers(BEFORE, workers, 586)[:, rank])
    return through_a_file(sieve.state_dict()), memory_of(sieve)


def loaded_by(rank, workers, states):
    """Take up the mean memory of the old ranks and train on zeros: what they still owed arrives."""
    ddp, sieve, _ = sieved("topk:0.05", {"exchange": "allgather"})
    sieve.load_state_dict(through_a_file(gs.reshard(states, workers)))
    memory_n = memory_of(sieve)
    return memory_n, sieve.step, drive(ddp, torch.zeros(40, 586)).double().sum(0)


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4)])
def test_another_number_of_workers_keeps_the_mean_memory(old, new, ranks):
    """Row 22."""
    saved = ranks(old, saved_by)
    mean_n = torch.stack([memory_n for _, memory_n in saved]).double().mean(0)
    assert mean_n.count_nonzero() > 500
    results = ranks(new, loaded_by, [state for state, _ in saved])
    there_n = torch.stack([memory_n for memory_n, _, _ in results]).double().mean(0)
    assert (there_n - mean_n).norm() <= 1e-6 * mean_n.norm()
    for _, step, delivered_n in results:
        assert step == BEFORE
        torch.testing.assert_close(delivered_n, mean_n, rtol=1e-6, atol=1e-6)


def laid_anew(rank, workers, before, after, scope):
    """A memory saved by a module in one memory format and delivered by one in another: what was owed, waited, came."""
    x = torch.randn(2, 8, 9, 9, generator=torch.Generator().manual_seed(rank))
    state, owed = None, 0.0
    for layout, rule in ((before, gs.TopK(0.1)), (after, gs.TopK(1.0))):
        torch.manual_seed(0)
        module = torch.nn.Conv2d(8, 6, 3, bias=False).to(memory_format=layout)
        ddp = DistributedDataParallel(module)
        sieve = gs.attach(ddp, rule, exchange="allgather", scope=scope)
        if state is not None:
            sieve.load_state_dict(state)
        for _ in range(4 if state is None else 1):
            (gradient,) = torch.autograd.grad((module(x) ** 2).sum(), [module.weight])
            ddp.zero_grad()
            ((ddp(x) ** 2).sum() * (state is None)).backward()  # the second module's own gradient is zero
            owed = owed + (gradient - module.weight.grad if state is None else 0.0)
        state = through_a_file(sieve.state_dict()) if state is None else state
    return owed, state[f"memory of rank {rank}"]["weight"]["memory"].view(6, 8, 3, 3), module.weight.grad


@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize(
    ("before", "after"),
    [(torch.channels_last, torch.contiguous_format), (torch.contiguous_format, torch.channels_last)],
)
def test_a_memory_is_saved_in_the_order_of_elements_however_they_lie(before, after, scope, ranks):
    results = ranks(2, laid_anew, before, after, scope)
    owed, waited = (torch.stack([result[i] for result in results]).mean(0) for i in (0, 1))
    assert waited.any()
    torch.testing.assert_close(waited, owed, rtol=1e-5, atol=1e-3)
    for _, _, came in results:
        torch.testing.assert_close(came, waited, rtol=1e-5, atol=1e-4)


def wrong_states(rank, workers):
    ddp, sieve, _ = sieved("topk:0.05", {"exchange": "allgather"})
    drive(ddp, numbers(5, workers, 586)[:, rank])
    mine = sieve.state_dict()
    states = [None] * workers
    dist.all_gather_object(states, mine)
    before_n = memory_of(sieve)
    for state, message in (
        (states[1 - rank], f"holds memory of rank {1 - rank}, this is rank {rank}"),
        (gs.Simulator(Given(), gs.TopK(0.05), workers=2).state_dict(), r"not \[1, 280\]"),
        ({**mine, "feedback": "update"}, "feedback='update'"),
        ({**mine, "version": 99}, "version 1"),
    ):
        with pytest.raises(ValueError, match=message):
            sieve.load_state_dict(state)
    return isinstance(sieve, Stateful), same_bits(memory_of(sieve), before_n)


def test_a_state_of_another_rank_or_run_is_refused(ranks):
    assert ranks(2, wrong_states) == [(True, True)] * 2


def detached(rank, workers):
    grads_Tn = numbers(30, workers, 586)[:, rank]
    ddp, sieve, _ = sieved("topk:0.1", {"exchange": "allgather"})
    first_Tn = drive(ddp, grads_Tn[:10])
    sieve.detach()
    memory_n = memory_of(sieve)
    dense_Tn = drive(ddp, grads_Tn[10:20])
    kept = same_bits(memory_of(sieve), memory_n)
    again = gs.attach(ddp, gs.TopK(0.1), exchange="allgather")
    again.load_state_dict(sieve.state_dict())
    second_Tn = drive(ddp, grads_Tn[20:])
    return kept, torch.cat([first_Tn, dense_Tn, second_Tn]), memory_of(again)


def test_detached_it_is_plain_ddp_and_attached_again_it_goes_on(ranks):
    results = ranks(2, detached)
    grads_TWn = numbers(30, 2, 586)
    sim = gs.Simulator(Given(), gs.TopK(0.1), workers=2, exchange="allgather")
    sparse_Tn = torch.stack([sim.step(grad_Wn) for grad_Wn in torch.cat([grads_TWn[:10], grads_TWn[20:]])])
    for rank, (kept, means_Tn, memory_n) in enumerate(results):
        assert kept
        assert same_bits(means_Tn[:10], sparse_Tn[:10])
        torch.testing.assert_close(means_Tn[10:20], grads_TWn[10:20].mean(1))
        assert same_bits(means_Tn[20:], sparse_Tn[10:])
        assert same_bits(memory_n, sim.channel.memory.memory_Ln[rank])


def in_a_group_of_its_own(rank, workers):
    group = dist.new_group([1, 2])
    if rank == 0:
        return None

    def lazy():
        module = Given()
        ddp = DistributedDataParallel(module, process_group=group)
        sieve = gs.Sieve(module, gs.TopK(0.1), exchange="allgather", group=group)
        ddp.register_comm_hook(sieve, gs.hook)
        return ddp, sieve

    ddp, sieve = lazy()
    before = sieve.state_dict()
    drive(ddp, numbers(3, workers, 586)[:, rank])
    state = sieve.state_dict()
    _, again = lazy()
    again.load_state_dict(state)
    held = sieve._group
    return [key for key in before if key.startswith("memory")], before["workers"], memory_of(again), state, held


def test_a_sieve_that_waits_for_its_group_has_that_groups_ranks(ranks):
    for rank, (names, workers, memory_n, state, held) in enumerate(ranks(3, in_a_group_of_its_own)[1:]):
        assert names == [f"memory of rank {rank}"]
        assert workers == state["workers"] == 2
        assert torch.equal(memory_n, torch.cat([kinds["memory"][0] for kinds in state[names[0]].values()]))
        assert held is None  # a callback holds the sieve, and must not be the last to hold the group
