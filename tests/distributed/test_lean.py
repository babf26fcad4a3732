"""A step in steady state takes no memory: buffers are made once, and nothing grows."""

import gc
import tracemalloc

import psutil
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import gradsieve as gs
from gradsieve.exchange.group import GroupLink
from gradsieve.exchange.local import LocalLink
from gradsieve.layout import Layout
from gradsieve.meter import Meter
from gradsieve.options import options_of
from gradsieve.step import Channel
from gradsieve.wire import Frame

SIZE = 2_000_000


def steady(rank, workers, rule, steps):
    """Bytes that torch took and that were sent in a step; what Python's and the process's memory grew by over many."""
    link = GroupLink(torch.distributed.group.WORLD)
    layout = Layout(("weight", "bias"), (SIZE - 1000, 1000))
    options = options_of(gs.parse(rule), "layer", "gradient", "allgather", "bfloat16", False)
    meter = Meter()
    channel = Channel(options, layout, link, meter, torch.device("cpu"), torch.float32)
    generator = torch.Generator().manual_seed(rank)
    grad_n, out_n = torch.empty(SIZE), torch.empty(SIZE)

    def run(first, count):
        for step in range(first, first + count):
            channel.step(grad_n.normal_(generator=generator).unsqueeze(0), out_n, step).wait()

    run(0, 40)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        run(40, 10)
    taken = sum(max(event.self_cpu_memory_usage, 0) for event in watched.events()) / 10
    del watched
    gc.collect()
    tracemalloc.start()
    run(50, 5)
    gc.collect()
    before, resident = tracemalloc.get_traced_memory()[0], psutil.Process().memory_info().rss
    tracemalloc.reset_peak()
    run(55, steps)
    gc.collect()
    now, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    sent = meter.stats().last.bytes
    return taken, sent, now - before, peak - before, psutil.Process().memory_info().rss - resident


@pytest.mark.parametrize("rule", ["threshold:6", "topk:0.001", "randomk:0.001", "blockrandomk:0.001"])
def test_a_steady_step_takes_no_memory(rule, ranks):
    for taken, sent, grown, peak, resident in ranks(2, steady, rule, 60):
        assert taken < 10 * sent  # the backend's own copies, a plan that changed, coordinates that were drawn
        assert grown < 16_000  # a payload of another size may be at hand; a leak is more than 250 bytes a step
        assert peak < 200_000
        assert resident < 1_000_000


def test_old_frames_go_when_sizes_change():
    """Gaussian-k's size wanders, so frames are made anew now and then; what they replace must not be kept."""
    layout = Layout(("weight", "bias"), (99_000, 1000))
    options = options_of(gs.parse("gaussiank:0.001"), "layer", "gradient", "allgather", "bfloat16", False)
    channel = Channel(options, layout, LocalLink(1), Meter(), torch.device("cpu"), torch.float32)
    generator = torch.Generator().manual_seed(0)
    grad_n, out_n = torch.empty(100_000), torch.empty(100_000)
    slots, frames = set(), []
    for step in range(600):
        channel.step(grad_n.normal_(generator=generator).unsqueeze(0), out_n, step).wait()
        slots.add(channel.plan.slots)
        if step in (100, 599):
            gc.collect()
            frames.append(sum(type(thing) is Frame for thing in gc.get_objects()))
    assert len(slots) > 3  # including None, before anything is known
    assert frames[1] <= frames[0]
