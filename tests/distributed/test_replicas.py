"""What holds over many steps: replicas never drift apart, nothing is lost, nothing hangs."""

import pytest
import torch
from given import RULES, Given, batches, drive, fingerprint, flat, memory_of, network, numbers, size_of, train
from torch.nn.parallel import DistributedDataParallel

import gradsieve as gs

SMALL = 0.0005  # a bucket cap in MB with which there are two buckets


def against_plain_ddp(rank, workers, rules, options):
    data = batches(rank, 100)
    plain = DistributedDataParallel(network())
    train(plain, data)
    trained = []
    for rule in rules:
        ddp = DistributedDataParallel(network())
        gs.attach(ddp, gs.parse(rule), **options)
        train(ddp, data)
        trained.append(flat(ddp))
    return flat(plain), flat(network()), trained


@pytest.mark.parametrize("options", [{"exchange": "allgather"}, {}, {"exchange": "dense"}], ids=str)
def test_a_density_of_one_is_plain_ddp(options, ranks):
    """Row 1."""
    rules = ["dense", "threshold:0", "topk:1", "randomk:1", "blockrandomk:1", "gaussiank:1", "sampledtopk:1"]
    rules += ["accordion:1,1"]
    for plain, start, trained in ranks(2, against_plain_ddp, rules, options):
        assert (plain - start).norm() > 0.1
        for rule, result in zip(rules, trained, strict=True):
            torch.testing.assert_close(result, plain, rtol=0, atol=1e-6, msg=rule)


def hashes(rank, workers, rule, steps):
    ddp = DistributedDataParallel(network(), bucket_cap_mb=SMALL)
    sieve = gs.attach(ddp, gs.parse(rule))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    seen = []
    for batch in batches(rank, steps):
        train(ddp, [batch], optimizer)
        seen.append(fingerprint(ddp))
    return seen, sieve.stats()


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_parameters_are_the_same_bits_on_all_ranks_for_500_steps(workers, ranks):
    """Row 3, with a planned capacity that some steps exceed."""
    results = ranks(workers, hashes, "threshold:0.02", 500)
    first, stats = results[0]
    assert len(set(first)) == 500
    assert all(seen == first for seen, _ in results)
    assert 0.01 < stats.total.density < 0.9
    assert stats.total.deferred > 0


def mass(rank, workers, cases, steps):
    found = []
    for rule, options in cases:
        module = Given()
        ddp = DistributedDataParallel(module, bucket_cap_mb=SMALL)
        sieve = gs.attach(ddp, gs.parse(rule), **options)
        grads_Tn = numbers(steps, workers, size_of(module))[:, rank]
        grads_Tn = grads_Tn * (1 + torch.arange(steps) % 5).unsqueeze(1)  # counts that jump: some are deferred
        delivered_n = drive(ddp, grads_Tn).double().sum(0)
        found.append((delivered_n, memory_of(sieve).double(), grads_Tn.double().sum(0), sieve.stats().total.deferred))
    return found


@pytest.mark.parametrize("scope", ["layer", "bucket", "global"])
@pytest.mark.parametrize("values", ["float32", "bfloat16", "float16"])
def test_delivered_and_remembered_add_up_to_all_gradients(scope, values, ranks):
    """Row 2, over ranks and with planned capacities: W x delivered + memories = gradients."""
    cases = [(rule, {"scope": scope, "values": values, "exchange": "allgather"}) for rule in RULES]
    results = ranks(2, mass, cases, 200)
    for (rule, _), *parts in zip(cases, *results, strict=True):
        came_n = sum(gradient_n for _, _, gradient_n, _ in parts)
        there_n = 2 * parts[0][0] + sum(memory_n for _, memory_n, _, _ in parts)
        assert (there_n - came_n).norm() <= 1e-6 * came_n.norm(), rule
        if rule.startswith("threshold"):
            assert parts[0][3] > 0


@pytest.mark.parametrize("options", [{}, {"strict": True}, {"exchange": "dense"}], ids=str)
def test_nothing_is_lost_between_sparse_and_dense_steps(options, ranks):
    cases = [(rule, options) for rule in ("threshold:2", "threshold:6", "gaussiank:0.3", "topk:0.9")]
    for (rule, _), *parts in zip(cases, *ranks(3, mass, cases, 40), strict=True):
        came_n = sum(gradient_n for _, _, gradient_n, _ in parts)
        there_n = 3 * parts[0][0] + sum(memory_n for _, memory_n, _, _ in parts)
        assert (there_n - came_n).norm() <= 1e-6 * came_n.norm(), rule


def unequal(rank, workers, thresholds, grads_TWn):
    """A threshold of its own on each rank: the handshake is told otherwise, as no user can."""
    module = Given(((30,), (5,)))
    ddp = DistributedDataParallel(module)
    sieve = gs.attach(ddp, gs.HardThreshold(1.0), exchange="allgather")
    object.__setattr__(sieve.options, "rule", gs.HardThreshold(thresholds[rank]))
    return drive(ddp, grads_TWn[:, rank]), memory_of(sieve)


@pytest.mark.parametrize("thresholds", [(float("inf"), 0.5), (float("inf"), float("inf"))])
def test_a_threshold_of_infinity_keeps_everything(thresholds, ranks):
    """Row 14."""
    grads_TWn = numbers(10, 2, 35)
    results = ranks(2, unequal, thresholds, grads_TWn)
    torch.testing.assert_close(results[0][1], grads_TWn[:, 0].sum(0), rtol=1e-5, atol=1e-5)
    for means_Tn, memory_n in results[1:]:
        assert torch.equal(means_Tn, results[0][0])
        came_n = grads_TWn[:, 1].sum(0)
        torch.testing.assert_close(2 * means_Tn.sum(0) + memory_n, came_n, rtol=1e-5, atol=1e-5)
        assert torch.equal(means_Tn, torch.zeros_like(means_Tn)) == (thresholds[1] == float("inf"))


def test_one_rank_sends_nothing_another_everything(ranks):
    """Row 15. Exact: no sum of these rounds."""
    grads_TWn = (numbers(10, 2, 35) * 100).round()
    grads_TWn[grads_TWn == 0] = 1
    grads_TWn[:, 0] /= 2**14
    (means_Tn, nothing_n), (also_Tn, all_n) = ranks(2, unequal, (1.0, 1.0), grads_TWn)
    assert torch.equal(means_Tn, grads_TWn[:, 1] / 2)
    assert torch.equal(also_Tn, means_Tn)
    assert torch.equal(nothing_n, grads_TWn[:, 0].sum(0))
    assert not all_n.any()
