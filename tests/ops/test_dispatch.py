"""Which module of ops works on a tensor, and what is said where it is not the fast one."""

import sys
import warnings

import pytest

from gradsieve import ops
from gradsieve.ops import reference


@pytest.mark.parametrize(("installed", "fast"), [("3.2.0", False), ("3.3.0", True), ("3.10.1+git", True), ("?", False)])
def test_gpus_need_a_triton_that_knows_their_launches(installed, fast, monkeypatch):
    monkeypatch.setattr(ops, "triton_version", lambda: installed)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        module = ops._fastest.__wrapped__("cuda")
    assert (module is not reference) == fast
    assert ["torch 2.7" in str(warning.message) for warning in said] == ([] if fast else [True])


def test_without_triton_gpus_work_all_the_same(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.warns(UserWarning, match="Triton 3.3"):
        assert ops._fastest.__wrapped__("cuda") is reference
