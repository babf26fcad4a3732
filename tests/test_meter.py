"""What it cost: figures add up, and a null meter counts nothing."""

import pytest
import torch

import gradsieve as gs
from gradsieve.meter import PHASES, Tally
from gradsieve.wire import Format, form_of


def test_figures_of_one_exchange_are_those_of_the_wire():
    sim = gs.Simulator(100_000, gs.TopK(0.001), workers=4, values="bfloat16")
    grad_Wn = torch.randn(4, 100_000)
    sim.step(grad_Wn)
    last = sim.stats().last
    assert (last.coordinates, last.kept, last.deferred, last.steps) == (100_000, 100, 0, 1)
    assert last.density == 0.001
    assert last.bytes == 3 * Format(100_000, 100, torch.bfloat16, form=form_of(100_000, 100)).bytes
    assert last.dense_bytes == 2 * 3 * 4 * 100_000 // 4
    assert last.saved == last.dense_bytes / last.bytes
    assert last.error == pytest.approx(sim.channel.memory.memory_Ln.double().square().sum(1).mean().item())
    assert set(last.seconds) == {"coding", "exchange", "decoding"} <= set(PHASES)


def test_error_is_in_update_units_where_the_memory_follows_the_rate():
    sim = gs.Simulator(100, gs.TopK(0.1), workers=2, feedback="update", exchange="allgather")
    sim.step(torch.randn(2, 100), lr=0.5)
    expected = sim.channel.memory.memory_Ln.double().square().sum(1).mean().item() * 0.25
    assert sim.stats().last.error == pytest.approx(expected)


def test_totals_are_sums_and_stats_are_copies():
    sim = gs.Simulator(1000, gs.HardThreshold(1.0), workers=2, exchange="allgather")
    lasts, first = [], None
    for _ in range(5):
        sim.step(torch.randn(2, 1000))
        stats = sim.stats()
        lasts.append(stats.last)
        first = first or stats
    total = sim.stats().total
    assert total.steps == 5
    assert first.total.steps == 1
    for name in ("coordinates", "kept", "deferred", "bytes", "dense_bytes", "error"):
        assert getattr(total, name) == pytest.approx(sum(getattr(last, name) for last in lasts))
    for phase, seconds in total.seconds.items():
        assert seconds == pytest.approx(sum(last.seconds[phase] for last in lasts))


def test_deferred_is_what_the_rule_chose_beyond_the_slots():
    sim = gs.Simulator(1000, gs.HardThreshold(1.0), workers=2, exchange="allgather")
    for _ in range(2):  # so many agree on sizes
        sim.step(torch.zeros(2, 1000))
    slots = sim.channel.plan.known
    sim.step(torch.full((2, 1000), 2.0))
    last = sim.stats().last
    assert (last.kept, last.deferred) == (slots, 1000 - slots)


def test_channels_of_one_step_add_up():
    meter = gs.Meter()
    for step in (0, 0, 1):
        meter.record(step, coordinates=10, kept=1, bytes=4, dense_bytes=40)
    with meter.phase(1, "forward"):
        pass
    meter.spent(1, forward=2.0)
    stats = meter.stats()
    assert (stats.total.steps, stats.total.kept, stats.last.kept) == (2, 3, 1)
    assert stats.last.seconds["forward"] == pytest.approx(2.0, abs=0.1)
    assert str(stats) == (
        "2 steps, density 10.000%, 0.00 MB sent a worker (10.0x less than dense), deferred 0, total error 0; "
        f"ms a step: forward {1e3 * stats.total.seconds['forward'] / 2:.2f}"
    )


def test_nothing_yet_is_no_division_by_zero():
    assert Tally().density == 0.0
    assert Tally().saved == float("inf")
    assert str(gs.Meter().stats()).startswith("0 steps, density 0.000%")


def test_a_null_meter_counts_nothing_and_changes_nothing():
    grad_Wn = torch.randn(2, 100)
    sims = [gs.Simulator(100, gs.TopK(0.1), workers=2, exchange="allgather", meter=m) for m in (None, gs.NullMeter())]
    one_n, other_n = (sim.step(grad_Wn) for sim in sims)
    assert torch.equal(one_n, other_n)
    assert sims[1].stats().total == Tally()


def test_what_a_device_tells_late_is_of_the_step_before():
    """Three channels whose figures come a step late, in the order of a DDP step."""
    meter = gs.Meter()
    for step in range(10):
        for _ in range(3):
            if step:
                meter.record(step - 1, coordinates=10, kept=1)
            meter.spent(step, coding=1.0)
    total = meter.stats().total
    assert (total.steps, total.seconds["coding"], total.kept) == (10, 30.0, 27)
    meter.record(9, coordinates=10, kept=1)
    assert meter.stats().last.kept == 1


@pytest.mark.parametrize(("dtype", "size"), [(torch.float64, 8), (torch.float32, 4), (torch.bfloat16, 2)])
def test_a_dense_step_sends_the_gradients_own_bytes(dtype, size):
    sim = gs.Simulator(1000, gs.TopK(0.1), workers=2, exchange="dense", dtype=dtype)
    sim.step(torch.randn(2, 1000, dtype=dtype))
    assert sim.stats().last.bytes == sim.stats().last.dense_bytes == size * 1000


def test_a_step_after_a_state_was_loaded_is_a_new_one():
    sim = gs.Simulator(100, gs.TopK(0.1), workers=2)
    sim.step(torch.randn(2, 100))
    saved = sim.state_dict()
    sim.step(torch.randn(2, 100))
    sim.load_state_dict(saved)
    sim.step(torch.randn(2, 100))
    stats = sim.stats()
    assert (stats.total.steps, stats.last.coordinates, stats.total.coordinates) == (3, 100, 300)
