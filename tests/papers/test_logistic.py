"""The convex problem: the authors' constants, the loss and its derivatives, and files that are not what they claim."""

import lzma

import numpy as np
import pytest
import torch

from gradsieve.lab.errors import LabError
from gradsieve.lab.papers.sahu2021 import constants
from gradsieve.lab.papers.summary import Comparison
from gradsieve.lab.tasks import logistic


def test_madelons_constants_to_ten_digits(madelon_problem):
    assert madelon_problem.smoothness == pytest.approx(29790805.64933511, rel=1e-10)
    assert madelon_problem.l2 == pytest.approx(2979.080564933511, rel=1e-10)
    assert madelon_problem.lr == pytest.approx(3.3564047302672275e-08, rel=1e-10)
    assert madelon_problem.minimum == pytest.approx(0.6679195534, abs=0.5e-10)
    assert madelon_problem.gradient(madelon_problem.minimiser).norm() < 1e-11


def test_madelons_start_agrees_as_far_as_the_authors_optimum_defines_it(madelon_problem):
    """f(x0) = 12.170929143981764 was printed for an x* that lies 3.4e-10 above the minimum."""
    rows = Comparison("sahu2021/fig7")
    constants.madelon(madelon_problem, rows)
    start = rows.rows[-1]
    assert start.published == 12.170929143981764
    assert start.ours == pytest.approx(start.published, rel=1e-8)
    theirs = madelon_problem.lbfgs(start=1.0, tolerance=1e-10)
    assert madelon_problem.value(theirs[None]).item() == pytest.approx(0.6679195537701466, abs=1e-11)


def test_the_derivatives_are_those_of_the_loss(small):
    x_d = (small.minimiser + 0.03).requires_grad_()
    gradient_d, hessian_dd = torch.autograd.grad(small.value(x_d[None]).sum(), x_d)[0], None
    hessian_dd = torch.autograd.functional.hessian(lambda x: small.value(x[None]).sum(), x_d.detach())
    torch.testing.assert_close(small.gradient(x_d.detach()), gradient_d, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(small.hessian(x_d.detach()), hessian_dd, rtol=1e-10, atol=1e-12)
    assert small.gradient(small.minimiser).norm() < 1e-12


def test_smoothness_is_the_largest_curvature_either_way(monkeypatch, small):
    features = small.features_Nd.numpy()
    expected = np.linalg.eigvalsh(features.T @ features)[-1] / (4 * len(features))
    assert small.smoothness == pytest.approx(expected, rel=1e-12)
    monkeypatch.setattr(logistic, "_SMALL", 0)  # as for gisette's 5,000 columns
    again = logistic.Logistic("again", small.features_Nd, small.labels_N)
    assert again.smoothness == pytest.approx(expected, rel=1e-12)


def test_the_generated_gisette_is_like_it_and_says_so():
    made = logistic.gisette(None, (600, 500))
    assert made.generated
    assert "generated" in made.name
    assert torch.equal(made.features_Nd, logistic.like_gisette((600, 500)).features_Nd)
    assert made.features_Nd.shape == (600, 500)
    assert made.features_Nd.abs().max() <= 1
    scale = 5000 / 500
    assert made.smoothness * scale == pytest.approx(842.868, rel=0.05)
    assert made.features_Nd.square().sum(1).mean() / 4 * scale == pytest.approx(1163.345, rel=0.05)
    half = made.features_Nd[:, :250], made.features_Nd[:, 250:]
    told, probes = (abs(part.T @ made.labels_N / 600).mean() for part in half)
    assert told > 2 * probes, "the probes know nothing of the label"


def write(path, text):
    path.write_bytes(lzma.compress(text.encode()) if path.suffix == ".xz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["madelon", "madelon.libsvm.xz", "madelon.txt"])
def test_a_libsvm_file_is_read_plain_or_packed(tmp_path, monkeypatch, name):
    path = write(tmp_path / name, "+1 1:2 3:-0.5\n-1 2:1e1\n")
    assert logistic.find(tmp_path, ("madelon",)) == path
    problem = logistic.read(path, (2, 3))
    assert problem.features_Nd.tolist() == [[2.0, 0.0, -0.5], [0.0, 10.0, 0.0]]
    assert problem.labels_N.tolist() == [1.0, -1.0]
    assert not problem.generated


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("madelon", b"what is this", "not a LIBSVM file"),
        ("madelon", b"", "must hold 2 x 3"),
        ("madelon", b"+1 1:2\n", "must hold 2 x 3"),
        ("madelon", b"+1 1:2 9:1\n-1 1:1\n", "not a LIBSVM file"),
        ("madelon", b"+1 1:nan\n-1 1:1\n", "must hold 2 x 3 finite numbers"),
        ("madelon", b"1 1:2\n3 1:1\n", "labels other than"),
        ("madelon.libsvm.xz", b"not xz", "cannot read"),
        ("madelon.libsvm.xz", lzma.compress(b"+1 1:2\n-1 1:1\n")[:-9], "cannot read"),
    ],
)
def test_a_bad_file_is_named_in_one_line(tmp_path, name, content, said):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(LabError, match=said) as error:
        logistic.read(path, (2, 3))
    assert str(path) in str(error.value)


def test_missing_madelon_says_what_to_do(tmp_path):
    with pytest.raises(LabError, match="give --data-dir or set GRADSIEVE_DATA"):
        logistic.madelon(None)
    with pytest.raises(LabError, match=f"none in {tmp_path}"):
        logistic.madelon(tmp_path)
