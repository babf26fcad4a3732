"""What each rule promises on its own: which elements, how many, how evenly."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gradsieve as gs
from gradsieve.compressors.base import k_of, keys_LS
from gradsieve.ops.reference import positions
from gradsieve.ops.rng import permute
from gradsieve.types import Pending, Segments, Turn

pytestmark = pytest.mark.usefixtures("any_ops", "poison")

numbers = st.floats(-8, 8, width=32)
vectors = st.lists(st.one_of(numbers, st.sampled_from([0.0, -0.0, 1.0, -1.0])), min_size=1, max_size=60)


def kept_of(rule, p_Ln, *, step=0, ranks=range(64), sizes=None):
    """The coordinates that each worker keeps, in order."""
    sizes = sizes or [p_Ln.shape[1]]
    segments = Segments((0, *np.cumsum(sizes).tolist()), tuple(range(len(sizes))))
    turn = Turn(step, ranks and ranks[: len(p_Ln)])
    sparse = rule(Pending(p_Ln, torch.zeros_like(p_Ln), segments), turn)
    index_LK, valid_LK = positions(sparse)
    return [index_K[valid_K].tolist() for index_K, valid_K in zip(index_LK, valid_LK, strict=True)]


@pytest.mark.parametrize(
    ("density", "size", "k"),
    [(0.29, 100, 29), (0.001, 63, 1), (1.0, 7, 7), (0.5, 1, 1), (0.3, 0, 0), (0.999, 10, 9), (1e-9, 5, 1)],
)
def test_k_is_the_floor_and_at_least_one(density, size, k):
    assert k_of(density, size) == k


@given(p=vectors, density=st.floats(0.01, 1))
def test_topk_has_the_least_error_and_gives_ties_to_the_lowest_index(p, density):
    p_Ln = torch.tensor([p])
    order = sorted(range(len(p)), key=lambda i: (-abs(p[i]), i))
    assert kept_of(gs.TopK(density), p_Ln) == [sorted(order[: k_of(density, len(p))])]


@given(p=vectors, threshold=numbers.map(abs))
def test_threshold_looks_at_one_element_at_a_time(p, threshold):
    assert kept_of(gs.HardThreshold(threshold), torch.tensor([p])) == [
        [i for i, x in enumerate(p) if abs(x) >= threshold]
    ]


def test_an_infinite_threshold_keeps_everything_back():
    p_Ln = torch.tensor([[3.4e38, 0.0, -1.0]])
    assert kept_of(gs.HardThreshold(math.inf), p_Ln) == [[]]


@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
@pytest.mark.parametrize("tail", ["gaussian", "laplace"])
@pytest.mark.parametrize(
    ("rule", "low", "high"), [(gs.GaussianK, 2 / 3, 4 / 3), (gs.SampledTopK, 0.8, 1.3)], ids=["gaussiank", "sampled"]
)
def test_estimated_thresholds_keep_about_k(rule, low, high, tail, density, generator):
    """The published halving loop ends at 33 k for a Laplace sample at 0.1%."""
    size = 100_000
    p_Ln = torch.randn(2, size, generator=generator)
    if tail == "laplace":
        p_Ln = -p_Ln.sign() * torch.rand(2, size, generator=generator).log()
    for step in (0, 17):
        for kept in kept_of(rule(density), p_Ln, step=step):
            assert low * density * size <= len(kept) <= high * density * size


@pytest.mark.parametrize("rule", [gs.GaussianK(0.1), gs.SampledTopK(0.1)], ids=str)
def test_estimated_thresholds_keep_the_largest(rule, generator):
    p_Ln = torch.randn(3, 5000, generator=generator)
    for p_n, kept in zip(p_Ln, kept_of(rule, p_Ln), strict=True):
        left = p_n.abs().clone()
        left[kept] = 0.0
        assert left.max() <= p_n[kept].abs().min()


def test_the_sample_moves_from_step_to_step():
    """A spike pattern as regular as the stride is in the sample at one start only; each start is used."""
    p_Ln = torch.arange(1000.0).remainder(10.0)[None] + torch.arange(1000.0)[None] * 1e-4
    counts = {len(kept_of(gs.SampledTopK(0.05, sample=0.1), p_Ln, step=step)[0]) for step in range(10)}
    assert len(counts) > 1


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 1000])
def test_permute_is_a_bijection(size):
    slot = torch.arange(size)
    for key in range(20):
        assert sorted(permute(slot, torch.full_like(slot, size), torch.full_like(slot, key)).tolist()) == slot.tolist()


def chi_square_is_plausible(counts, draws, k):
    """Inclusion counts of k of n, without replacement: the statistic has mean n - 1 and variance about 2 (n - 1)."""
    n, share = len(counts), k / len(counts)
    statistic = ((counts - draws * share) ** 2).sum() / (draws * share * (1 - share)) * (n - 1) / n
    assert abs(statistic - (n - 1)) < 4.5 * math.sqrt(2 * (n - 1)), statistic


@pytest.mark.parametrize("rule", [gs.RandomK, gs.BlockRandomK], ids=["randomk", "blockrandomk"])
@pytest.mark.parametrize(("size", "density"), [(5, 0.4), (64, 0.1), (101, 0.25)])
def test_random_rules_keep_every_coordinate_equally_often(rule, size, density):
    """Starts are uniform for a block, so each start is counted rather than each (dependent) coordinate."""
    counts, k, draws = np.zeros(size), k_of(density, size), 0
    for step in range(64):
        for kept in kept_of(rule(density, seed=3), torch.ones(64, size), step=step):
            assert len(set(kept)) == len(kept) == k
            if rule is gs.BlockRandomK:
                first = [i for i in kept if (i - 1) % size not in kept]
                counts[first] += 1
            else:
                counts[kept] += 1
            draws += 1
    chi_square_is_plausible(counts, draws, 1 if rule is gs.BlockRandomK else k)


def test_random_pairs_are_uniform_too():
    pairs = np.zeros(10)
    names = {pair: i for i, pair in enumerate((a, b) for a in range(5) for b in range(a + 1, 5))}
    for step in range(64):
        for kept in kept_of(gs.RandomK(0.4), torch.ones(64, 5), step=step):
            pairs[names[tuple(kept)]] += 1
    chi_square_is_plausible(pairs, 64 * 64, 1)


@pytest.mark.parametrize("rule", [gs.RandomK(0.1), gs.BlockRandomK(0.1)], ids=str)
def test_draws_depend_on_step_seed_segment_and_rank_where_private(rule):
    ones_Ln = torch.ones(4, 1000)
    private = kept_of(rule, ones_Ln)
    assert len(set(map(tuple, private))) == 4
    shared = kept_of(rule, ones_Ln, ranks=None)
    assert len(set(map(tuple, shared))) == 1
    assert kept_of(rule, ones_Ln, ranks=None) == shared
    assert kept_of(rule, ones_Ln, ranks=None, step=1) != shared
    assert kept_of(type(rule)(0.1, seed=1), ones_Ln, ranks=None) != shared
    first, second = torch.tensor(kept_of(rule, ones_Ln[:1], ranks=None, sizes=[500, 500])).view(2, 50)
    assert not torch.equal(first, second - 500)
    assert first.max() < 500 <= second.min()


def test_any_whole_seed_works_and_large_ones_differ():
    segments = Segments((0, 10), (1,))
    keys = [keys_LS(seed, segments, Turn(0, None), 1).item() for seed in (0, 1, 2**31, 2**32 - 1)]
    assert len(set(keys)) == len(keys)
    assert keys_LS(2**70 + 1, segments, Turn(0, None), 1).item() == keys[1]


def test_a_block_is_consecutive_wraps_round_and_reaches_the_tail():
    """Aligned blocks never send the last d mod k; runs from any start do."""
    size, k, wrapped, seen = 101, 25, False, set()
    for step in range(64):
        (kept,) = kept_of(gs.BlockRandomK(0.25), torch.ones(1, size), step=step)
        starts = [i for i in kept if (i - 1) % size not in kept]
        assert len(starts) == 1
        assert sorted((starts[0] + i) % size for i in range(k)) == kept
        wrapped |= starts[0] + k > size
        seen |= set(kept)
    assert wrapped
    assert seen == set(range(size))


class TestAccordion:
    def run(self, norms, lrs=None, interval=2, change=0.5):
        """The elements kept of two segments at each step; only the first one's norm moves, and norms are exact."""
        rule, segments = gs.Accordion(0.1, 0.5, interval=interval, change=change), Segments((0, 16, 32), (0, 1))
        state, seen = rule.state(segments), []
        for step, norm in enumerate(norms):
            mean_n = torch.cat([torch.full((16,), norm), torch.ones(16)])
            turn = Turn(step, range(1), state, lrs and lrs[step])
            pending = Pending(torch.randn(1, 32), torch.zeros(1, 32), segments)
            index_LK, _ = positions(rule(pending, turn))
            seen.append(((index_LK < 16).sum().item(), (index_LK >= 16).sum().item()))
            rule.observe(mean_n, segments, turn)
        return seen

    def test_starts_critical_and_rests_while_norms_are_steady(self):
        assert self.run([1.0] * 6) == [(8, 8)] * 4 + [(1, 1)] * 2

    def test_a_change_of_half_is_critical_for_that_segment_alone(self):
        seen = self.run([1.0] * 4 + [1.5] * 2 + [1.5] * 4)
        assert seen[4:] == [(1, 1)] * 2 + [(8, 1)] * 2 + [(1, 1)] * 2

    def test_just_under_half_is_not(self):
        assert self.run([1.0] * 4 + [1.49] * 4)[6:] == [(1, 1)] * 2

    def test_a_falling_rate_is_critical_and_a_rising_one_is_not(self):
        seen = self.run([1.0] * 10, lrs=[0.1] * 4 + [0.2] * 2 + [0.1] * 4)
        assert seen[4:] == [(1, 1)] * 4 + [(8, 8)] * 2

    def test_a_segment_that_missed_a_step_decides_a_step_later(self):
        rule, segments = gs.Accordion(0.1, 0.5, interval=2), Segments((0, 16, 32), (0, 1))
        state = rule.state(segments)
        state["steps"][0] = 1.0  # the other one's bucket was not finite once
        state["squares"][0] = 16.0
        for steps_S, then_S in (([0, 1], [4, torch.nan]), ([1, 0], [4, 4]), ([0, 1], [4, 4])):
            rule.observe(torch.ones(32), segments, Turn(0, range(1), state))
            assert state["steps"].tolist() == steps_S
            torch.testing.assert_close(state["then"], torch.tensor(then_S).double(), equal_nan=True)

    def test_a_loss_scale_changes_nothing(self):
        rule, segments = gs.Accordion(0.1, 0.5, interval=1), Segments((0, 16), (0,))
        state = rule.state(segments)
        for step, scale in enumerate((1024.0, 1024.0, 4096.0)):
            rule.observe(torch.full((16,), scale), segments, Turn(step, range(1), state, gain=1 / scale))
        assert (state["critical"].tolist(), state["then"].tolist()) == ([0.0], [4.0])

    def test_norms_of_16_bit_gradients_neither_vanish_nor_overflow(self):
        rule, segments = gs.Accordion(0.1, 0.5, interval=1), Segments((0, 10), (0,))
        for size in (1e-5, 1e4):
            state = rule.state(segments)
            for step in range(2):
                rule.observe(torch.full((10,), size, dtype=torch.float16), segments, Turn(step, range(1), state))
            assert state["critical"].tolist() == [0.0]
