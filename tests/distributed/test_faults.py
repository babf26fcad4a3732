"""Gradients that are not finite, conflicts with other users of DDP's hook, errors inside the hook."""

import os
import time

import pytest
import torch
from given import Given, drive, memory_of, numbers, same_bits
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.nn.parallel import DistributedDataParallel

import gradsieve as gs

LAST = slice(386, 586)  # the last parameter: first in the backward pass, in a bucket of its own
REST = slice(0, 386)


def embedding(rank, workers):
    ddp = DistributedDataParallel(nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1)))
    start = time.monotonic()
    with pytest.raises(ValueError, match=r"0 gives sparse gradients: use nn.Embedding\(sparse=False\)"):
        gs.attach(ddp, gs.TopK(0.1))
    seconds = time.monotonic() - start
    ddp.module[0].sparse = False
    sieve = gs.attach(ddp, gs.TopK(0.1))
    ddp.module[0].sparse = True
    loss = ddp(torch.tensor([rank])).sum()
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"a sparse gradient arrived: use nn.Embedding\(sparse=False\)"):
        loss.backward()
    with pytest.raises(RuntimeError, match=r"this sieve stopped at step 0.*a sparse gradient arrived"):
        sieve.state_dict()
    return max(seconds, time.monotonic() - start)


def test_sparse_embeddings_are_refused_by_name(ranks):
    """Row 12: at attach, and in the hook where the module said otherwise."""
    assert max(ranks(2, embedding)) < 1


def left_to_itself(rank, workers):
    module = nn.ModuleDict({"table": nn.Embedding(10, 4, sparse=True), "last": nn.Linear(4, 1)})
    module["last"].register_parameter("phase", nn.Parameter(torch.zeros(2, dtype=torch.complex64)))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["table.weight", "last.phase"])
    gs.attach(DistributedDataParallel(module), gs.TopK(0.1))


def test_what_ddp_ignores_may_be_of_any_kind(ranks):
    ranks(2, left_to_itself)


def foreign_hook(state, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    raise AssertionError


def conflicts(rank, workers):
    module = DistributedDataParallel(Given(), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"mixed_precision=.*one hook.*autocast"):
        gs.attach(module, gs.TopK(0.1))
    ddp = DistributedDataParallel(Given())
    sieve = gs.attach(ddp, gs.TopK(0.1))
    with pytest.raises(ValueError, match=r"has a sieve already: sieve.detach\(\)"):
        gs.attach(ddp, gs.TopK(0.1))
    sieve.detach()
    gs.attach(ddp, gs.TopK(0.1))
    ddp = DistributedDataParallel(Given())
    ddp.register_comm_hook(None, foreign_hook)
    with pytest.raises(ValueError, match=r"communication hook already \(foreign_hook\)"):
        gs.attach(ddp, gs.TopK(0.1))
    with pytest.raises(TypeError, match="ddp takes a DistributedDataParallel"):
        gs.attach(Given(), gs.TopK(0.1))


def test_others_who_use_the_hook_are_named(ranks):
    """Row 13."""
    ranks(2, conflicts)


def poisoned(rank, workers, rule, options, cap, bad):
    """Ten steps; in step 5 rank 1 has a value that is not finite. What is not finite is not used."""
    ddp = DistributedDataParallel(Given(), bucket_cap_mb=cap)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1.0)
    if "feedback" in options:
        options = {**options, "optimizer": optimizer}
    sieve = gs.attach(ddp, gs.parse(rule), **options)
    rates = [1.0 + 0.25 * (t % 3) for t in range(10)] if options.get("feedback") == "update" else [1.0] * 10
    grads_Tn = numbers(10, workers, 586)[:, rank].clone()
    if rank == 1:
        grads_Tn[5, bad[0]] = bad[1]
    delivered_n, memories, finite, seen = torch.zeros(586, dtype=torch.float64), [], [], []
    for grad_n, lr in zip(grads_Tn, rates, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        mean_n = drive(ddp, grad_n[None])[0]
        finite.append(bool(mean_n.isfinite().all()))
        seen.append([bool(p.grad.isfinite().all()) for p in ddp.parameters()])
        if finite[-1]:
            delivered_n += mean_n.double() * lr
        memories.append(memory_of(sieve).double() * lr)
    came_n = (grads_Tn.double() * torch.tensor(rates).double().unsqueeze(1)).nan_to_num(0, 0, 0)
    return finite, seen[5], delivered_n, memories, came_n


CASES = {
    "topk": ("topk:0.1", {"exchange": "allgather"}),
    "threshold": ("threshold:2", {}),
    "randomk": ("randomk:0.1", {"exchange": "allreduce"}),
    "dense": ("dense", {"exchange": "dense"}),
    "whole": ("topk:1", {}),  # dense since that is fewer bytes
    "update": ("topk:0.1", {"exchange": "allgather", "feedback": "update"}),
    "accordion": ("accordion:0.1,0.4,interval=3", {"exchange": "allgather"}),
    "global": ("topk:0.1", {"exchange": "allgather", "scope": "global"}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_step_that_is_not_finite_leaves_the_memory_as_it_was(case, value, ranks):
    """Row 16, in one bucket: seen in every parameter on all ranks, once."""
    rule, options = CASES[case]
    for finite, seen, _, memories, _ in ranks(2, poisoned, rule, options, 25, (300, value)):
        assert finite == [True] * 5 + [False] + [True] * 4
        assert seen == ([True, False, True, True, True] if case in ("dense", "whole") else [False] * 5)
        torch.testing.assert_close(memories[5], memories[4], rtol=1e-6, atol=1e-6)
        assert all(memory_n.isfinite().all() for memory_n in memories)


@pytest.mark.parametrize("case", ["topk", "threshold", "randomk", "update", "accordion"])
@pytest.mark.parametrize("where", [0, 585], ids=["last bucket", "first bucket"])
def test_buckets_beside_one_that_is_not_finite_keep_what_they_sent(case, where, ranks):
    """Row 16, in two buckets. The step is dropped whole: the bad bucket's gradient is gone, the other one's waits."""
    rule, options = CASES[case]
    results = ranks(2, poisoned, rule, options, 0.0005, (where, float("nan")))
    bad, good = (REST, LAST) if where == 0 else (LAST, REST)
    came_Wn = []
    for finite, _, _, memories, came_Tn in results:
        assert finite == [True] * 5 + [False] + [True] * 4
        torch.testing.assert_close(memories[5][bad], memories[4][bad], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(memories[5][good], (memories[4] + came_Tn[5])[good], rtol=1e-6, atol=1e-6)
        came_Tn[5, bad] = 0
        came_Wn.append(came_Tn.sum(0))
    there_n = 2 * results[0][2] + sum(memories[-1] for _, _, _, memories, _ in results)
    torch.testing.assert_close(there_n, sum(came_Wn), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", ["topk:0.1", "threshold:2"])
@pytest.mark.parametrize("where", [0, 585], ids=["last bucket", "first bucket"])
def test_owners_beside_a_bucket_that_is_not_finite_keep_what_they_passed_on(rule, where, ranks):
    """Row 16, where what a worker sent is its owner's: all of it is still there, with one or the other."""
    results = ranks(2, poisoned, rule, {"exchange": "owner"}, 0.0005, (where, float("nan")))
    bad = REST if where == 0 else LAST
    for finite, _, _, _, came_Tn in results:
        assert finite == [True] * 5 + [False] + [True] * 4
        came_Tn[5, bad] = 0
    there_n = 2 * results[0][2] + sum(memories[-1] for _, _, _, memories, _ in results)
    torch.testing.assert_close(there_n, sum(came_Tn.sum(0) for *_, came_Tn in results), rtol=1e-5, atol=1e-5)


def flushed(rank, workers):
    """The last parameter's bucket goes dense and empties its memory while the other one is not finite."""
    ddp = DistributedDataParallel(Given(), bucket_cap_mb=0.0005)
    sieve = gs.attach(ddp, gs.HardThreshold(2.0))
    grads_Tn = numbers(3, workers, 586)[:, rank].clone()
    grads_Tn[1, 390:580] = 4.0  # more than is worth sending sparse: the next step is dense
    grads_Tn[2, 10] = torch.nan if rank == 0 else 1.0
    drive(ddp, grads_Tn[:2])
    before_n = memory_of(sieve)
    drive(ddp, grads_Tn[2:])
    (channel,) = (c for c in sieve._channels.values() if c.layout.names == ("parts.4",))
    dense = channel.memory_is_empty
    return dense, before_n, memory_of(sieve)


def test_a_dense_bucket_beside_one_that_is_not_finite_keeps_its_memory(ranks):
    for dense, before_n, after_n in ranks(2, flushed):
        assert dense
        assert before_n[LAST].any()
        assert same_bits(after_n[LAST], before_n[LAST])


def scaled(rank, workers, with_scaler):
    """Ten steps; in step 5 a scaled gradient overflows and the scale falls from 2^16 to 2^15."""
    ddp = DistributedDataParallel(Given())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, enabled=with_scaler)
    sieve = gs.attach(ddp, gs.TopK(0.1), scaler=scaler, exchange="allgather")
    scales = []
    for step, grad_n in enumerate(numbers(10, workers, 586)[:, rank]):
        if step == 5 and not with_scaler:
            continue
        optimizer.zero_grad()
        if step == 5 and rank == 1:
            grad_n[300] = 1e36  # finite, but not 65,536 times
        scaler.scale(ddp(grad_n)).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, memory_of(sieve), torch.cat([p.detach().view(-1) for p in ddp.parameters()])


def test_the_memory_is_in_unscaled_units(ranks):
    """Row 17."""
    for (scales, memory_n, params_n), (_, expected_n, trained_n) in zip(
        ranks(2, scaled, True), ranks(2, scaled, False), strict=True
    ):
        assert scales == [2.0**16] * 5 + [2.0**15] * 5
        assert trained_n.norm() > 0.1
        torch.testing.assert_close(memory_n, expected_n, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(params_n, trained_n, rtol=1e-6, atol=1e-6)


def too_large_for_float16(rank, workers):
    """A memory that grew to 1.5 times the scale of 2^16 is more than a float16 gradient holds."""
    module = Given(((100,),), (torch.float16,))
    ddp = DistributedDataParallel(module)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    scaler.scale(torch.zeros(1))
    sieve = gs.attach(ddp, gs.TopK(0.01), scaler=scaler, exchange="allgather")
    grad_n = torch.zeros(100)
    grad_n[3] = 0.5
    results = []
    for other in (0.75, 0.875, 0.9375, 0.0):  # coordinate 7 is sent before 3 is
        grad_n[7] = other
        results.append(drive(ddp, (grad_n * 2.0**16).clamp(max=65504)[None])[0])
    return [bool(mean_n.isfinite().all()) for mean_n in results], memory_of(sieve)[3].item()


def test_a_mean_that_overflows_stays_in_the_memory(ranks):
    for finite, waits in ranks(2, too_large_for_float16):
        assert False in finite
        assert waits == pytest.approx(0.5 * len(finite), rel=1e-3)


class Failing(gs.TopK):
    def __call__(self, pending, turn):
        if turn.step == 3:
            raise ZeroDivisionError("the rule broke")
        return super().__call__(pending, turn)


def broken(rank, workers, scope):
    ddp = DistributedDataParallel(Given(), bucket_cap_mb=0.0005)
    sieve = gs.attach(ddp, Failing(0.1), scope=scope, exchange="allgather")
    grads_Tn = numbers(5, workers, 586)[:, rank]
    state = sieve.state_dict()
    drive(ddp, grads_Tn[:3])
    with pytest.raises(RuntimeError, match=r"step 3, bucket \d: ZeroDivisionError: the rule broke"):
        drive(ddp, grads_Tn[3:])
    for use in (
        lambda: ddp(grads_Tn[4]),
        lambda: sieve.load_state_dict(state),
        sieve.state_dict,
        lambda: ddp(grads_Tn[4]),
    ):
        with pytest.raises(RuntimeError, match=r"this sieve stopped at step 3.*the rule broke; make a new DDP module"):
            use()
    return sieve.stats().total.steps


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_after_an_error_in_the_hook_every_use_names_the_first_cause(scope, ranks):
    assert ranks(2, broken, scope) == [3, 3]


def short(rank, workers):
    """All on one core, so that a callback is often still on its way out when the group goes."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    module = Given()
    ddp = DistributedDataParallel(module, bucket_cap_mb=0.0005)
    ddp.register_comm_hook(gs.Sieve(module, gs.TopK(0.1), exchange="allgather"), gs.hook)
    drive(ddp, numbers(2, workers, 586)[:, rank])
    os.sched_setaffinity(0, cores)


def test_a_group_destroyed_after_the_last_step_aborts_no_process(ranks):
    for _ in range(12):
        ranks(4, short)


def apart(rank, workers):
    """A rank that resumed from another step draws other coordinates."""
    ddp = DistributedDataParallel(Given())
    sieve = gs.attach(ddp, gs.RandomK(0.1), exchange="allreduce")
    drive(ddp, numbers(3, workers, 586)[:, rank])
    sieve.step += rank
    with pytest.raises(RuntimeError, match=r"the ranks are not all at step \d"):
        drive(ddp, numbers(1, workers, 586)[:, rank])


def test_ranks_that_are_at_different_steps_are_told_so(ranks):
    ranks(2, apart)


def refused(rank, workers):
    """An attach that fails leaves nothing behind."""
    ddp = DistributedDataParallel(Given(), find_unused_parameters=True)
    for _ in range(2):
        with pytest.raises(ValueError, match="ranks disagree"):
            gs.attach(ddp, gs.TopK(0.1 * (rank + 1)))
    return [len(p._post_accumulate_grad_hooks or ()) for p in ddp.module.parts]


def test_an_attach_that_fails_leaves_no_hooks(ranks):
    for counts in ranks(2, refused):
        assert set(counts) == {0}


def huge(rank, workers, rule, options):
    """float16 gradients whose sum is out of its range and whose mean is not, or not for the memory."""
    ddp = DistributedDataParallel(Given(((60,), (20,)), (torch.float16, torch.float16)))
    sieve = gs.attach(ddp, gs.parse(rule), **options)
    return drive(ddp, torch.full((1, 80), 50000.0)), memory_of(sieve)


def test_a_dense_mean_of_float16_gradients_is_finite_where_ddps_is(ranks):
    for means_Tn, _ in ranks(4, huge, "dense", {}):
        assert torch.equal(means_Tn, torch.full((1, 80), 50000.0).half().float())


def overflowing(rank, workers):
    """The second mean, of memory and gradient, is out of float16's range."""
    ddp = DistributedDataParallel(Given(((60,), (20,)), (torch.float16, torch.float16)))
    sieve = gs.attach(ddp, gs.TopK(0.1), scope="global", exchange="allgather")
    drive(ddp, torch.full((1, 80), 50000.0))
    before_n = memory_of(sieve)
    means_Tn = drive(ddp, torch.full((1, 80), 50000.0))
    return bool(means_Tn.isfinite().all()), before_n, memory_of(sieve)


def test_a_mean_of_all_parameters_that_overflows_stays_in_the_memory(ranks):
    for finite, before_n, after_n in ranks(2, overflowing):
        assert not finite
        torch.testing.assert_close(after_n, before_n + 50000.0, rtol=1e-3, atol=0)


class TwoKinds(nn.Module):
    """Two buckets at once, since DDP never mixes types: a sparse one, and one too small to be anything but dense."""

    def __init__(self):
        super().__init__()
        self.wide = nn.Parameter(torch.zeros(4000))
        self.small = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, grad_n):
        return (self.wide * grad_n[:4000]).sum() + (self.small * grad_n[4000:]).sum()


def skipped_after_loading(rank, workers, grads_TWn):
    def attached():
        ddp = DistributedDataParallel(TwoKinds())
        return ddp, gs.attach(ddp, gs.TopK(0.05))

    def step(ddp, grad_n):
        ddp.zero_grad()
        ddp(grad_n).backward()

    ddp, sieve = attached()
    for grad_Wn in grads_TWn[:-1]:
        step(ddp, grad_Wn[rank])
    state = sieve.state_dict()
    del state[f"memory of rank {rank}"]["small"]  # saved by a run without it
    ddp, sieve = attached()
    sieve.load_state_dict(state)
    before_n = memory_of(sieve)[:4000]
    bad_n = grads_TWn[-1, rank].clone()
    bad_n[4000:] = torch.nan
    step(ddp, bad_n)
    return before_n.double() + bad_n[:4000].double(), memory_of(sieve)[:4000].double()


def test_the_first_step_after_loading_keeps_what_it_sent_if_it_is_skipped(ranks):
    """The scaler skips a step in which any gradient is not finite; no bucket may have given its memory away for it."""
    for expected_n, found_n in ranks(2, skipped_after_loading, numbers(5, 2, 4003)):
        torch.testing.assert_close(found_n, expected_n, rtol=1e-5, atol=1e-6)
