"""One contract for all rules, through every module of ops: nothing is lost, and the same again gives the same."""

import math

import pytest
import torch

import gradsieve as gs
from gradsieve.compressors.text import RULES as NAMES
from gradsieve.ops import reference
from gradsieve.types import BLOCK, Learner, Pending, Segments, Turn

pytestmark = pytest.mark.usefixtures("any_ops", "poison")

RULES = [
    "dense",
    "threshold:1",
    "topk:0.1",
    "randomk:0.1",
    "blockrandomk:0.1",
    "gaussiank:0.1",
    "sampledtopk:0.1,sample=0.1",
    "accordion:0.05,0.2",
]
SIZES = [0, 1, 63, 1000, 10007]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
WIRE = [torch.float32, torch.bfloat16, torch.float16]
every_rule = pytest.mark.parametrize("rule", RULES)


def segments_of(*sizes):
    bounds = [0]
    for size in sizes:
        bounds.append(bounds[-1] + size)
    return Segments(tuple(bounds), tuple(range(100, 100 + len(sizes))))


def turn_of(rule, segments, step=3, ranks=range(2)):
    return Turn(step, ranks, rule.state(segments) if isinstance(rule, Learner) else {})


def sieve(text, grad_Ln, memory_Ln, *, segments=None, turn=None, **options):
    """Apply a rule; the memory is changed in place."""
    rule = gs.parse(text)
    segments = segments or segments_of(grad_Ln.shape[1])
    turn = turn or turn_of(rule, segments, ranks=range(len(grad_Ln)))
    return rule(Pending(grad_Ln, memory_Ln, segments, **options), turn)


def sent_Ln(sparse):
    """What travels, as a dense float64 tensor; every coordinate at most once, in order."""
    index_LK, valid_LK = reference.positions(sparse)
    assert not reference.misplaced(sparse).any()
    out_Ln = torch.zeros(len(index_LK), sparse.size, dtype=torch.float64)
    for row, index_K in enumerate(index_LK):
        kept = index_K[valid_LK[row]]
        assert bool((kept.diff() > 0).all())
        out_Ln[row, kept] = sparse.values_LK[row, valid_LK[row]].double()
    return out_Ln


def kept_L(sparse):
    return sparse.counts_LB.sum(1).tolist()


def test_the_contract_covers_every_rule():
    assert [text.partition(":")[0] for text in RULES] == list(NAMES)


@every_rule
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sent_and_memory_are_p_exactly(rule, dtype, generator):
    for size in SIZES:
        for values in WIRE:
            grad_Ln = torch.randn(2, size, generator=generator).to(dtype)
            memory_Ln = torch.randn(2, size, generator=generator).to(torch.promote_types(dtype, torch.float32))
            p_Ln = memory_Ln + grad_Ln.to(memory_Ln.dtype)
            sparse = sieve(rule, grad_Ln, memory_Ln, values=values)
            assert sparse.values_LK.dtype == values
            assert kept_L(sparse) == sparse.wanted_L.tolist()
            assert not sparse.nonfinite_L.any()
            assert torch.equal(memory_Ln.double() + sent_Ln(sparse), p_Ln.double())
            reference.give_back(memory_Ln, sparse)
            assert torch.equal(memory_Ln, p_Ln)


@every_rule
def test_decay_and_gain_enter_p(rule, generator):
    grad_Ln, old_Ln = torch.randn(2, 2, 1000, generator=generator)
    memory_Ln = old_Ln.clone()
    sparse = sieve(rule, grad_Ln, memory_Ln, decay=0.5, gain=4.0)
    assert torch.equal(memory_Ln.double() + sent_Ln(sparse), (old_Ln * 0.5 + grad_Ln * 4.0).double())


@every_rule
def test_the_same_again_gives_the_same_whatever_the_cache_holds(rule, generator):
    """The cache speeds an op up between steps; it never changes a result, even after a jump of 1e6."""
    cache = {}
    segments = segments_of(700, 1, 299)
    for scale in (1.0, 1.1, 0.9, 1e6, 1.0, 1e-6, 0.0, 1.0):
        grad_Ln = scale * torch.randn(2, 1000, generator=generator)
        results = []
        for used in (cache, {}):
            memory_Ln = torch.zeros(2, 1000)
            sparse = sieve(rule, grad_Ln, memory_Ln, segments=segments, cache=used)
            results.append((sent_Ln(sparse), memory_Ln))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])


@every_rule
@pytest.mark.parametrize("kind", ["ties", "zeros", "equal", "tiny", "huge"])
def test_odd_gradients_lose_nothing(rule, kind, generator):
    signs_Ln = torch.randn(2, 1000, generator=generator).sign()
    grad_Ln = {
        "ties": signs_Ln,
        "zeros": torch.zeros(2, 1000),
        "equal": torch.ones(2, 1000),
        "tiny": signs_Ln * 1e-42,
        "huge": signs_Ln * 3e38,
    }[kind]
    for values in WIRE:
        memory_Ln = torch.zeros(2, 1000)
        sparse = sieve(rule, grad_Ln, memory_Ln, values=values)
        assert sparse.nonfinite_L.tolist() == [0, 0]
        reference.give_back(memory_Ln, sparse)
        assert torch.equal(memory_Ln, grad_Ln)


@every_rule
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan], ids=str)
def test_what_is_not_finite_is_flagged_and_leaves_the_memory_there(rule, bad, generator):
    grad_Ln, old_Ln = torch.randn(2, 3, 1000, generator=generator)
    grad_Ln[1, [0, 500, 999]] = bad
    memory_Ln = old_Ln.clone()
    sparse = sieve(rule, grad_Ln, memory_Ln)
    assert sparse.nonfinite_L.tolist() == [0, 3, 0]
    assert torch.equal(memory_Ln[1, [0, 500, 999]], old_Ln[1, [0, 500, 999]])
    assert memory_Ln.isfinite().all()
    healthy = [0, 2]
    p_Ln = (old_Ln + grad_Ln).double()[healthy]
    assert torch.equal((memory_Ln.double() + sent_Ln(sparse))[healthy], p_Ln)


@every_rule
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, 3.4e38], ids=str)
def test_undo_takes_the_step_back(rule, bad, generator, any_ops):
    """3.4e38 is finite and overflows only where the memory is added: p decides, not the gradient."""
    grad_Ln, old_Ln = torch.randn(2, 2, 1000, generator=generator)
    grad_Ln[1, 7], old_Ln[1, 7] = bad, 3e38
    for decay in (1.0, 0.5, 2.0):
        memory_Ln = old_Ln.clone()
        pending = Pending(grad_Ln, memory_Ln, segments_of(1000), decay=decay)
        parsed = gs.parse(rule)
        sparse = parsed(pending, turn_of(parsed, pending.segments))
        after_Ln = memory_Ln.clone()
        any_ops.undo(pending, sparse, torch.tensor(False))
        assert torch.equal(memory_Ln, after_Ln)
        assert sparse.nonfinite_L.tolist() == [0, 1]
        any_ops.undo(pending, sparse, torch.tensor(True))
        torch.testing.assert_close(memory_Ln, old_Ln, rtol=1e-6, atol=1e-6)


@every_rule
def test_elements_beyond_the_slots_are_deferred_and_counted(rule, generator):
    grad_Ln = torch.randn(2, 1000, generator=generator)
    whole = sieve(rule, grad_Ln, torch.zeros(2, 1000))
    slots = min(kept_L(whole)) // 2
    memory_Ln = torch.zeros(2, 1000)
    into = reference.empty(2, 1000, slots, torch.float32, grad_Ln.device)
    sparse = sieve(rule, grad_Ln, memory_Ln, into=into)
    assert slots > 0
    assert kept_L(sparse) == [slots, slots]
    assert sparse.wanted_L.tolist() == kept_L(whole)
    assert torch.equal(memory_Ln.double() + sent_Ln(sparse), grad_Ln.double())


@every_rule
def test_segments_are_independent(rule, generator):
    """A rule over [a | b | empty | c] keeps what it keeps of each alone: buckets may be arranged at will."""
    sizes = (700, 1, 0, 299)
    grad_Ln = torch.randn(2, 1000, generator=generator)
    whole = segments_of(*sizes)
    together = sent_Ln(sieve(rule, grad_Ln, torch.zeros(2, 1000), segments=whole))
    for start, size, key in zip(whole.bounds, sizes, whole.keys, strict=False):
        part_Ln = grad_Ln[:, start : start + size].clone()
        alone = sieve(rule, part_Ln, torch.zeros(2, size), segments=Segments((0, size), (key,)))
        assert torch.equal(sent_Ln(alone), together[:, start : start + size])


@every_rule
def test_workers_are_independent(rule, generator):
    """L workers in one call are L calls of one: the simulator is no imitation of ranks."""
    parsed, segments = gs.parse(rule), segments_of(700, 300)
    grad_Ln = torch.randn(3, 1000, generator=generator)
    together = sent_Ln(sieve(rule, grad_Ln, torch.zeros(3, 1000), segments=segments))
    for rank in range(3):
        turn = turn_of(parsed, segments, ranks=range(rank, rank + 1))
        alone = sieve(rule, grad_Ln[rank : rank + 1], torch.zeros(1, 1000), segments=segments, turn=turn)
        assert torch.equal(sent_Ln(alone)[0], together[rank])


@pytest.mark.parametrize("rule", RULES)
def test_the_sign_of_a_gradient_does_not_matter(rule, generator):
    """keep(-p) = keep(p), for a p whose mean is not 0 too."""
    grad_Ln = torch.randn(2, 1000, generator=generator) - 2.0
    one = sent_Ln(sieve(rule, grad_Ln, torch.zeros(2, 1000)))
    other = sent_Ln(sieve(rule, -grad_Ln, torch.zeros(2, 1000)))
    assert torch.equal(one, -other)


@every_rule
def test_several_blocks(rule, generator):
    size = 2 * BLOCK + 17
    grad_Ln = torch.randn(2, size, generator=generator)
    memory_Ln = torch.zeros(2, size)
    sparse = sieve(rule, grad_Ln, memory_Ln, measure=True)
    assert sparse.counts_LB.shape == (2, 3)
    assert torch.equal(memory_Ln.double() + sent_Ln(sparse), grad_Ln.double())
    torch.testing.assert_close(sparse.error_L.double(), memory_Ln.double().square().sum(1), rtol=1e-6, atol=0)


@every_rule
def test_gradients_are_read_only_and_may_be_strided(rule, generator):
    grad_nL = torch.randn(1000, 2, generator=generator)
    before_nL = grad_nL.clone()
    memory_Ln = torch.zeros(2, 1000)
    strided = sent_Ln(sieve(rule, grad_nL.T, memory_Ln))
    assert torch.equal(grad_nL, before_nL)
    assert torch.equal(strided, sent_Ln(sieve(rule, grad_nL.T.contiguous(), torch.zeros(2, 1000))))


@every_rule
def test_the_global_generator_is_never_touched(rule):
    before = torch.get_rng_state()
    sieve(rule, torch.ones(2, 1000), torch.zeros(2, 1000))
    assert torch.equal(torch.get_rng_state(), before)


@every_rule
def test_fixed_size_rules_keep_within_their_slots(rule, generator):
    segments = segments_of(700, 1, 0, 299)
    slots = gs.parse(rule).slots(segments)
    sparse = sieve(rule, torch.randn(2, 1000, generator=generator), torch.zeros(2, 1000), segments=segments)
    if slots is None:
        assert rule.partition(":")[0] in ("threshold", "gaussiank", "sampledtopk")
    else:
        assert max(kept_L(sparse)) <= slots
