"""The convex loop does what the simulator does; its figures' claims are counted as the paper counts them."""

import pytest
import torch

import gradsieve as gs
from gradsieve.lab.papers.checkpoint import Checkpoint
from gradsieve.lab.papers.sahu2021 import convex
from gradsieve.lab.papers.sahu2021.convex import Star, Stochastic, follow
from gradsieve.lab.papers.sahu2021.figures8and9 import reached

WORKERS, SEEDS, STEPS = 6, 2, 40


def makers(problem):
    return {
        "stochastic": lambda: Stochastic(problem, WORKERS, SEEDS, STEPS),
        "star": lambda: Star(problem, WORKERS, SEEDS),
    }


@pytest.mark.parametrize("kind", ["stochastic", "star"])
@pytest.mark.parametrize("rule", [gs.Dense(), gs.TopK(2 / 30), gs.HardThreshold(40.0)], ids=str)
def test_the_loop_is_the_simulator(small, kind, rule):
    """Values, memories, counts and errors of 40 steps, for each seed on its own."""
    gradients = makers(small)[kind]()
    start_d = small.minimiser + 0.01
    curves = follow(small, [gs.Dense(), rule], gradients, start_d, seeds=SEEDS, steps=STEPS)
    for seed in range(SEEDS):
        exchange = "dense" if rule == gs.Dense() else "allgather"
        simulator = gs.Simulator(
            30, rule, workers=WORKERS, feedback="update", exchange=exchange, strict=True, dtype=torch.float64
        )
        x_d = start_d.clone()
        for step in range(STEPS):
            grads_SWd = gradients(step, x_d.repeat(1, SEEDS, 1))[0]
            x_d -= small.lr * simulator.step(grads_SWd[seed], lr=small.lr)
            stats = simulator.stats().last
            point = step + 1
            assert curves.kept_PRS[point, 1, seed] == pytest.approx(stats.kept, abs=1e-12)
            assert curves.error_PRS[point, 1, seed].item() == pytest.approx(stats.error, rel=1e-9, abs=1e-30)
        torch.testing.assert_close(curves.x_RSd[1, seed], x_d, rtol=1e-12, atol=1e-15)
        total = simulator.stats().total
        assert curves.elements_PRS[-1, 1, seed].item() == pytest.approx(total.kept, rel=1e-12)
        assert curves.total_error_RS[1, seed].item() == pytest.approx(total.error, rel=1e-9, abs=1e-30)
        above = small.value(x_d[None]).item() - small.minimum
        assert curves.above_PRS[-1, 1, seed].item() == pytest.approx(above, rel=1e-9)


def test_gradients_are_those_of_the_loss(small):
    """Over all workers, star gradients average to the gradient of f; one example's to autograd's."""
    x_d = (small.minimiser + 0.02).requires_grad_()
    (expected_d,) = torch.autograd.grad(small.value(x_d[None]).sum(), x_d)
    x_RSd = x_d.detach().repeat(1, SEEDS, 1)
    star_RSWd = Star(small, WORKERS, SEEDS)(0, x_RSd)
    for seed in range(SEEDS):
        torch.testing.assert_close(star_RSWd[0, seed].mean(0), expected_d, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(small.gradient(x_d.detach()), expected_d, rtol=1e-12, atol=1e-14)
    stochastic = Stochastic(small, WORKERS, SEEDS, 4)
    for seed in range(SEEDS):
        for worker in range(WORKERS):
            row = stochastic._rows_TSW[3, seed, worker]
            one = torch.nn.functional.softplus(-small.signed_Nd[row] @ x_d) + small.l2 / 2 * x_d @ x_d
            (expected_d,) = torch.autograd.grad(one, x_d)
            torch.testing.assert_close(stochastic(3, x_RSd)[0, seed, worker], expected_d, rtol=1e-11, atol=1e-13)


def test_workers_share_out_the_data_and_draw_from_their_own():
    split_WB = convex._split(120, WORKERS, seed=1)
    assert sorted(split_WB.flatten().tolist()) == list(range(120))
    rows_TW = convex._rows(120, WORKERS, 500, seed=1)
    for worker in range(WORKERS):
        assert set(rows_TW[:, worker].tolist()) == set(split_WB[worker].tolist())
    assert not torch.equal(split_WB, convex._split(120, WORKERS, seed=2))


def test_a_run_that_was_stopped_goes_on_to_the_same_result(small, tmp_path, monkeypatch):
    rules = [gs.Dense(), gs.TopK(2 / 30), gs.HardThreshold(40.0)]
    start_d = small.minimiser + 0.01

    def run(checkpoint):
        gradients = Stochastic(small, WORKERS, SEEDS, STEPS)
        return follow(small, rules, gradients, start_d, seeds=SEEDS, steps=STEPS, every=4, checkpoint=checkpoint)

    whole = run(None)
    monkeypatch.setattr("gradsieve.lab.papers.checkpoint.SECONDS", 0.0)
    path = tmp_path / "state.npz"
    real, calls = convex._step, []

    def dies(*arguments):
        calls.append(arguments[4])
        if len(calls) == 28:
            raise KeyboardInterrupt
        real(*arguments)

    monkeypatch.setattr(convex, "_step", dies)
    with pytest.raises(KeyboardInterrupt):
        run(Checkpoint(path, {"steps": STEPS}, resume=True))
    calls.clear()
    again = run(Checkpoint(path, {"steps": STEPS}, resume=True))
    assert calls[0] == 27, "nothing is done twice"
    torch.testing.assert_close(again.above_PRS, whole.above_PRS, rtol=1e-12, atol=1e-15)  # f is taken of other blocks
    for name in set(whole.__dataclass_fields__) - {"above_PRS", "seconds"}:
        assert torch.equal(getattr(whole, name), getattr(again, name)), name


def test_what_is_sent_until_a_precision_stays_reached(small):
    curves = follow(small, [gs.Dense()], Star(small, WORKERS, 1), small.minimiser + 0.01, seeds=1, steps=20)
    above_PRS = torch.tensor([1.0, 1e-12, 1.0, 1e-11, 1e-12]).view(5, 1, 1)
    elements_PRS = torch.arange(5.0).view(5, 1, 1)
    fields = {**curves.__dict__, "above_PRS": above_PRS, "elements_PRS": elements_PRS}
    assert reached(type(curves)(**fields), 0) == 3.0
    assert reached(type(curves)(**{**fields, "above_PRS": above_PRS + 1}), 0) is None
