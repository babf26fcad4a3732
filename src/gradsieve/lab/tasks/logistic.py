"""L2-regularised logistic regression in float64: the convex problem of Sahu et al. 2021, section C.3.

f(x) = mean_i log(1 + exp(-y_i a_i x)) + l2/2 |x|^2, L = lambda_max(A'A) / 4N, l2 = L / 10,000, step size 1 / (L + l2).
N examples, d coordinates, M points at once.
"""

import io
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize  # type: ignore[import-untyped]
from scipy.sparse.linalg import svds  # type: ignore[import-untyped]
from sklearn.datasets import load_svmlight_file
from torch import Tensor
from torch.nn import functional

from gradsieve.lab.errors import LabError
from gradsieve.lab.tasks.sources import content, first

_FORMS = "", ".txt", ".libsvm", ".svm"
_SMALL = 1000  # columns, up to which d x d matrices are cheap


@dataclass(frozen=True, eq=False)
class Logistic:
    """A data set and its loss; ``generated`` says that the data are not the originals."""

    name: str
    features_Nd: Tensor
    labels_N: Tensor  # -1 or +1
    generated: bool = False

    @property
    def size(self) -> int:
        return self.features_Nd.shape[1]

    @cached_property
    def smoothness(self) -> float:
        """L without the l2 term: lambda_max(A'A) / 4N.

        >>> Logistic("toy", torch.tensor([[2.0, 0.0], [0.0, 1.0]]).double(), torch.tensor([1.0, -1.0])).smoothness
        0.5
        """
        features = self.features_Nd.numpy()
        if self.size <= _SMALL:
            largest = np.linalg.norm(features, 2)
        else:  # a fixed start: svds would draw one, and with it the last digits
            (largest,) = svds(features, k=1, v0=np.ones(min(features.shape)), return_singular_vectors=False)
        return float(largest**2 / (4 * len(features)))

    @property
    def l2(self) -> float:
        return self.smoothness / 10_000

    @property
    def lr(self) -> float:
        return 1 / (self.smoothness + self.l2)

    @cached_property
    def signed_Nd(self) -> Tensor:
        """y_i a_i: all that the loss sees of the data."""
        return self.features_Nd * self.labels_N[:, None]

    def value(self, x_Md: Tensor) -> Tensor:
        """f at each row."""
        margin_MN = x_Md @ self.signed_Nd.T
        return functional.softplus(-margin_MN).mean(-1) + self.l2 / 2 * x_Md.square().sum(-1)

    def gradient(self, x_d: Tensor) -> Tensor:
        return self.l2 * x_d - self.signed_Nd.T @ torch.sigmoid(-(self.signed_Nd @ x_d)) / len(self.labels_N)

    def hessian(self, x_d: Tensor) -> Tensor:
        slope_N = torch.sigmoid(self.signed_Nd @ x_d)
        curved_Nd = self.features_Nd * (slope_N * (1 - slope_N) / len(self.labels_N))[:, None]
        return self.features_Nd.T @ curved_Nd + self.l2 * torch.eye(self.size, dtype=x_d.dtype)

    def lbfgs(self, start: float = 0.0, tolerance: float = 1e-30) -> Tensor:
        """The minimiser as L-BFGS leaves it, from a point whose coordinates are all ``start``."""

        def loss(x: Any) -> tuple[float, Any]:
            x_d = torch.from_numpy(np.array(x))
            return self.value(x_d[None]).item(), self.gradient(x_d).numpy()

        found = minimize(
            loss,
            np.full(self.size, start),
            jac=True,
            method="L-BFGS-B",
            tol=tolerance,
            options={"maxiter": 10_000, "maxfun": 100_000},
        )
        return torch.from_numpy(np.array(found.x))

    @cached_property
    def minimiser(self) -> Tensor:
        """x*: by L-BFGS, then Newton's method where a Hessian is affordable, since a run may end 1e-12 above f*."""
        x_d = self.lbfgs()
        for _ in range(3 if self.size <= _SMALL else 0):
            x_d = x_d - torch.linalg.solve(self.hessian(x_d), self.gradient(x_d))
        return x_d

    @cached_property
    def minimum(self) -> float:
        return self.value(self.minimiser[None]).item()


def find(data_dir: Path | None, stems: tuple[str, ...]) -> Path | None:
    """The first file of ``data_dir`` with one of these names, plain or packed."""
    return None if data_dir is None else first(data_dir, [stem + form for stem in stems for form in _FORMS])


def read(path: Path, shape: tuple[int, int]) -> Logistic:
    """A LIBSVM file, plain or packed, that must have this shape and two labels."""
    try:
        features, labels = load_svmlight_file(io.BytesIO(content(path)), n_features=shape[1])
    except (ValueError, UnicodeDecodeError) as error:
        raise LabError(f"{path} is not a LIBSVM file: {error}") from error
    if features.shape != shape or not np.isfinite(features.data).all():
        held, wanted = (" x ".join(map(str, sizes)) for sizes in (features.shape, shape))
        raise LabError(f"{path} must hold {wanted} finite numbers; it is {held}")
    if set(np.unique(labels)) != {-1.0, 1.0}:
        raise LabError(f"{path} has labels other than -1 and +1")
    return Logistic(path.name, torch.from_numpy(features.toarray()), torch.from_numpy(labels))


@lru_cache(maxsize=1)
def madelon(data_dir: Path | None) -> Logistic:
    """madelon, 2,000 x 500, from its LIBSVM file; kept, since three figures ask for it and its minimiser."""
    return read(madelon_path(data_dir), (2000, 500))


def madelon_path(data_dir: Path | None) -> Path:
    path = find(data_dir, ("madelon",))
    if path is None:
        where = "give --data-dir or set GRADSIEVE_DATA" if data_dir is None else f"none in {data_dir}"
        raise LabError(f"madelon needs its LIBSVM file, madelon or madelon.libsvm.xz: {where}")
    return path


def gisette(data_dir: Path | None, shape: tuple[int, int] = (6000, 5000)) -> Logistic:
    """gisette_scale from its LIBSVM file, or a generated set of ``shape`` where there is none."""
    path = find(data_dir, ("gisette_scale", "gisette"))
    return like_gisette(shape) if path is None else read(path, (6000, 5000))


def like_gisette(shape: tuple[int, int] = (6000, 5000), seed: int = 0) -> Logistic:
    """A generated stand-in for gisette: drawings of two digits in half of the columns, those shuffled in the other.

    As in gisette a column is mostly -1 (no ink), half of the columns are probes that know nothing of the label, and the
    mean drawing carries most of lambda_max. The numbers below bring L, the mean squared row and f* near gisette's.
    """
    examples, columns = shape
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, dtype=torch.float64)

    drawn = columns - columns // 2
    labels_N = torch.arange(examples, dtype=torch.float64) % 2 * 2 - 1
    shape_Nf = normal(examples, 40)
    shape_Nf[:, 0] = 1.7 * labels_N + 0.7 * normal(examples)  # which digit it is, and how well it was written
    ink_Nd = shape_Nf @ normal(40, drawn) / 40**0.5 + normal(examples, drawn)
    ink_Nd -= ink_Nd.kthvalue(math.ceil(0.87 * examples), dim=0).values  # 13% of a column is inked
    values_Nd = torch.where(ink_Nd > 0, (2 * ink_Nd).tanh() * 1.9 - 0.9, -1.0)
    shuffled_dN = torch.rand(columns // 2, examples, generator=generator).argsort(1)
    probes_Nd = values_Nd.T[: columns // 2].gather(1, shuffled_dN).T
    return Logistic("generated like gisette", torch.cat([values_Nd, probes_Nd], dim=1), labels_N, generated=True)
