"""The owner exchange: a sparse all-reduce that loses nothing and costs about the same for any number of workers."""

import pytest
import torch

import gradsieve as gs
from gradsieve.lab import tasks
from gradsieve.lab.runner import Options, train


def mass(sim: gs.Simulator, grads) -> tuple[torch.Tensor, torch.Tensor]:
    """Delivered plus remembered, and given: both as sums over workers."""
    given, delivered = torch.zeros(sim.layout.size).double(), torch.zeros(sim.layout.size).double()
    for grad_Wn in grads:
        delivered += sim.workers * sim.step(grad_Wn).double()
        given += grad_Wn.double().sum(0)
    memory = sim.state_dict()["memory"]  # an owner's memory joins its worker's when a state is saved
    kept = torch.cat([kinds["memory"].double().sum(0) for kinds in memory.values()])
    return delivered + kept, given


@pytest.mark.parametrize("values", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("rule", ["topk:0.02", "threshold:2.0", "gaussiank:0.02", "randomk:0.02"])
def test_workers_owners_and_delivered_add_up_to_the_gradients(rule, values, generator):
    size, workers = 5000, 5
    sim = gs.Simulator(size, gs.parse(rule), workers=workers, exchange="owner", values=values)
    slope_n = torch.linspace(0.1, 1.0, size)  # uneven loads: ranges move on the way
    found, given = mass(sim, (torch.randn(workers, size, generator=generator) * slope_n for _ in range(40)))
    assert ((found - given).norm() / given.norm()).item() < 1e-6


def test_ranges_follow_the_load(generator):
    size, workers = 8000, 4
    sim = gs.Simulator(size, gs.TopK(0.05), workers=workers, exchange="owner")
    even = list(sim.channel.exchange.bounds)
    for _ in range(60):
        sim.step(torch.randn(workers, size, generator=generator) * torch.linspace(0.01, 1.0, size))
    bounds = sim.channel.exchange.bounds
    assert bounds != even
    assert bounds[1] > even[1]  # small gradients in front: the first owner takes a wider range


def test_bytes_hardly_grow_with_workers(generator):
    """The same elements a worker, 8 and 64 of them: an all-gather would send nine times as much."""
    size = 400_000
    sent = {}
    for workers in (8, 64):
        sim = gs.Simulator(size, gs.TopK(0.03), workers=workers, exchange="owner", values="bfloat16")
        for _ in range(3):
            sim.step(torch.randn(workers, size, generator=generator))
        sent[workers] = sim.stats().last.bytes
    assert sent[64] <= 1.3 * sent[8]


def test_a_step_that_is_not_finite_moves_no_memory(generator):
    sim = gs.Simulator(1000, gs.TopK(0.05), workers=3, exchange="owner")
    for _ in range(3):
        sim.step(torch.randn(3, 1000, generator=generator))
    before = sim.state_dict()["memory"]["0"]["memory"]
    bad_Wn = torch.randn(3, 1000, generator=generator)
    bad_Wn[1, 7] = torch.inf
    assert not sim.step(bad_Wn).isfinite().all()
    torch.testing.assert_close(sim.state_dict()["memory"]["0"]["memory"], before, rtol=1e-5, atol=1e-5)
    assert sim.step(torch.randn(3, 1000, generator=generator)).isfinite().all()


def test_digits_end_as_well_as_with_a_gather():
    """Loss after training, mean of three seeds: the difference is within their spread."""
    digits = tasks.get("digits")
    losses = {"owner": [], "allgather": []}
    for exchange, found in losses.items():
        for seed in range(3):
            options = Options(workers=8, epochs=6, seed=seed, exchange=exchange, batch_size=8)
            for training in train(digits, gs.TopK(0.02), options):
                model = training.model
            found.append(digits.evaluate(model).loss)
    gather, owner = torch.tensor(losses["allgather"]), torch.tensor(losses["owner"])
    spread = max(gather.std().item(), owner.std().item())
    assert owner.mean() <= gather.mean() + 2 * spread


def test_what_owners_hold_of_an_unused_parameter_waits_too(generator):
    """Its result would be dropped: nothing of it may be passed on while it is not used."""
    parameters = [torch.zeros(300), torch.zeros(300)]
    sim = gs.Simulator(parameters, gs.TopK(0.1), workers=4, exchange="owner")
    sim.channel.rest([])
    given = delivered = torch.zeros(600).double()
    for step in range(12):
        grad_Wn = torch.randn(4, 600, generator=generator)
        if 4 <= step < 8:
            grad_Wn[:, 300:] = 0
            sim.channel.rest(["1"])
        mean_n = sim.step(grad_Wn)
        if 4 <= step < 8:
            assert not mean_n[300:].any()
        given, delivered = given + grad_Wn.double().sum(0), delivered + 4 * mean_n.double()
    kept = torch.cat([kinds["memory"].double().sum(0) for kinds in sim.state_dict()["memory"].values()])
    torch.testing.assert_close(delivered + kept, given, rtol=1e-5, atol=1e-5)


def test_a_loaded_state_takes_the_place_of_what_owners_hold(generator):
    sim = gs.Simulator(500, gs.TopK(0.05), workers=3, exchange="owner")
    fresh = sim.state_dict()
    for _ in range(5):
        sim.step(torch.randn(3, 500, generator=generator))
    sim.load_state_dict(fresh)
    assert not sim.state_dict()["memory"]["0"]["memory"].any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("rule", ["topk:0.05", "threshold:2.0"])
def test_a_gradient_that_is_not_finite_at_all_leaves_no_trace(rule, bad, generator):
    """Its elements all go to one owner, who has no room for them."""
    sim = gs.Simulator(1000, gs.parse(rule), workers=4, exchange="owner")
    for _ in range(3):
        sim.step(torch.randn(4, 1000, generator=generator))
    before = sim.state_dict()["memory"]["0"]["memory"]
    bad_Wn = torch.randn(4, 1000, generator=generator)
    bad_Wn[1] = bad
    sim.step(bad_Wn)
    torch.testing.assert_close(sim.state_dict()["memory"]["0"]["memory"], before, rtol=1e-5, atol=1e-5)
    assert sim.step(torch.randn(4, 1000, generator=generator)).abs().max() < 100


def test_what_owners_hold_follows_the_learning_rate(generator):
    """In update units everything that was given is delivered or waits."""
    sim = gs.Simulator(1000, gs.TopK(0.02), workers=4, feedback="update", exchange="owner", dtype=torch.float64)
    given = delivered = torch.zeros(1000).double()
    for step in range(40):
        lr = 1.0 if step < 20 else 0.1
        grad_Wn = torch.randn(4, 1000, generator=generator).double()
        delivered = delivered + lr * sim.step(grad_Wn, lr=lr)
        given = given + lr * grad_Wn.mean(0)
    kept_n = 0.1 * sim.state_dict()["memory"]["0"]["memory"].mean(0)
    torch.testing.assert_close(delivered + kept_n, given, rtol=1e-9, atol=1e-9)


def test_momentum_of_what_found_no_room_goes_on(generator):
    """Masking clears the momentum of what was sent, and of nothing else."""
    sim = gs.Simulator(4000, gs.HardThreshold(2.5), workers=4, feedback=gs.Momentum(beta=0.9), exchange="owner")
    put_back = 0
    for step in range(12):
        sim.step(torch.randn(4, 4000, generator=generator) * (0.3 if step % 2 else 1.5))
        cleared = (sim.channel.memory.tensors["velocity"] == 0).sum().item()
        last = sim.stats().last
        assert cleared == 4 * last.kept
        put_back += last.deferred
    assert put_back > 0


def test_strict_sizes_defer_nothing(generator):
    sim = gs.Simulator(5000, gs.TopK(0.05), workers=4, exchange="owner", strict=True)
    slope_n = torch.linspace(0.01, 1.0, 5000)
    for step in range(20):  # large ones are now with the last owner, now with the first
        sim.step(torch.randn(4, 5000, generator=generator) * (slope_n if step % 2 else slope_n.flip(0)))
    assert sim.stats().total.deferred == 0


def test_the_error_counts_what_found_no_room_at_its_owner(generator):
    sim, deferred = gs.Simulator(4000, gs.TopK(0.05), workers=4, exchange="owner"), 0.0
    for step in range(6):
        grad_Wn = torch.randn(4, 4000, generator=generator) * 0.1
        grad_Wn[step % 4, 1000 * (step % 4) :][:1000] += 5.0 * (step % 2)  # all for one owner
        sim.step(grad_Wn)
        last = sim.stats().last
        kept = sim.channel.memory.memory_Ln.double().square().sum(1).mean().item()
        assert last.error == pytest.approx(kept)
        deferred += last.deferred
    assert deferred > 0
