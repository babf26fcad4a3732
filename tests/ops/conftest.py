"""``fast``: each fast module of ops, with the device it works on. A new one is a line in ``FAST``."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import pytest
import torch

from gradsieve.ops import native


@dataclass(frozen=True)
class Fast:
    """A module of ops, where it runs, and what must hold while it does."""

    name: str
    module: str
    device: str
    usable: Callable[[], bool]
    within: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def ops(self) -> ModuleType:
        return import_module(self.module)


def _has(level: int) -> bool:
    return native.available() and native.vectors() >= level


@contextmanager
def _vectors(level: int) -> Iterator[None]:
    assert native.vectors(level) == level
    try:
        yield
    finally:
        native.vectors()


@contextmanager
def _three_threads() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "_threads", lambda coordinates: 3)
        yield


FAST = [
    Fast("native", "gradsieve.ops.native", "cpu", native.available),
    Fast("native-portable", "gradsieve.ops.native", "cpu", native.available, lambda: _vectors(native.PORTABLE)),
    Fast("native-avx2", "gradsieve.ops.native", "cpu", lambda: _has(native.AVX512), lambda: _vectors(native.AVX2)),
    Fast("native-threads", "gradsieve.ops.native", "cpu", native.available, _three_threads),
    Fast("triton", "gradsieve.ops.triton", "cuda", lambda: torch.cuda.is_available()),
]


@pytest.fixture(params=FAST, ids=lambda fast: fast.name)
def fast(request: pytest.FixtureRequest) -> Iterator[Fast]:
    chosen: Fast = request.param
    if not chosen.usable():
        pytest.skip(f"{chosen.name} cannot run here")
    with chosen.within():
        yield chosen
