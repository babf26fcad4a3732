"""Everything that DDP offers goes on working under the sieve."""

import copy
import functools
import gc
import weakref
from itertools import pairwise

import pytest
import torch
from given import Given, batches, drive, fingerprint, flat, flat_gradient, memory_of, network, numbers, same_bits, train
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gradsieve as gs

SMALL = 0.0005  # a bucket cap in MB with which there are two buckets


def accumulated(rank, workers, windows):
    """Four micro-batches a window against their sum at once."""
    grads_TMn = numbers(windows * 4, workers, 586)[:, rank].view(windows, 4, -1).round()
    ddp, whole = (DistributedDataParallel(Given(), bucket_cap_mb=SMALL) for _ in range(2))
    sieve, _ = (gs.attach(d, gs.TopK(0.1), exchange="allgather") for d in (ddp, whole))
    equal = []
    for grads_Mn in grads_TMn:
        ddp.zero_grad()
        with ddp.no_sync():
            for grad_n in grads_Mn[:-1]:
                ddp(grad_n).backward()
        ddp(grads_Mn[-1]).backward()
        equal.append(same_bits(flat_gradient(ddp), drive(whole, grads_Mn.sum(0, keepdim=True))[0]))
    return equal, sieve.step, sieve.stats().total


def test_no_sync_exchanges_once_a_window_and_equals_the_large_batch(ranks):
    """Row 6."""
    for equal, steps, total in ranks(2, accumulated, 6):
        assert equal == [True] * 6
        assert (steps, total.steps, total.coordinates) == (6, 6, 6 * 586)


class Sometimes(nn.Module):
    """``second`` takes part only where it is asked to."""

    def __init__(self, size=20):
        super().__init__()
        self.first = nn.Parameter(torch.zeros(size))
        self.second = nn.Parameter(torch.zeros(size))

    def forward(self, grad_n, both):
        first_n, second_n = grad_n.split(len(self.first))
        loss = (self.first * first_n).sum()
        return loss + (self.second * second_n).sum() if both else loss


def sometimes_unused(rank, workers, options, both_TW, grads_TWn, rates):
    ddp = DistributedDataParallel(Sometimes(), find_unused_parameters=True)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    sieve = gs.attach(ddp, gs.TopK(0.1), optimizer=optimizer, **options)
    delivered_n, memories = torch.zeros(40, dtype=torch.float64), []
    for both_W, grad_Wn, lr in zip(both_TW, grads_TWn, rates, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        ddp.zero_grad(set_to_none=True)
        ddp(grad_Wn[rank], both_W[rank]).backward()
        for place, p in ((slice(0, 20), ddp.module.first), (slice(20, 40), ddp.module.second)):
            if p.grad is not None:
                delivered_n[place] += p.grad.double() * lr
        memories.append(memory_of(sieve).double() * lr)
    return delivered_n, memories


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({"exchange": "allgather"}, [1.0] * 50),
        ({"exchange": "allgather", "scope": "global"}, [1.0] * 50),
        ({"exchange": "dense"}, [1.0] * 50),
        ({"exchange": "allgather", "feedback": "update"}, [0.97**t for t in range(50)]),
    ],
    ids=["layer", "global", "dense", "update"],
)
def test_the_memory_of_an_unused_parameter_is_kept_and_delivered_later(options, rates, ranks):
    """Row 7: used for 5 steps, unused on both ranks for 20, then used on rank 1 only."""
    both_TW = [(True, True)] * 5 + [(False, False)] * 20 + [(False, True)] * 20 + [(True, True)] * 5
    grads_TWn = numbers(50, 2, 40)
    results = ranks(2, sometimes_unused, options, both_TW, grads_TWn, rates)
    used_TW1 = torch.tensor(both_TW).unsqueeze(2)
    scale_T11 = torch.tensor(rates, dtype=torch.float64).view(-1, 1, 1)
    came_TWn = grads_TWn.double() * scale_T11
    came_TWn[:, :, 20:] *= used_TW1
    delivered_n = results[0][0]
    assert torch.equal(delivered_n, results[1][0])
    there_n = 2 * delivered_n + sum(memories[-1] for _, memories in results)
    torch.testing.assert_close(there_n, came_TWn.sum((0, 1)), rtol=1e-5, atol=1e-5)
    for rank, (_, memories) in enumerate(results):
        waits_n, rested_n, later_n = memories[4][20:], memories[24][20:], memories[44][20:]
        assert waits_n.any() == (options["exchange"] != "dense")
        torch.testing.assert_close(rested_n, waits_n, rtol=1e-5, atol=1e-6)
        if waits_n.any():
            assert torch.allclose(later_n, waits_n, rtol=1e-5, atol=1e-6) == (rank == 0)


def frozen_or_thawed(rank, workers, grads_TWn):
    """DDP has both parameters; ``second`` is frozen when the sieve is attached, gets a memory, and is then unused."""
    ddp = DistributedDataParallel(Sometimes(), find_unused_parameters=True)
    ddp.module.second.requires_grad_(False)
    sieve = gs.attach(ddp, gs.TopK(0.1), exchange="allgather")
    ddp.module.second.requires_grad_(True)
    memories = []
    for step, grad_Wn in enumerate(grads_TWn):
        ddp.module.second.requires_grad_(step < 15)
        ddp.zero_grad(set_to_none=True)
        ddp(grad_Wn[rank], step < 5).backward()
        memories.append(memory_of(sieve)[20:])
    return memories


def test_a_frozen_or_thawed_parameters_memory_waits(ranks):
    """Unused while it is thawed, and then frozen: DDP drops what would be delivered either way."""
    for memories in ranks(2, frozen_or_thawed, numbers(20, 2, 40)):
        assert memories[4].any()
        for later_n in memories[5:]:
            torch.testing.assert_close(later_n, memories[4], rtol=1e-5, atol=1e-6)


def loaded_while_frozen(rank, workers, grads_TWn):
    ddp = DistributedDataParallel(Sometimes(), find_unused_parameters=True)
    sieve = gs.attach(ddp, gs.TopK(0.1), exchange="allgather")
    for grad_Wn in grads_TWn:
        ddp.zero_grad()
        ddp(grad_Wn[rank], True).backward()
    state, before_n = sieve.state_dict(), memory_of(sieve)[20:]
    ddp = DistributedDataParallel(Sometimes(), find_unused_parameters=True)
    ddp.module.second.requires_grad_(False)
    sieve = gs.attach(ddp, gs.TopK(0.1), exchange="allgather")
    sieve.load_state_dict(state)
    for grad_Wn in grads_TWn:
        ddp.zero_grad()
        ddp(grad_Wn[rank], True).backward()
    return before_n, memory_of(sieve)[20:]


def test_a_memory_that_was_loaded_for_a_frozen_parameter_waits(ranks):
    for before_n, after_n in ranks(2, loaded_while_frozen, numbers(5, 2, 40)):
        assert before_n.any()
        torch.testing.assert_close(after_n, before_n)


def uneven(rank, workers, counts):
    ddp = DistributedDataParallel(network(), bucket_cap_mb=SMALL)
    sieve = gs.attach(ddp, gs.HardThreshold(0.02))
    with ddp.join():
        train(ddp, batches(rank, counts[rank]))
    return fingerprint(ddp), sieve.step, memory_of(sieve).norm().item()


@pytest.mark.parametrize("counts", [(5, 9), (9, 5), (3, 0)])
def test_join_ends_with_equal_parameters(counts, ranks):
    """Row 8."""
    (one, steps, _), (other, also, _) = ranks(2, uneven, counts)
    assert one == other
    assert steps == also == max(counts)


def scheduled(rank, workers, rule, options, counts):
    """A joined rank's scheduler stands still, and so does its learning rate."""
    ddp = DistributedDataParallel(network(), bucket_cap_mb=SMALL)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step // 4))
    sieve = gs.attach(ddp, gs.parse(rule), exchange="allgather", optimizer=optimizer, **options)
    with ddp.join():
        for batch in batches(rank, counts[rank]):
            train(ddp, [batch], optimizer)
            schedule.step()
    return fingerprint(ddp), sieve.step, sieve._lr


@pytest.mark.parametrize("counts", [(4, 14), (14, 4)])
@pytest.mark.parametrize(
    ("rule", "options"), [("accordion:0.05,0.5,interval=4,change=5", {}), ("topk:0.1", {"feedback": "update"})]
)
def test_ranks_without_batches_take_the_rate_of_those_that_have_some(rule, options, counts, ranks):
    (one, steps, lr), (other, also, its_lr) = ranks(2, scheduled, rule, options, counts)
    assert one == other
    assert steps == also == max(counts)
    assert lr == its_lr == 0.1 * 0.5 ** (13 // 4)


def frozen_late(rank, workers, scope, thawed):
    """What DDP exchanges was settled when it was made."""
    module = network()
    module[0].requires_grad_(not thawed)
    ddp = DistributedDataParallel(module, find_unused_parameters=True, bucket_cap_mb=SMALL)
    module[0].requires_grad_(thawed)
    sieve = gs.attach(ddp, gs.TopK(0.1), exchange="allgather", scope=scope)
    train(ddp, batches(rank, 5))
    kept = len(sieve.state_dict()[f"memory of rank {rank}"])
    module[0].requires_grad_(not thawed)
    train(ddp, batches(rank, 5))
    return fingerprint(ddp), sieve.step, kept, memory_of(sieve).norm().item()


@pytest.mark.parametrize("thawed", [False, True])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_parameters_may_be_frozen_and_thawed_after_ddp_was_made(scope, thawed, ranks):
    (one, steps, kept, norm), (other, *_) = ranks(2, frozen_late, scope, thawed)
    assert steps == 10
    assert kept == (4 if thawed else 6)
    assert 0 < norm < torch.inf
    if not thawed:  # else DDP itself trains these on each rank alone
        assert one == other


def complex_parameters(rank, workers):
    class Rotation(nn.Module):
        def __init__(self):
            super().__init__()
            self.angle = nn.Parameter(torch.zeros(3, dtype=torch.complex64))

    with pytest.raises(ValueError, match="angle is complex"):
        gs.attach(DistributedDataParallel(Rotation()), gs.TopK(0.1))
    return True


def test_complex_parameters_are_refused(ranks):
    assert ranks(2, complex_parameters) == [True, True]


def as_view(rank, workers, view):
    ddp = DistributedDataParallel(Given(), bucket_cap_mb=SMALL, gradient_as_bucket_view=view)
    sieve = gs.attach(ddp, gs.HardThreshold(2.0))
    return drive(ddp, numbers(30, workers, 586)[:, rank]), memory_of(sieve)


def test_gradient_as_bucket_view_changes_no_bit(ranks):
    """Row 9."""
    for one, other in zip(ranks(2, as_view, False), ranks(2, as_view, True), strict=True):
        assert all(same_bits(a, b) for a, b in zip(one, other, strict=True))


class Odd(nn.Module):
    """A scalar, an empty, a tied and a frozen parameter, and one smaller than k."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.frozen = nn.Linear(3, 3)
        self.frozen.requires_grad_(False)
        self.inner = nn.Linear(3, 3, bias=False)
        self.outer = nn.Linear(3, 3)
        self.outer.weight = self.inner.weight

    def forward(self, x):
        return (self.outer(self.inner(self.frozen(x))) * self.scale).square().mean() + self.nothing.sum()


def odd(rank, workers, rule, options):
    torch.manual_seed(2)
    ddp, plain = (DistributedDataParallel(m) for m in (Odd(), Odd()))
    plain.load_state_dict(ddp.state_dict())
    sieve = gs.attach(ddp, gs.parse(rule), **options)
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
    delivered = {name: torch.zeros_like(p) for name, p in ddp.module.named_parameters()}
    for _ in range(10):
        ddp.zero_grad()
        ddp(x).backward()
        for name, p in ddp.module.named_parameters():
            if p.requires_grad:
                delivered[name] += p.grad
    plain(x).backward()
    gradient = {name: p.grad for name, p in plain.module.named_parameters() if p.requires_grad}
    return delivered, gradient, sieve.state_dict()


@pytest.mark.parametrize("rule", ["topk:0.5", "threshold:0.3", "randomk:0.5", "gaussiank:0.5", "topk:1"])
@pytest.mark.parametrize("scope", ["layer", "bucket", "global"])
def test_scalar_empty_tied_and_frozen_parameters(rule, scope, ranks):
    """Row 10. Ten times the same gradient: W x delivered + memories = 10 W x the mean gradient."""
    results = ranks(2, odd, rule, {"scope": scope, "exchange": "allgather"})
    delivered, gradient, _ = results[0]
    assert set(gradient) == {"scale", "nothing", "inner.weight", "outer.bias"}
    for name, mean in gradient.items():
        memories = sum(state[f"memory of rank {r}"][name]["memory"] for r, (_, _, state) in enumerate(results))
        there = 2 * delivered[name] + memories.view_as(mean)
        torch.testing.assert_close(there, 20 * mean, rtol=1e-5, atol=1e-5, msg=name)
    assert delivered["scale"].abs() > 0


def mixed(rank, workers, scope):
    module = Given(((60,), (20,), (7, 9)), (torch.bfloat16, torch.float32, torch.bfloat16))
    ddp = DistributedDataParallel(module)
    sieve = gs.attach(ddp, gs.TopK(0.2), scope=scope, exchange="allgather")
    grads_Tn = numbers(20, workers, 143)[:, rank].mul(16).round()  # whole, and small enough for bfloat16
    means_Tn = drive(ddp, grads_Tn)
    return means_Tn.double().sum(0), memory_of(sieve).double(), grads_Tn.double().sum(0)


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_bfloat16_and_float32_parameters_in_one_model(scope, ranks):
    """Row 11. Whole numbers, with means that bfloat16 holds: not one unit may be missing."""
    (delivered_n, _, _), _ = results = ranks(2, mixed, scope)
    there_n = 2 * delivered_n + sum(memory_n for _, memory_n, _ in results)
    assert torch.equal(there_n, sum(gradient_n for _, _, gradient_n in results))
    assert delivered_n.count_nonzero() > 100


class Remembering(nn.Module):
    """Activation checkpointing round the body."""

    def __init__(self):
        super().__init__()
        self.body = network()

    def forward(self, x):
        return checkpoint(self.body, x, use_reentrant=False)


def wrapped(rank, workers, kind):
    module = Remembering() if kind == "checkpoint" else network()
    if kind == "compiled inside":
        module = torch.compile(module, backend="aot_eager")
    model = ddp = DistributedDataParallel(module)
    gs.attach(ddp, gs.TopK(0.1))
    if kind == "compiled outside":
        model = torch.compile(ddp, backend="aot_eager")
    train(model, batches(rank, 15))
    return flat(ddp)


@pytest.mark.parametrize("kind", ["checkpoint", "compiled inside", "compiled outside"])
def test_checkpointed_and_compiled_modules_train_alike(kind, ranks):
    plain = ranks(2, wrapped, "plain")
    for trained in ranks(2, wrapped, kind):
        torch.testing.assert_close(trained, plain[0], rtol=1e-5, atol=1e-6)


def clipped(rank, workers, limit):
    ddp = DistributedDataParallel(Given(), bucket_cap_mb=SMALL)
    sieve = gs.attach(ddp, gs.TopK(0.1), exchange="allgather")
    norms = []
    for grad_n in numbers(10, workers, 586)[:, rank]:
        drive(ddp, grad_n[None])
        nn.utils.clip_grad_norm_(ddp.parameters(), limit)
        norms.append(flat_gradient(ddp).norm().item())
    return norms, memory_of(sieve)


def test_clipping_after_the_exchange_leaves_the_memory_alone(ranks):
    run = functools.partial(ranks, 2, clipped)
    for (tight, one), (loose, other) in zip(run(0.5), run(1e6), strict=True):
        assert tight == pytest.approx([0.5] * 10)
        assert min(loose) > 1
        assert same_bits(one, other)


def dense_in_a_row(rank, workers, dtype, both_TW, grads_TWn):
    """A threshold that keeps nearly all: where bytes do not allow that, dense steps follow, more each time."""
    ddp = DistributedDataParallel(Sometimes(1000).to(dtype), find_unused_parameters=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    sieve = gs.attach(ddp, gs.HardThreshold(0.5), scaler=scaler)
    results, dense = [], []
    for both_W, grad_Wn in zip(both_TW, grads_TWn, strict=True):
        ddp.zero_grad(set_to_none=True)
        scaler.scale(ddp(grad_Wn[rank].to(dtype), both_W[rank])).backward()
        results.append(ddp.module.first.grad.clone())
        dense.append(sieve.stats().last.density == 1.0)
    return results, dense


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_agree_on_what_a_dense_step_sends(dtype, ranks):
    """A parameter that one rank does not use leaves that rank a memory, and not the others."""
    both_TW = [(True, False, True)] * 16
    results = ranks(3, dense_in_a_row, dtype, both_TW, numbers(16, 3, 2000).mul(16).round())
    dense = results[0][1]
    assert any(one and other for one, other in pairwise(dense))
    for other, _ in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0][0], other, strict=True))


def clipped_before(rank, workers, rule, grads_TWn):
    ddp = DistributedDataParallel(Given(), bucket_cap_mb=SMALL)
    gs.attach(ddp, gs.parse(rule), scope="global", feedback=gs.Momentum(clip=1.0), exchange="allgather")
    return drive(ddp, grads_TWn[:, rank])


@pytest.mark.parametrize("rule", ["threshold:0.05", "topk:0.1"])
def test_clipping_bounds_the_norm_of_the_whole_gradient(rule, ranks):
    grads_TWn = numbers(6, 2, 586)
    sim = gs.Simulator(
        Given(), gs.parse(rule), workers=2, scope="global", feedback=gs.Momentum(clip=1.0), exchange="allgather"
    )
    expected_Tn = torch.stack([sim.step(grad_Wn) for grad_Wn in grads_TWn])
    for means_Tn in ranks(2, clipped_before, rule, grads_TWn):
        torch.testing.assert_close(means_Tn, expected_Tn, rtol=1e-6, atol=1e-7)


def copied(rank, workers):
    """What AveragedModel does, and what a whole saved module comes to."""
    ddp = DistributedDataParallel(Given(), bucket_cap_mb=SMALL)
    gs.attach(ddp, gs.TopK(0.1), exchange="allgather")
    grads_Tn = numbers(4, workers, 586)[:, rank]
    drive(ddp, grads_Tn)
    copy_of = copy.deepcopy(ddp)
    dense_Tn = drive(copy_of, grads_Tn)
    sieve = gs.attach(copy_of, gs.TopK(0.1), exchange="allgather")
    return dense_Tn, drive(copy_of, grads_Tn), sieve.step


def test_a_copy_of_the_module_is_dense_until_it_is_attached_to(ranks):
    grads_TWn = numbers(4, 2, 586)
    sim = gs.Simulator(Given(), gs.TopK(0.1), workers=2, exchange="allgather")
    sparse_Tn = torch.stack([sim.step(grad_Wn) for grad_Wn in grads_TWn])
    for dense_Tn, means_Tn, steps in ranks(2, copied):
        torch.testing.assert_close(dense_Tn, grads_TWn.mean(1))
        assert same_bits(means_Tn, sparse_Tn)
        assert steps == 4


def rearranged(rank, workers, scope):
    """DDP makes its buckets anew after the first step; whose memory was there is no longer needed."""
    ddp = DistributedDataParallel(network(), bucket_cap_mb=SMALL)
    sieve = gs.attach(ddp, gs.HardThreshold(0.01), scope=scope)
    data = batches(rank, 3)
    train(ddp, data[:1])
    before = [weakref.ref(channel) for channel in sieve._channels.values()]
    train(ddp, data[1:])
    gc.collect()
    alive = sum(channel() is not None for channel in before)
    return len(before), alive, sum(channel in [c() for c in before] for channel in sieve._channels.values())


@pytest.mark.parametrize("scope", ["layer", "bucket", "global"])
def test_a_memory_that_moved_is_let_go(scope, ranks):
    for count, alive, same in ranks(2, rearranged, scope):
        assert count > 0
        assert alive == same
