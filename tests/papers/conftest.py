"""What the paper tests share: a small convex problem, madelon where its file is, and a way to run an entry."""

import os
from pathlib import Path

import pytest
import torch

from gradsieve.lab.tasks.logistic import Logistic, madelon


@pytest.fixture(scope="session")
def data_dir() -> Path:
    given = os.environ.get("GRADSIEVE_DATA")
    if not given or not Path(given).is_dir():
        pytest.skip("GRADSIEVE_DATA names no directory with the papers' data")
    return Path(given)


@pytest.fixture(scope="session")
def madelon_problem(data_dir: Path) -> Logistic:
    return madelon(data_dir)


@pytest.fixture(scope="session")
def small() -> Logistic:
    """120 examples of 30 coordinates on very different scales, so that rules have something to choose."""
    generator = torch.Generator().manual_seed(3)
    features_Nd = torch.randn(120, 30, generator=generator, dtype=torch.float64) * torch.logspace(0, 2, 30)
    return Logistic("small", features_Nd.double(), torch.arange(120).double() % 2 * 2 - 1)
