"""The step against the papers' algorithms, written out slowly: one worker at a time, one line a line."""

import math

import pytest
import torch

import gradsieve as gs

pytestmark = pytest.mark.usefixtures("any_ops", "poison")

W, N, STEPS = 3, 50, 40
RATES = [0.1 * 0.8 ** (t // 5) * (1 + t % 3) for t in range(STEPS)]


def compress(text, p_n):
    """A rule in plain Python on one worker's p; what it sends is rounded to float32, as on the wire."""
    name, _, number = text.partition(":")
    p = p_n.tolist()
    if name == "topk":
        k = max(1, math.floor(float(number) * len(p)))
        keep = sorted(range(len(p)), key=lambda i: (-abs(p[i]), i))[:k]
    else:
        keep = [i for i, x in enumerate(p) if abs(x) >= float(number)]
    sent_n = torch.zeros_like(p_n)
    sent_n[keep] = p_n[keep].float().double()
    return sent_n


def simulate(rule, grads_TWn, **options):
    sim = gs.Simulator(N, gs.parse(rule), workers=W, exchange="allgather", strict=True, dtype=torch.float64, **options)
    return [sim.step(grad_Wn, lr=lr) for grad_Wn, lr in zip(grads_TWn, RATES, strict=True)]


@pytest.fixture
def grads_TWn(generator):
    return torch.randn(STEPS, W, N, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("rule", ["topk:0.1", "threshold:1.5"])
def test_update_feedback_is_algorithm_1(rule, grads_TWn):
    """e + lr g, send lr C(. / lr), keep the rest, x moves by the mean: while the learning rate changes."""
    x_n, e_Wn = torch.zeros(N, dtype=torch.float64), torch.zeros(W, N, dtype=torch.float64)
    ours_n = x_n.clone()
    for grad_Wn, lr, mean_n in zip(grads_TWn, RATES, simulate(rule, grads_TWn, feedback="update"), strict=True):
        delta_Wn = torch.zeros_like(e_Wn)
        for i in range(W):
            p_n = e_Wn[i] + lr * grad_Wn[i]
            delta_Wn[i] = lr * compress(rule, p_n / lr)
            e_Wn[i] = p_n - delta_Wn[i]
        x_n -= delta_Wn.mean(0)
        ours_n -= lr * mean_n
        torch.testing.assert_close(ours_n, x_n, rtol=1e-6, atol=1e-7)  # a sent float32 may round the other way
    assert x_n.norm() > 0.1


@pytest.mark.parametrize("rule", ["topk:0.1", "threshold:1.5"])
def test_gradient_feedback_does_not_look_at_the_rate(rule, grads_TWn):
    m_Wn = torch.zeros(W, N, dtype=torch.float64)
    for grad_Wn, mean_n in zip(grads_TWn, simulate(rule, grads_TWn), strict=True):
        sent_Wn = torch.stack([compress(rule, m_Wn[i] + grad_Wn[i]) for i in range(W)])
        m_Wn = m_Wn + grad_Wn - sent_Wn
        torch.testing.assert_close(mean_n, sent_Wn.mean(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", ["topk:0.1", "threshold:1.5"])
def test_no_feedback_compresses_each_gradient_alone(rule, grads_TWn):
    for grad_Wn, mean_n in zip(grads_TWn, simulate(rule, grads_TWn, feedback="none"), strict=True):
        expected_n = torch.stack([compress(rule, grad_n) for grad_n in grad_Wn]).mean(0)
        torch.testing.assert_close(mean_n, expected_n, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", ["topk:0.1", "threshold:1.5"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("masking", [False, True])
@pytest.mark.parametrize("clip", [None, 3.0])
def test_momentum_feedback_is_algorithm_3(rule, nesterov, masking, clip, grads_TWn):
    """Local momentum, then the memory; masking and clipping as in Deep Gradient Compression."""
    feedback = gs.Momentum(beta=0.7, nesterov=nesterov, masking=masking, clip=clip)
    u_Wn, v_Wn = torch.zeros(2, W, N, dtype=torch.float64)
    for grad_Wn, mean_n in zip(grads_TWn, simulate(rule, grads_TWn, feedback=feedback), strict=True):
        sent_Wn = torch.zeros_like(u_Wn)
        for i in range(W):
            g_n = grad_Wn[i]
            if clip is not None:
                g_n = g_n * min(1.0, clip / math.sqrt(W) / g_n.norm().item())
            if nesterov:
                u_Wn[i] = 0.7 * (u_Wn[i] + g_n)
                v_Wn[i] += u_Wn[i] + g_n
            else:
                u_Wn[i] = 0.7 * u_Wn[i] + g_n
                v_Wn[i] += u_Wn[i]
            sent_Wn[i] = compress(rule, v_Wn[i])
            v_Wn[i] -= sent_Wn[i]
            if masking:
                u_Wn[i, sent_Wn[i] != 0] = 0.0
        torch.testing.assert_close(mean_n, sent_Wn.mean(0), rtol=1e-6, atol=1e-7)


def test_update_feedback_at_a_constant_rate_is_gradient_feedback(generator):
    grads_TWn = torch.randn(STEPS, W, N, generator=generator)
    sims = [gs.Simulator(N, gs.HardThreshold(1.5), workers=W, feedback=kind) for kind in ("gradient", "update")]
    for grad_Wn in grads_TWn:
        one_n, other_n = (sim.step(grad_Wn, lr=0.3) for sim in sims)
        assert torch.equal(one_n, other_n)


@pytest.mark.parametrize("rule", ["topk:0.004", "gaussiank:0.004", "randomk:0.004"])
def test_warm_up_lowers_the_density_in_five_stretches(rule, generator):
    size = 10_000
    feedback = gs.Momentum(warmup=10)
    sim = gs.Simulator(size, gs.parse(rule), workers=1, feedback=feedback, exchange="allgather", strict=True)
    kept = []
    for _ in range(11):
        sim.step(torch.randn(1, size, generator=generator))
        kept.append(sim.stats().last.kept)
    expected = [2500, 2500, 625, 625, 156, 156, 40, 40, 40, 40, 40]
    low, high = (2 / 3, 4 / 3) if rule.startswith("gaussiank") else (1, 1)
    assert all(low * k - 1 <= count <= high * k + 1 for count, k in zip(kept, expected, strict=True))
    if high == 1:
        assert kept[::2] == [2500, 625, 156, 40, 40, 40]
