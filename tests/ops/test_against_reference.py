"""One contract for every fast module of ops: what ``reference`` does, bit for bit (see ``conftest.FAST``)."""

from dataclasses import replace

import pytest
import torch

from gradsieve.ops import reference
from gradsieve.types import BLOCK, Pending, Segments, Sparse

SIZES = [0, 1, 63, 1000, 10_007, 65_536, 65_537, 200_003]
TENSORS = ["counts_LB", "offsets_LK", "values_LK", "wanted_L", "nonfinite_L"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def segments_of(size, pieces=1):
    """``pieces`` segments of uneven sizes, among them an empty one where there are several."""
    cuts = sorted({size * i * i // (pieces * pieces) for i in range(pieces + 1)} | {0, size})
    bounds = (*cuts[:1], *cuts) if pieces > 1 else (0, size)
    return Segments(tuple(bounds), tuple(range(100, 100 + len(bounds) - 1)))


def data(kind, workers, size, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(workers, size, generator=generator)
    if kind == "heavy":
        return x / (torch.rand(workers, size, generator=generator) + 1e-3)
    if kind == "ties":
        return (x * 2).round() / 2
    if kind == "zeros":
        return x * (torch.rand(workers, size, generator=generator) < 1e-3)
    if kind == "nonfinite" and size:
        spots = torch.rand(workers, size, generator=generator)
        x[spots < 0.01] = torch.inf
        x[spots > 0.99] = -torch.inf
        x[(spots > 0.5) & (spots < 0.51)] = torch.nan
    if kind == "all nan":
        x.fill_(torch.nan)
    if kind == "huge":
        return x * 1e38
    return x


KINDS = ["normal", "heavy", "ties", "zeros", "nonfinite", "all nan", "huge"]


class Case:
    """The same sparsification for both modules: ``run`` returns what each sent and the memory it left."""

    def __init__(self, fast, workers, size, *, kind="normal", pieces=1, slots=None, seed=0, **options):
        self.fast, self.workers, self.size, self.slots = fast, workers, size, slots
        self.segments = segments_of(size, pieces)
        dtype = options.pop("grad", torch.float32)
        self.grad_Ln = data(kind, workers, size, seed).to(dtype)
        self.memory_Ln = (data("normal", workers, size, seed + 1) * 0.3).to(options.pop("memory", torch.float32))
        self.options = options
        self.cache = {}

    def into(self, device):
        """Poisoned slots, as strided views of one wider buffer."""
        if self.slots is None:
            return None
        values, blocks = self.options.get("values", torch.float32), -(-self.size // BLOCK)

        def view(width, dtype, poison):
            return torch.full((self.workers, width + 7), poison, dtype=dtype, device=device)[:, 3 : 3 + width]

        counts_LB, offsets_LK = view(blocks, torch.int32, -1), view(self.slots, torch.int16, -1)
        values_LK = view(self.slots, values, torch.nan)
        wanted_L, nonfinite_L = view(1, torch.int32, -1)[:, 0], view(1, torch.int32, -1)[:, 0]
        return Sparse(self.size, counts_LB, offsets_LK, values_LK, wanted_L, nonfinite_L)

    def pending(self, device):
        grad_Ln, memory_Ln = self.grad_Ln.to(device), self.memory_Ln.clone().to(device)
        return Pending(grad_Ln, memory_Ln, self.segments, into=self.into(device), **self.options)

    def run(self, op, *arguments):
        moved = [a.to(self.fast.device) if isinstance(a, torch.Tensor) else a for a in arguments]
        ours = replace(self.pending(self.fast.device), cache=self.cache)
        theirs = self.pending("cpu")
        return getattr(self.fast.ops, op)(ours, *moved), ours, getattr(reference, op)(theirs, *arguments), theirs

    def check(self, op, *arguments):
        """Bit-equal in all that is sent and all that is kept."""
        sparse, ours, oracle, theirs = self.run(op, *arguments)
        same_sparse(sparse, oracle)
        same_bits(ours.memory_Ln, theirs.memory_Ln)
        if theirs.measure:
            torch.testing.assert_close(sparse.error_L.cpu(), oracle.error_L, rtol=1e-6, atol=0, equal_nan=True)
        if self.slots is not None:
            assert sparse.values_LK.data_ptr() == ours.into.values_LK.data_ptr()
        return ours


def same_bits(x, y):
    """Equal to the bit, save that one NaN is as good as another."""
    x, y = x.cpu(), y.cpu()
    assert x.dtype == y.dtype
    assert torch.equal(x.isnan(), y.isnan())
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    assert torch.equal(x.nan_to_num(0).contiguous().view(integers), y.nan_to_num(0).contiguous().view(integers))


def same_sparse(x, y):
    assert torch.equal(x.wanted_L.cpu(), y.wanted_L)
    assert torch.equal(x.nonfinite_L.cpu(), y.nonfinite_L)
    assert torch.equal(x.counts_LB.cpu(), y.counts_LB)
    assert x.slots == y.slots
    for row, total in enumerate(y.counts_LB.sum(1).tolist()):
        assert torch.equal(x.offsets_LK[row, :total].cpu(), y.offsets_LK[row, :total])
        same_bits(x.values_LK[row, :total], y.values_LK[row, :total])


def ks(segments, density):
    return tuple(min(size, max(1, round(size * density))) if size else 0 for size in segments.sizes)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("workers", [1, 3])
def test_every_size(fast, workers, size):
    case = Case(fast, workers, size, pieces=3, measure=True)
    k_S = ks(case.segments, 0.01)
    keys_LS = torch.arange(workers * len(k_S)).view(workers, -1) * 7919 + 12345
    index_LK = torch.stack([torch.randperm(size)[: size // 50] for _ in range(workers)])
    case.check("threshold", 2.5)
    case.check("topk", k_S)
    case.check("topk", k_S)
    case.check("randomk", k_S, keys_LS)
    case.check("randomk", k_S, keys_LS[:1].expand(workers, -1))
    case.check("take", index_LK)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("slots", [None, 0, 5, 400])
def test_every_kind_of_data_and_any_room(fast, kind, slots):
    case = Case(fast, 2, 70_001, kind=kind, slots=slots, pieces=4, measure=True)
    k_S = ks(case.segments, 0.01)
    case.check("threshold", 2.0)
    case.check("topk", k_S)
    case.check("topk", k_S)
    case.check("randomk", k_S, torch.arange(2 * len(k_S)).view(2, -1))
    case.check("take", torch.stack([torch.arange(300, 1300), torch.arange(69_001, 70_001)]))


@pytest.mark.parametrize("grad", DTYPES)
@pytest.mark.parametrize("values", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "nonfinite", "huge"])
def test_every_precision(fast, grad, values, kind):
    case = Case(fast, 2, 67_003, kind=kind, grad=grad, values=values, decay=0.7, gain=1.3, slots=700, measure=True)
    case.check("threshold", 2.0)
    case.check("topk", (670,))
    case.check("randomk", (900,), torch.tensor([[5], [6]]))
    case.check("take", torch.arange(500).expand(2, -1))


@pytest.mark.parametrize("memory", DTYPES[1:])
@pytest.mark.parametrize("values", DTYPES)
@pytest.mark.parametrize("slots", [300, 900])
def test_memory_in_the_gradients_precision(fast, memory, values, slots):
    case = Case(fast, 2, 67_003, grad=memory, memory=memory, values=values, decay=0.7, gain=1.3, slots=slots, pieces=3)
    k_S = ks(case.segments, 0.01)
    case.check("threshold", 2.0)
    case.check("topk", k_S)
    case.check("gaussiank", k_S)
    case.check("sampledk", k_S, 10, 3)
    case.check("randomk", k_S, torch.arange(2 * len(k_S)).view(2, -1))
    case.check("take", torch.arange(500).expand(2, -1))


@pytest.mark.parametrize("memory", DTYPES)
def test_the_reference_loses_only_what_its_memory_cannot_hold(memory):
    """Sent and kept add up to p, rounded once to the memory's precision."""
    grad_Ln, memory_Ln = data("normal", 2, 5000, 0).to(memory), (data("normal", 2, 5000, 1) * 0.3).to(memory)
    p_Ln = (memory_Ln.float() * 0.7 + grad_Ln.float() * 1.3).to(memory)
    pending = Pending(grad_Ln, memory_Ln, segments_of(5000), decay=0.7, gain=1.3)
    sent = reference.threshold(pending, 2.0)
    assert sent.counts_LB.sum(1).tolist() == (p_Ln.float().abs() >= 2.0).sum(1).tolist()
    assert memory_Ln.dtype == memory
    reference.give_back(memory_Ln, sent)
    same_bits(memory_Ln, p_Ln)


@pytest.mark.parametrize("memory", DTYPES[1:])
@pytest.mark.parametrize("values", DTYPES)
def test_taking_back_in_the_gradients_precision(fast, memory, values):
    case = Case(fast, 2, 70_001, grad=memory, memory=memory, values=values, decay=0.7, gain=1.3)
    sent, ours, oracle, theirs = case.run("threshold", 1.0)
    for pending, sparse, ops in ((ours, sent, case.fast.ops), (theirs, oracle, reference)):
        ops.undo(pending, sparse, torch.ones((), dtype=torch.bool, device=pending.grad_Ln.device))
    same_bits(ours.memory_Ln, theirs.memory_Ln)
    for pending, sparse, ops in ((ours, sent, case.fast.ops), (theirs, oracle, reference)):
        ops.give_back(pending.memory_Ln, sparse)
    same_bits(ours.memory_Ln, theirs.memory_Ln)


@pytest.mark.parametrize("values", DTYPES)
def test_every_rounding(fast, values):
    """All exponents, halves between representable values, subnormals, saturation."""
    bits = torch.arange(0, 2**32, 65_521 // 7).to(torch.int64)
    grad = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)
    case = Case(fast, 1, len(grad), values=values)
    case.grad_Ln, case.memory_Ln = grad[None], torch.zeros(1, len(grad))
    case.check("threshold", 0.0)


def test_double_precision(fast):
    case = Case(fast, 2, 5000, values=torch.float64)
    case.grad_Ln, case.memory_Ln = case.grad_Ln.double(), case.memory_Ln.double()
    case.check("threshold", 2.0)
    case.check("topk", (50,))


@pytest.mark.parametrize("threshold", [0.0, -1.0, 1e-45, float("inf"), float("nan"), 1e300])
def test_odd_thresholds(fast, threshold):
    Case(fast, 2, 5000, kind="nonfinite").check("threshold", threshold)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [0, 1, 2, 1000, 70_000, 70_001])
def test_topk_of_any_k(fast, kind, k):
    case = Case(fast, 2, 70_001, kind=kind, measure=True)
    for seed in range(3):
        case.grad_Ln = data(kind, 2, 70_001, seed)
        case.check("topk", (k,))


@pytest.mark.parametrize("poison", [0.0, -1.0, 1e-45, 1e-3, 2.0, 3e38, float("inf"), float("nan")])
def test_hints_and_scratch_change_nothing(fast, poison):
    case = Case(fast, 2, 200_003, pieces=3)
    k_S = ks(case.segments, 0.002)
    case.check("topk", k_S)
    for tensor in (kept for kept in case.cache.values() if isinstance(kept, torch.Tensor)):
        tensor.fill_(poison) if tensor.is_floating_point() else tensor.fill_(-1)
    case.check("topk", k_S)
    case.check("randomk", k_S, torch.arange(2 * len(k_S)).view(2, -1))


def test_topk_follows_jumps_of_scale(fast):
    case = Case(fast, 2, 100_003, pieces=3, measure=True)
    k_S = ks(case.segments, 0.003)
    for step, scale in enumerate([1, 1, 1.1, 0.8, 1e6, 1e-6, 1, 0, 1, 1e20, 1e-20, 1e-40, 1]):
        case.grad_Ln = data("heavy", 2, 100_003, step) * scale
        case.memory_Ln = case.check("topk", k_S).memory_Ln.cpu() if scale < 1e6 else case.memory_Ln


def test_training_sequence_with_memory(fast):
    """Thirty steps in which each module feeds on its own memory."""
    size, segments = 80_007, segments_of(80_007, 5)
    k_S, cache = ks(segments, 0.01), {}
    ours, theirs = torch.zeros(1, size, device=fast.device), torch.zeros(1, size)
    for step in range(30):
        grad_Ln = data("heavy", 1, size, step) * (1 + step % 3)
        mine = Pending(grad_Ln.to(fast.device), ours, segments, values=torch.bfloat16, cache=cache)
        same_sparse(
            fast.ops.topk(mine, k_S), reference.topk(Pending(grad_Ln, theirs, segments, values=torch.bfloat16), k_S)
        )
        same_bits(ours, theirs)


@pytest.mark.parametrize("kind", ["normal", "heavy", "ties", "zeros", "nonfinite"])
@pytest.mark.parametrize("op", ["gaussiank", "sampledk"])
@pytest.mark.parametrize("size", [1, 63, 10_007, 200_003])
def test_estimated_thresholds(fast, op, kind, size):
    """The moments may differ in the last bits, hence elements next to the threshold; mass may not."""
    case = Case(fast, 2, size, kind=kind, pieces=2, measure=True)
    k_S = tuple(0 if s == 1 else k for s, k in enumerate(ks(case.segments, 0.01)))
    for seed in range(3):
        case.grad_Ln = data(kind, 2, size, seed + 50)
        sparse, ours, oracle, theirs = case.run(op, k_S, *((37, 11) if op == "sampledk" else ()))
        dense, expected = kept(sparse), kept(oracle)
        differ = (dense.isnan() != expected.isnan()) | (dense.nan_to_num(0) != expected.nan_to_num(0))
        for row, (start, stop) in ((r, s) for r in range(2) for s in reference.spans(theirs)):
            edge = expected[row, start:stop].abs()
            close = (dense + expected)[row, start:stop][differ[row, start:stop]].abs()
            if len(close):
                lowest = edge[edge > 0].min()
                torch.testing.assert_close(close, lowest.expand_as(close), rtol=1e-5, atol=0)
        assert torch.equal(sparse.nonfinite_L.cpu(), oracle.nonfinite_L)
        fast.ops.give_back(ours.memory_Ln, sparse)
        p_Ln, finite_Ln = reference.correct(case.pending("cpu"))
        memory_Ln = ours.memory_Ln.cpu()
        assert torch.equal(memory_Ln[finite_Ln], p_Ln[finite_Ln])
        if not differ.any():
            torch.testing.assert_close(sparse.error_L.cpu(), oracle.error_L, rtol=1e-6, atol=0)


def kept(sparse):
    """What each worker sent, dense."""
    index_LK, valid_LK = reference.positions(sparse)
    dense = torch.zeros(len(index_LK), sparse.size, device=index_LK.device)
    rows, slots = valid_LK.nonzero(as_tuple=True)
    dense[rows, index_LK[rows, slots]] = sparse.values_LK[rows, slots].float()
    return dense.cpu()


@pytest.mark.parametrize("op", ["gaussiank", "sampledk"])
@pytest.mark.parametrize("slots", [3, 100])
def test_estimated_thresholds_respect_the_room(fast, op, slots):
    case = Case(fast, 2, 30_011, slots=slots, values=torch.bfloat16)
    sparse, ours, *_ = case.run(op, (300,), *((37, 11) if op == "sampledk" else ()))
    assert sparse.counts_LB.sum(1).tolist() == [slots, slots]
    p_Ln, _ = reference.correct(case.pending("cpu"))
    fast.ops.give_back(ours.memory_Ln, sparse)
    assert torch.equal(ours.memory_Ln.cpu(), p_Ln)


@pytest.mark.parametrize("op", ["threshold", "topk", "gaussiank", "sampledk", "randomk"])
def test_a_row_does_not_depend_on_the_others(fast, op):
    size, segments = 150_001, segments_of(150_001, 3)
    k_S = ks(segments, 0.01)
    keys_LS = torch.arange(3 * len(k_S), device=fast.device).view(3, -1)
    grads, memory = data("heavy", 3, size, 1).to(fast.device), data("normal", 3, size, 2).to(fast.device)

    def arguments(rows):
        return {"threshold": (20.0,), "sampledk": (k_S, 50, 3), "randomk": (k_S, keys_LS[rows])}.get(op, (k_S,))

    together = Pending(grads, memory.clone(), segments, measure=True)
    sparse = getattr(fast.ops, op)(together, *arguments(slice(0, 3)))
    for row in range(3):
        alone = Pending(grads[row, None], memory[row, None].clone(), segments, measure=True)
        single = getattr(fast.ops, op)(alone, *arguments(slice(row, row + 1)))
        same_bits(alone.memory_Ln, together.memory_Ln[row, None])
        assert single.error_L.tolist() == sparse.error_L[row, None].tolist()
        count = int(single.wanted_L[0])
        assert torch.equal(single.values_LK[0], sparse.values_LK[row, :count])
        assert torch.equal(single.counts_LB[0], sparse.counts_LB[row])


@pytest.mark.parametrize("size", [0, 1, 1000, 65_537, 200_003])
@pytest.mark.parametrize("values", DTYPES)
@pytest.mark.parametrize("out", [*DTYPES, torch.float64])
def test_decode_mean_give_back_clear(fast, size, values, out):
    case = Case(fast, 3, size, values=values, slots=size // 20 + 1)
    sparse = reference.threshold(case.pending("cpu"), 1.5)
    device = fast.device
    ours = replace(sparse, **{name: getattr(sparse, name).to(device) for name in TENSORS})
    for divisor in (1.0, 3.0, 7.5):
        expected = reference.decode(sparse, torch.empty(size, dtype=out), divisor)
        same_bits(fast.ops.decode(ours, torch.full((size,), torch.nan, dtype=out, device=device), divisor), expected)
        rows_Wn = data("normal", 3, size, 9).to(values)
        expected = reference.mean(rows_Wn, torch.empty(size, dtype=out), divisor)
        poisoned = torch.full((size,), torch.nan, dtype=out, device=device)
        same_bits(fast.ops.mean(rows_Wn.to(device), poisoned, divisor), expected)
    for op in ("give_back", "clear"):
        expected = data("normal", 3, size, 4)
        target = expected.clone().to(device)
        getattr(reference, op)(expected, sparse)
        getattr(fast.ops, op)(target, ours)
        same_bits(target, expected)


def test_coordinates_outside_are_refused(fast):
    if fast.device != "cpu":
        pytest.skip("checked on the wire, not by device code")
    case = Case(fast, 1, 1000)
    for wrong in (-1, 1000):
        with pytest.raises((IndexError, RuntimeError)):
            fast.ops.take(case.pending("cpu"), torch.tensor([[3, wrong]]))
    bad = reference.empty(1, 1000, 2, torch.float32, torch.device("cpu"))
    bad.counts_LB[0, 0] = 2
    bad.offsets_LK[0, 1] = 1000
    with pytest.raises((IndexError, RuntimeError)):
        fast.ops.decode(bad, torch.empty(1000), 1.0)
    bad.counts_LB[0, 0] = 3
    with pytest.raises((IndexError, RuntimeError)):
        fast.ops.decode(bad, torch.empty(1000), 1.0)


def damaged(sparse, how):
    counts_LB, offsets_LK = sparse.counts_LB.clone(), sparse.offsets_LK.clone()
    if how == "negative count":
        counts_LB[1, 0] = -3
    if how == "too many":
        counts_LB[1, 1] = sparse.slots
    if how == "more than a block":
        counts_LB[1, 0] = BLOCK + 1
    if how == "twice":
        offsets_LK[1, 4] = offsets_LK[1, 2]
    if how == "outside":
        offsets_LK[1, int(counts_LB[1].sum()) - 1] = -1
    if how == "another order":
        offsets_LK[1, :5] = offsets_LK[1, :5].flip(0)
    return replace(sparse, counts_LB=counts_LB, offsets_LK=offsets_LK)


@pytest.mark.parametrize(
    "how", ["not", "negative count", "too many", "more than a block", "twice", "outside", "another order"]
)
def test_misplaced(fast, how):
    sparse = damaged(reference.threshold(Case(fast, 3, 70_001).pending("cpu"), 2.0), how)
    here = replace(sparse, **{name: getattr(sparse, name).to(fast.device) for name in TENSORS})
    bad = how not in ("not", "another order")
    assert reference.misplaced(sparse).tolist() == [False, bad, False]
    assert fast.ops.misplaced(here).tolist() == [False, bad, False]


def test_undo(fast):
    case = Case(fast, 2, 5000, decay=0.9, kind="nonfinite", values=torch.bfloat16)
    for when in (False, True):
        sparse, ours, oracle, theirs = case.run("threshold", 2.0)
        fast.ops.undo(ours, sparse, torch.tensor(when, device=fast.device))
        reference.undo(theirs, oracle, torch.tensor(when))
        same_bits(ours.memory_Ln, theirs.memory_Ln)
