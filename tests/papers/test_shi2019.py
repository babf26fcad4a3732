"""Top-k's leftovers and the shape of a vector, against their definitions."""

import pytest
import torch

from gradsieve.lab.papers.entry import Context
from gradsieve.lab.papers.shi2019 import figures, gradients
from gradsieve.theory import topk_contraction_bell


def test_what_top_k_leaves_out(generator):
    u_n = torch.randn(1000, generator=generator)
    for k, share in zip((1, 10, 999, 1000), gradients.left_out(u_n, [1, 10, 999, 1000]), strict=True):
        keep = u_n.double().abs().topk(k).indices
        rest_n = u_n.double().index_fill(0, keep, 0.0)
        assert share.item() == pytest.approx((rest_n.square().sum() / u_n.double().square().sum()).item(), rel=1e-9)


def test_the_bell_bound_holds_for_a_gaussian_and_not_for_any_vector(generator):
    u_n = torch.randn(5000, generator=generator)
    ks = [1, 5, 50, 500, 2500]
    bounds = torch.tensor([1 - topk_contraction_bell(k, 5000) for k in ks], dtype=torch.float64)
    assert (gradients.left_out(u_n, ks) <= bounds).all()
    assert gradients.below_line(u_n) == 1.0
    flat_n = torch.ones(5000)  # no bell: the classic bound is met with equality and the tighter one broken
    assert (gradients.left_out(flat_n, ks) > bounds).all()
    assert gradients.below_line(flat_n) < 0.01


def test_a_histogram_is_a_density(generator):
    centres, heights = figures.histogram(5.0 * torch.randn(200_000, generator=generator))
    assert (heights.sum() * (centres[1] - centres[0])).item() == pytest.approx(1.0, abs=1e-3)
    assert heights.max().item() == pytest.approx(0.399, abs=0.02)


def test_a_stopped_training_goes_on_to_the_same_gradients(tmp_path, monkeypatch):
    monkeypatch.setattr("gradsieve.lab.papers.checkpoint.SECONDS", 0.0)
    whole_Un = gradients.compensated("digits", Context(tmp_path, quick=True))
    (tmp_path / "state-digits.npz").unlink()

    def stop(part, done, total, state=""):
        if done == 25:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gradients.compensated("digits", Context(tmp_path, quick=True, track=stop))
    steps = []
    watch = Context(tmp_path, quick=True, resume=True, track=lambda part, done, total, state="": steps.append(done))
    again_Un = gradients.compensated("digits", watch)
    assert steps[0] == 26
    assert torch.equal(whole_Un, again_Un)
    assert whole_Un.isfinite().all()
    assert (whole_Un.abs().sum(1) > 0).all()
