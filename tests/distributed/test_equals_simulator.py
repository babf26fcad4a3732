"""Real ranks do what the simulator does: bit for bit where elements are gathered, to rounding where they are added."""

import pytest
import torch
from given import RULES, SHAPES, Given, drive, memory_of, numbers, same_bits, size_of
from torch.nn.parallel import DistributedDataParallel

import gradsieve as gs

STEPS = 50
SMALL = 0.0005  # a bucket cap in MB with which there are two buckets


def on_ranks(rank, workers, cases, steps=STEPS, shapes=SHAPES):
    """The means and the memory of each case, all in one process group."""
    results = []
    for rule, ddp_options, options in cases:
        module = Given(shapes)
        ddp = DistributedDataParallel(module, **ddp_options)
        sieve = gs.attach(ddp, gs.parse(rule), **options)
        means_Tn = drive(ddp, numbers(steps, workers, size_of(module))[:, rank])
        results.append((means_Tn, memory_of(sieve), len(sieve._channels)))
    return results


def in_simulator(workers, rule, options, steps=STEPS, shapes=SHAPES):
    module = Given(shapes)
    sim = gs.Simulator(module, gs.parse(rule), workers=workers, **options)
    means_Tn = torch.stack([sim.step(grad_Wn) for grad_Wn in numbers(steps, workers, size_of(module))])
    return means_Tn, sim.channel.memory.memory_Ln


def check_bits(workers, rule, options, results, steps=STEPS, shapes=SHAPES):
    means_Tn, memory_Wn = in_simulator(workers, rule, options, steps, shapes)
    assert means_Tn.abs().sum() > 0
    for rank, (got_Tn, memory_n, _) in enumerate(results):
        assert same_bits(got_Tn, means_Tn), f"rank {rank}, {rule}, {options}"
        assert same_bits(memory_n, memory_Wn[rank]), f"memory of rank {rank}, {rule}, {options}"


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_every_rule_bit_for_bit(workers, scope, ranks):
    options = {"scope": scope, "exchange": "allgather", "strict": True}
    cases = [(rule, {"bucket_cap_mb": SMALL}, options) for rule in RULES]
    for (rule, _, _), *results in zip(cases, *ranks(workers, on_ranks, cases), strict=True):
        check_bits(workers, rule, options, results)


def on_ranks_of_a_host(rank, workers, crowded, cases):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradsieve.exchange.group.GroupLink.crowded", lambda link: crowded)
        return on_ranks(rank, workers, cases)


@pytest.mark.parametrize("crowded", [False, True])
def test_when_arrivals_are_decoded_changes_nothing(crowded, ranks):
    options = {"exchange": "allgather", "strict": True}
    cases = [("threshold:2", {"bucket_cap_mb": SMALL}, options), ("topk:0.1", {"bucket_cap_mb": SMALL}, options)]
    for (rule, _, _), *results in zip(cases, *ranks(2, on_ranks_of_a_host, crowded, cases), strict=True):
        check_bits(2, rule, options, results)


@pytest.mark.parametrize("values", ["bfloat16", "float16"])
def test_values_of_16_bits_bit_for_bit(values, ranks):
    options = {"values": values, "exchange": "allgather", "strict": True}
    cases = [(rule, {"bucket_cap_mb": SMALL}, options) for rule in RULES]
    for (rule, _, _), *results in zip(cases, *ranks(2, on_ranks, cases), strict=True):
        check_bits(2, rule, options, results)


@pytest.mark.parametrize("feedback", ["none", "momentum", gs.Momentum(nesterov=True, masking=False)], ids=str)
def test_every_feedback_bit_for_bit(feedback, ranks):
    options = {"feedback": feedback, "exchange": "allgather", "strict": True}
    cases = [(rule, {"bucket_cap_mb": SMALL}, options) for rule in ("topk:0.1", "threshold:2")]
    for (rule, _, _), *results in zip(cases, *ranks(2, on_ranks, cases), strict=True):
        check_bits(2, rule, options, results)


@pytest.mark.parametrize("cap", [0.05, 25])
@pytest.mark.parametrize("static_graph", [False, True])
def test_rebuilt_buckets_lose_no_memory(cap, static_graph, ranks):
    """Row 4. Sparse from step 0; DDP rebuilds its buckets under it, in another order."""
    options, shapes = {"exchange": "allgather", "strict": True}, ((80, 100), (100,), (30, 100), (14000,))
    cases = [
        (rule, {"bucket_cap_mb": cap, "static_graph": static_graph}, options)
        for rule in ("threshold:2", "topk:0.1", "randomk:0.1", "accordion:0.1,0.4,interval=3")
    ]
    for (rule, _, _), *results in zip(cases, *ranks(2, on_ranks, cases, 8, shapes), strict=True):
        assert all((buckets > 1) == (cap == 0.05) for _, _, buckets in results)
        check_bits(2, rule, options, results, 8, shapes)


def rebuilt(rank, workers):
    module = Given()
    ddp = DistributedDataParallel(module, bucket_cap_mb=SMALL)
    sieve = gs.attach(ddp, gs.TopK(0.1))
    orders = []
    for grad_n in numbers(3, workers, size_of(module))[:, rank]:
        ddp(grad_n).backward()
        orders.append([channel.layout.names for _, channel in sorted(sieve._channels.items())])
    return orders


def test_buckets_are_rebuilt_in_the_tests_above(ranks):
    first, second, third = ranks(2, rebuilt)[0]
    assert first != second
    assert second == third
    assert sorted(name for names in second for name in names) == sorted(name for names in first for name in names)


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_added_on_the_way_to_rounding(workers, ranks):
    options = {"exchange": "allreduce"}
    cases = [(rule, {"bucket_cap_mb": SMALL}, options) for rule in ("randomk:0.1", "blockrandomk:0.1")]
    for (rule, _, _), *results in zip(cases, *ranks(workers, on_ranks, cases), strict=True):
        means_Tn, memory_Wn = in_simulator(workers, rule, options)
        for rank, (got_Tn, memory_n, _) in enumerate(results):
            assert same_bits(got_Tn, results[0][0])
            torch.testing.assert_close(got_Tn, means_Tn, rtol=1e-6, atol=1e-6)
            assert same_bits(memory_n, memory_Wn[rank])


def following_the_rate(rank, workers, rates):
    module = Given()
    ddp = DistributedDataParallel(module, bucket_cap_mb=SMALL)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    sieve = gs.attach(
        ddp, gs.TopK(0.1), feedback="update", exchange="allgather", optimizer=optimizer, meter=gs.NullMeter()
    )
    means = []
    for lr, grad_n in zip(rates, numbers(len(rates), workers, size_of(module))[:, rank], strict=True):
        optimizer.param_groups[0]["lr"] = lr
        means.append(drive(ddp, grad_n[None]))
    return torch.cat(means), memory_of(sieve)


def test_a_memory_that_follows_the_rate_bit_for_bit(ranks):
    rates = [0.1 * 0.8 ** (t // 5) * (1 + t % 3) for t in range(STEPS)]
    sim = gs.Simulator(Given(), gs.TopK(0.1), workers=2, feedback="update", exchange="allgather")
    grads_TWn = numbers(STEPS, 2, size_of(Given()))
    means_Tn = torch.stack([sim.step(grad_Wn, lr=lr) for lr, grad_Wn in zip(rates, grads_TWn, strict=True)])
    for rank, (got_Tn, memory_n) in enumerate(ranks(2, following_the_rate, rates)):
        assert same_bits(got_Tn, means_Tn)
        assert same_bits(memory_n, sim.channel.memory.memory_Ln[rank])
