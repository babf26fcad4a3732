"""What all tests share: one thread, a seeded generator, every module of ops, and memory that is never zero by luck."""

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from hypothesis import settings

from gradsieve import ops
from gradsieve.ops import reference

torch.set_num_threads(1)
settings.register_profile("gradsieve", deadline=None, derandomize=True, max_examples=60, database=None)
settings.load_profile("gradsieve")


def _modules() -> list[ModuleType]:
    """``reference``, and ``native`` as soon as it is there and compiled."""
    try:
        native = importlib.import_module("gradsieve.ops.native")
    except ModuleNotFoundError:
        return [reference]
    return [reference, native] if native.available() else [reference]


@pytest.fixture(scope="module", params=_modules(), ids=lambda module: module.__name__.rpartition(".")[2])
def any_ops(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    """Run the test once with each module of ops that works on this machine."""
    with ops.using(request.param):
        yield request.param


@pytest.fixture
def generator() -> torch.Generator:
    """A generator of one's own; the global one belongs to the user."""
    return torch.Generator().manual_seed(20)


@pytest.fixture(scope="module")
def poison() -> Iterator[None]:
    """Fill new empty tensors with NaN (floats) or a large number, so that reading before writing shows."""

    def poisoned(make):
        def empty(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if tensor.device.type == "meta" or not tensor.numel():
                return tensor
            with torch.no_grad():
                if tensor.is_floating_point():
                    return tensor.fill_(torch.nan)
                return tensor.fill_(1 if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max)

        return empty

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (torch.Tensor, "new_empty"),
        ):
            patch.setattr(owner, name, poisoned(getattr(owner, name)))
        yield
