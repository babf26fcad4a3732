"""The CUDA kernels in Triton's interpreter, on small sizes: bit-equal to ``reference`` where no GPU is.

Triton reads TRITON_INTERPRET when it is imported, so one test runs this file again in a process of its own.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradsieve.ops import reference
from gradsieve.types import Pending, Segments, Sparse

INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETING, reason="runs in a process of its own")
LAYERS = (0, 64, 128, 1500, 1500, 3000)
RULES = {
    "threshold": (2.0,),
    "topk": ((1, 2, 14, 0, 15),),
    "gaussiank": ((1, 2, 14, 0, 15),),
    "sampledk": ((1, 2, 14, 0, 15), 10, 3),
    "randomk": ((1, 2, 14, 0, 15), torch.arange(10).view(2, 5)),
    "take": (torch.arange(200).view(2, 100) * 13,),
}


@pytest.mark.timeout(600)  # the interpreter takes a second a tile
@pytest.mark.skipif(INTERPRETING or torch.cuda.is_available(), reason="the GPU runs the whole contract")
def test_in_the_interpreter():
    pytest.importorskip("triton", minversion="3.9")
    source = Path(__file__).parents[2] / "src"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(source)}
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", "--no-header", __file__]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


def same(sparse: Sparse, oracle: Sparse) -> bool:
    fields = ("counts_LB", "wanted_L", "nonfinite_L")
    equal = all(torch.equal(getattr(sparse, name), getattr(oracle, name)) for name in fields)
    for row, total in enumerate(oracle.counts_LB.sum(1).tolist()):
        equal &= torch.equal(sparse.offsets_LK[row, :total], oracle.offsets_LK[row, :total])
        values, expected = sparse.values_LK[row, :total], oracle.values_LK[row, :total]
        equal &= torch.equal(values.nan_to_num(7), expected.nan_to_num(7))
    return equal


def steps(rule, arguments, grads, bounds, values=torch.bfloat16, slots=None, memory=torch.float32, **options):
    """Feed both with their own memory, step after step, and compare all that is sent and kept."""
    from gradsieve.ops import triton

    workers, size = grads[0].shape
    segments = Segments(tuple(bounds), tuple(range(len(bounds) - 1)))
    ours = (torch.randn(workers, size, generator=torch.Generator().manual_seed(1)) * 0.3).to(memory)
    theirs, cache = ours.clone(), {}
    for grad in grads:
        into = [None if slots is None else reference.empty(workers, size, slots, values, grad.device) for _ in range(2)]
        mine = Pending(grad, ours, segments, values=values, into=into[0], cache=cache, **options)
        oracle = Pending(grad, theirs, segments, values=values, into=into[1], **options)
        assert same(getattr(triton, rule)(mine, *arguments), getattr(reference, rule)(oracle, *arguments))
        assert torch.equal(ours, theirs)


def normal(workers, size, *scales):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(workers, size, generator=generator) * scale for scale in scales]


@interpreted
@pytest.mark.parametrize("rule", RULES)
def test_layers_and_workers(rule):
    steps(rule, RULES[rule], normal(2, 3000, 1, 1), LAYERS)


@interpreted
@pytest.mark.parametrize("rule", RULES)
def test_under_compile(rule):
    """One graph, in which a rule is an operator: what it writes is seen by what comes after."""
    from gradsieve.ops import triton

    segments = Segments(LAYERS, tuple(range(len(LAYERS) - 1)))
    (grad,) = normal(2, 3000, 1)

    def step(grad_Ln, memory_Ln, counts_LB, offsets_LK, values_LK, wanted_L, nonfinite_L, out_n, *arguments):
        into = Sparse(3000, counts_LB, offsets_LK, values_LK, wanted_L, nonfinite_L)
        pending = Pending(grad_Ln * 2, memory_Ln, segments, values=torch.bfloat16, into=into)
        sparse = getattr(triton, rule)(pending, *arguments)
        return triton.decode(sparse, out_n, 2.0) + memory_Ln.sum(0)

    results = []
    for run in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        into, memory = reference.empty(2, 3000, 250, torch.bfloat16, grad.device), torch.full((2, 3000), 0.1)
        parts = into.counts_LB, into.offsets_LK, into.values_LK, into.wanted_L, into.nonfinite_L
        results.append((run(grad, memory, *parts, torch.empty(3000), *RULES[rule]), memory, into))
    (plain, memory, sent), (traced, its_memory, its_sent) = results
    assert torch.equal(traced, plain)
    assert torch.equal(its_memory, memory)
    assert same(its_sent, sent)
    assert sent.counts_LB.any()


@interpreted
@pytest.mark.parametrize("values", [torch.float32, torch.float16])
def test_precisions_and_scales(values):
    grads = [grad.bfloat16() for grad in normal(1, 1000, 1)]
    steps("threshold", (1.0,), grads, (0, 1000), values=values, decay=0.9, gain=1.3)


@interpreted
@pytest.mark.parametrize("memory", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", ["threshold", "topk", "gaussiank", "take"])
def test_memory_in_the_gradients_precision(rule, memory):
    grads = [grad.to(memory) for grad in normal(1, 700, 1)]
    argument = {"threshold": 2.0, "take": torch.arange(30).view(1, 30) * 23}.get(rule, (2, 14))
    steps(rule, (argument,), grads, (0, 64, 700), values=torch.float16, memory=memory, decay=0.9, gain=1.3)


@interpreted
@pytest.mark.parametrize("slots", [0, 7, 600])
def test_what_has_no_slot_stays(slots):
    steps("threshold", (0.5,), normal(1, 1500, 1), (0, 1500), slots=slots)
    steps("topk", ((20,),), normal(1, 1500, 1), (0, 1500), slots=slots)


@interpreted
@pytest.mark.parametrize("rule", ["threshold", "topk", "gaussiank", "sampledk"])
def test_full_lists(rule, monkeypatch):
    """What finds no room in the lists is read from the memory."""
    from gradsieve.ops.triton_work import Work

    monkeypatch.setattr(Work, "room", lambda *_: 3)
    (grad,) = normal(2, 3000, 1)
    grad[0, 5], grad[1, 700] = torch.nan, torch.inf
    steps(rule, RULES[rule], [grad], LAYERS)


@interpreted
@pytest.mark.parametrize("room", [40, 200, 400])
def test_full_lists_beside_a_segment_of_zeros(room, monkeypatch):
    """Segments share a tile: of one all must be read from the memory, of its neighbour only what found no room."""
    from gradsieve.ops.triton_work import Work

    monkeypatch.setattr(Work, "room", lambda *_: room)
    (grad,) = normal(1, 3000, 1)
    grad = grad.round()  # ties, which take the selection through all its levels
    grad[0, :700] = 0
    steps("topk", ((300, 100, 14),), [grad], (0, 700, 1500, 3000), decay=0.0)


@interpreted
@pytest.mark.parametrize(("rule", "argument"), [("threshold", 3.0), ("topk", (60,))])
def test_uneven_lists(rule, argument, monkeypatch):
    """What finds its list full goes to others: nothing is read from the memory again."""
    from gradsieve.ops import triton_work

    words = []

    class Watched(triton_work.Work):
        def room(self, candidates):
            return 50  # of their common list, which 60 ask for

        def send(self, floor=None):
            words.append(self.words_LT.clone())
            assert self.lists == 4
            return super().send(floor)

    monkeypatch.setattr(triton_work, "ENTRIES", 32 if rule == "threshold" else 60)
    monkeypatch.setattr("gradsieve.ops.triton.Work", Watched)
    (grad,) = normal(1, 9 * 512, 0.1)
    for tile in (0, 4, 8):
        grad[0, tile * 512 : tile * 512 + 20] += 5.0
    steps(rule, (argument,), [grad], (0, 9 * 512), slots=64)
    assert (words[0] >= 0).all()


@interpreted
@pytest.mark.parametrize("k", [0, 1, 40, 1000])
def test_topk_of_ties_and_jumps(k):
    grads = [grad.round() for grad in normal(1, 1000, 1, 100, 0)]
    steps("topk", ((k,),), grads, (0, 1000))


@interpreted
def test_not_finite():
    (grad,) = normal(1, 1500, 1)
    grad[0, 5], grad[0, 700], grad[0, 701] = torch.nan, torch.inf, -torch.inf
    steps("threshold", (2.0,), [grad], (0, 1500))
    steps("topk", ((9,),), [grad], (0, 1500))


@interpreted
@pytest.mark.parametrize("divisor", [1.0, 3.0])
@pytest.mark.parametrize("workers", [3, 9])
def test_what_arrives(divisor, workers):
    from gradsieve.ops import triton

    size = 66_000
    pending = Pending(*(torch.randn(workers, size) for _ in range(2)), Segments((0, size), (0,)), values=torch.bfloat16)
    index_LK = torch.stack([torch.randperm(500)[:90] * 130 for _ in range(workers)])
    sparse = reference.take(pending, index_LK)
    out = torch.full((size,), torch.nan)
    assert torch.equal(triton.decode(sparse, out, divisor), reference.decode(sparse, torch.empty(size), divisor))
    for op in ("give_back", "clear"):
        ours, theirs = pending.memory_Ln.clone(), pending.memory_Ln.clone()
        getattr(triton, op)(ours, sparse)
        getattr(reference, op)(theirs, sparse)
        assert torch.equal(ours, theirs)
    assert not triton.misplaced(sparse).any()
    sparse.offsets_LK[1, 3] = sparse.offsets_LK[1, 5]
    assert triton.misplaced(sparse).tolist() == reference.misplaced(sparse).tolist()


@interpreted
@pytest.mark.parametrize("when", [True, False])
def test_undo(when):
    from gradsieve.ops import triton

    (grad,) = normal(2, 1500, 1)
    grad[0, 3] = torch.inf
    pending = Pending(grad, torch.randn(2, 1500), Segments((0, 1500), (0,)), decay=0.7, gain=1.3)
    sparse = reference.threshold(pending, 1.5)
    oracle = Pending(grad, pending.memory_Ln.clone(), pending.segments, decay=0.7, gain=1.3)
    triton.undo(pending, sparse, torch.tensor(when))
    reference.undo(oracle, sparse, torch.tensor(when))
    assert torch.equal(pending.memory_Ln, oracle.memory_Ln)


@interpreted
def test_rows_and_results_that_lie_anyhow():
    from gradsieve.ops import triton

    rows_Wn = torch.randn(500, 3).t()
    expected = reference.mean(rows_Wn, torch.empty(500), 3.0)
    assert torch.equal(triton.mean(rows_Wn, torch.empty(500), 3.0), expected)
    assert torch.equal(triton.mean(rows_Wn.contiguous(), torch.empty(500, 2)[:, 0], 3.0), expected)
    index_LK = torch.stack([torch.randperm(500)[:40] for _ in range(3)])
    pending = [Pending(rows_Wn.contiguous(), torch.zeros(3, 500), Segments((0, 500), (0,))) for _ in range(2)]
    by_column = index_LK.t().contiguous().t()
    assert same(triton.take(pending[0], by_column), reference.take(pending[1], index_LK))


@interpreted
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16])
def test_what_only_the_reference_can_sum_is_rounded_once(out):
    from gradsieve.ops import triton

    rows_Wn = torch.randn(3, 4000, dtype=torch.float64)
    index_LK = torch.arange(4000).expand(3, -1)
    pending = Pending(rows_Wn, torch.zeros_like(rows_Wn), Segments((0, 4000), (0,)), values=torch.float64)
    sparse = reference.take(pending, index_LK)
    for op, source in (("mean", rows_Wn), ("decode", sparse)):
        ours, theirs = (getattr(m, op)(source, torch.empty(4000, dtype=out), 3.0) for m in (triton, reference))
        assert torch.equal(ours, theirs)


@interpreted
def test_a_zero_that_arrives_has_no_sign():
    from gradsieve.ops import triton

    pending = Pending(torch.tensor([[-1e-9, 1.0]]), torch.zeros(1, 2), Segments((0, 2), (0,)), values=torch.float16)
    out_n = triton.decode(reference.topk(pending, (2,)), torch.empty(2), 1.0)
    assert out_n.tolist() == [0.0, 1.0]
    assert not out_n.signbit().any()


@interpreted
def test_no_small_segment_is_searched_in_the_memory():
    """A bias of ten whose largest element is a million times the others: its floor is just below what it keeps."""
    from gradsieve.ops.triton_plan import Plan
    from gradsieve.ops.triton_work import CHOOSE, Work

    grad = torch.randn(1, 3000, generator=torch.Generator().manual_seed(0))
    grad[0, 5], grad[0, 70] = 1e6, -1e5
    segments = Segments((0, 10, 100, 3000), (0, 1, 2))
    pending = Pending(grad, torch.zeros_like(grad), segments)
    plan = Plan.of(pending, (1, 1, 3))
    for sampling, searched in ((plan.sampling, 1), (plan.exact_sampling, 0)):
        work = Work(replace(pending, memory_Ln=torch.zeros_like(grad)), sampling.candidates, by_segment=True)
        work.find_floors(sampling)
        work.sieve()
        work.choose(plan.k_S)
        assert work.gates[CHOOSE + 1] == searched
    steps("topk", ((1, 1, 3),), [grad, grad.flip(1), grad * 0], segments.bounds)
