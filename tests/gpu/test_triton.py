"""What only a GPU can show: no waiting, CUDA graphs, torch.compile, large tensors, recorded sequences."""

import pytest
import torch

from gradsieve.ops import reference
from gradsieve.types import Pending, Segments

if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)

from gradsieve.ops import triton
from gradsieve.ops.triton_work import Work

DEVICE = torch.device("cuda")
BOUNDS = (0, 64, 128, 5000, 5000, 200_000, 300_000)
SIZE = BOUNDS[-1]
K = (1, 1, 5, 0, 195, 100)
RULES = {
    "threshold": (3.3,),
    "topk": (K,),
    "gaussiank": (K,),
    "sampledk": (K, 50, 7),
    "randomk": (K, torch.arange(12).view(2, 6)),
}


def pending(seed, memory=None, slots=600, cache=None):
    grad = torch.randn(2, SIZE, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)
    memory = torch.zeros(2, SIZE, device=DEVICE) if memory is None else memory
    into = reference.empty(2, SIZE, slots, torch.bfloat16, DEVICE)
    segments = Segments(BOUNDS, tuple(range(6)))
    return Pending(grad, memory, segments, values=torch.bfloat16, into=into, cache={} if cache is None else cache)


def arguments(rule):
    return [a.to(DEVICE) if isinstance(a, torch.Tensor) else a for a in RULES[rule]]


def sent(sparse):
    index_LK, valid_LK = reference.positions(sparse)
    return [(i[v].tolist(), x[v].tolist()) for i, x, v in zip(index_LK, sparse.values_LK, valid_LK, strict=True)]


@pytest.mark.parametrize("rule", RULES)
def test_nothing_waits(rule):
    cache = {}
    getattr(triton, rule)(pending(0, cache=cache), *arguments(rule))
    again, given = pending(1, cache=cache), arguments(rule)
    out = torch.empty(SIZE, device=DEVICE)
    triton.decode(again.into, out, 3.0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sparse = getattr(triton, rule)(again, *given)
        triton.decode(sparse, out, 3.0)
        triton.misplaced(sparse)
        triton.give_back(again.memory_Ln, sparse)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rule", RULES)
def test_in_a_graph(rule):
    eager, captured = pending(0), pending(0)
    given = arguments(rule)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        getattr(triton, rule)(captured, *given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sparse = getattr(triton, rule)(captured, *given)
    captured.memory_Ln.zero_()
    for seed in range(4):
        eager.grad_Ln.copy_(pending(seed).grad_Ln)
        captured.grad_Ln.copy_(eager.grad_Ln)
        expected = sent(getattr(triton, rule)(eager, *given))
        graph.replay()
        assert sent(sparse) == expected
        assert torch.equal(captured.memory_Ln, eager.memory_Ln)


def test_under_compile():
    @torch.compile(fullgraph=True)
    def step(grad_Ln, memory_Ln, counts_LB, offsets_LK, values_LK, wanted_L, nonfinite_L, out_n):
        into = reference.Sparse(SIZE, counts_LB, offsets_LK, values_LK, wanted_L, nonfinite_L)
        segments = Segments((0, SIZE), (0,))
        sparse = triton.threshold(Pending(grad_Ln * 2, memory_Ln, segments, values=torch.bfloat16, into=into), 6.6)
        return triton.decode(sparse, out_n, 2.0) + 1

    case, plain = pending(0), pending(0)
    into = case.into
    parts = into.counts_LB, into.offsets_LK, into.values_LK, into.wanted_L, into.nonfinite_L
    out = step(case.grad_Ln, case.memory_Ln, *parts, torch.empty(SIZE, device=DEVICE))
    plain.grad_Ln *= 2
    expected = triton.decode(triton.threshold(plain, 6.6), torch.empty(SIZE, device=DEVICE), 2.0) + 1
    assert torch.equal(out, expected)
    assert torch.equal(case.memory_Ln, plain.memory_Ln)


@pytest.mark.parametrize("rule", ["threshold", "topk"])
def test_more_than_two_billion_coordinates(rule):
    workers, size = 3, 800_000_003
    if torch.cuda.get_device_properties(DEVICE).total_memory < 40e9:
        pytest.skip("needs 40 GB")
    grad = torch.randn(workers, size, device=DEVICE)
    memory = torch.zeros_like(grad)
    case = Pending(grad, memory, Segments((0, size), (0,)))
    arguments = (6.0,) if rule == "threshold" else ((1000,),)
    sparse = getattr(triton, rule)(case, *arguments)
    for row in range(workers):
        largest = grad[row].abs() >= 6.0 if rule == "threshold" else grad[row].abs().topk(1000).indices.sort().values
        expected = largest.nonzero()[:, 0] if rule == "threshold" else largest
        index_LK, valid_LK = reference.positions(sparse)
        index = index_LK[row][valid_LK[row]]
        assert torch.equal(index, expected)
        assert torch.equal(sparse.values_LK[row, : len(index)], grad[row][index])
        assert not memory[row][index].any()
        grad[row][index] = 0
    assert torch.equal(memory, grad)


@pytest.mark.parametrize("room", [3, 100])
@pytest.mark.parametrize("rule", ["threshold", "topk", "gaussiank", "sampledk"])
def test_full_lists(rule, room, monkeypatch):
    """What finds no room in the lists is read from the memory, to the same effect."""
    roomy, tight = pending(7), pending(7)
    for case in (roomy, tight):
        case.grad_Ln[0, 5], case.grad_Ln[1, 70_000] = torch.nan, torch.inf
    expected = getattr(triton, rule)(roomy, *arguments(rule))
    monkeypatch.setattr(Work, "room", lambda *_: room)
    sparse = getattr(triton, rule)(tight, *arguments(rule))
    assert torch.equal(sparse.wanted_L, expected.wanted_L)
    assert torch.equal(sparse.counts_LB, expected.counts_LB)
    assert str(sent(sparse)) == str(sent(expected))
    assert torch.equal(tight.memory_Ln, roomy.memory_Ln)


@pytest.mark.parametrize("period", [2, 64, 4096])
def test_topk_of_periodic_and_clustered_gradients(period):
    """No period fools the sample, and a cluster of large values fills no list."""
    size = 3_000_001
    segments = Segments((0, 1_000_000, 1_000_001, size), (0, 1, 2))
    grad = torch.randn(1, size, device=DEVICE)
    grad[0, ::period] *= 30
    grad[0, 2_000_000:2_003_000] *= 1e4
    ours, theirs = torch.zeros_like(grad), torch.zeros_like(grad)
    sparse = triton.topk(Pending(grad, ours, segments), (1000, 1, 5000))
    oracle = reference.topk(Pending(grad, theirs, segments), (1000, 1, 5000))
    assert torch.equal(sparse.offsets_LK, oracle.offsets_LK)
    assert torch.equal(sparse.values_LK, oracle.values_LK)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("k", [(36_000, 500, 100), (20_000, 140_000, 1)])
def test_topk_of_full_tiles_and_of_zeros(k):
    """Many in a tile, and a segment whose k largest are zeros."""
    segments = Segments((0, 150_000, 300_000, 400_000), (0, 1, 2))
    grad = torch.randn(2, 400_000, device=DEVICE) * 0.01
    grad[:, 40_000:75_000] += 10
    grad[:, 150_003:300_000] = 0
    ours, theirs = torch.zeros_like(grad), torch.zeros_like(grad)
    sparse = triton.topk(Pending(grad, ours, segments, values=torch.bfloat16), k)
    oracle = reference.topk(Pending(grad, theirs, segments, values=torch.bfloat16), k)
    assert torch.equal(sparse.counts_LB, oracle.counts_LB)
    assert torch.equal(sparse.offsets_LK, oracle.offsets_LK)
    assert torch.equal(sparse.values_LK, oracle.values_LK)
    assert torch.equal(ours, theirs)


def test_topk_stays_exact_over_a_sequence():
    """Feedback piles magnitudes up under the limit; the limit drifts, jumps and ties."""
    size, k, cache = 1_000_003, 1000, {}
    ours, theirs = torch.zeros(1, size, device=DEVICE), torch.zeros(1, size, device=DEVICE)
    segments = Segments((0, size), (0,))
    generator = torch.Generator(DEVICE).manual_seed(3)
    for step in range(60):
        scale = (1.0, 1.1, 0.9, 30.0, 0.01, 0.0)[step % 6 if step > 40 else step % 3]
        grad = torch.randn(1, size, generator=generator, device=DEVICE) * scale
        grad = grad.bfloat16().float() if step % 5 == 0 else grad
        sparse = triton.topk(Pending(grad, ours, segments, values=torch.bfloat16, cache=cache), (k,))
        oracle = reference.topk(Pending(grad, theirs, segments, values=torch.bfloat16), (k,))
        assert torch.equal(sparse.offsets_LK, oracle.offsets_LK)
        assert torch.equal(sparse.values_LK, oracle.values_LK)
        assert torch.equal(ours, theirs)
