"""Where parameters lie, and which stretches a rule sees."""

import pytest
import torch
from torch import nn

from gradsieve.layout import Layout, check_scope, layout_of

ABC = Layout(("a", "b", "c"), (6, 0, 2))


def test_a_module_gives_its_trainable_parameters_by_name():
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1, bias=False))
    model[0].bias.requires_grad_(False)
    assert layout_of(model) == Layout(("0.weight", "1.weight"), (6, 2))


def test_tied_parameters_are_there_once():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    assert layout_of(model).names == ("0.weight",)


def test_tensors_and_counts():
    assert layout_of([torch.zeros(2, 3), torch.tensor(1.0), torch.zeros(0)]) == Layout(("0", "1", "2"), (6, 1, 0))
    assert layout_of(5) == Layout(("0",), (5,))
    assert layout_of([]).size == 0


@pytest.mark.parametrize(("scope", "bounds"), [("layer", (0, 6, 6, 8)), ("bucket", (0, 8)), ("global", (0, 8))])
def test_segments_cover_everything_once(scope, bounds):
    segments = ABC.segments(scope)
    assert segments.bounds == bounds
    assert segments.size == ABC.size == sum(segments.sizes)
    assert len(segments.keys) == len(segments.sizes)
    tensor = segments.tensor(torch.device("cpu"))
    assert tensor.tolist() == list(bounds)
    assert segments.tensor(torch.device("cpu")) is tensor


def test_a_layers_key_is_its_name_wherever_it_lies():
    other = Layout(("x", "a"), (9, 6))
    assert other.segments("layer").keys[1] == ABC.segments("layer").keys[0]
    assert len(set(ABC.segments("layer").keys)) == 3


def test_a_bucket_closes_once_it_is_full():
    layout = Layout(tuple("abcde"), (10, 10, 1, 30, 2))
    assert layout.buckets(80) == [range(0, 2), range(2, 4), range(4, 5)]
    assert layout.buckets(10**9) == [range(0, 5)]
    assert layout.buckets(172) == [range(0, 4), range(4, 5)]
    assert layout.buckets(1) == [range(i, i + 1) for i in range(5)]
    assert Layout((), ()).buckets(1) == [range(0, 0)]


@pytest.mark.parametrize(
    "other",
    [Layout(("a", "c", "b"), (6, 0, 2)), Layout(("a", "b", "c"), (6, 1, 1)), Layout(("a", "b"), (6, 0))],
    ids=["names", "sizes", "fewer"],
)
def test_fingerprints_tell_layouts_apart(other):
    assert other.fingerprint != ABC.fingerprint
    assert Layout(ABC.names, ABC.sizes).fingerprint == ABC.fingerprint
    assert 0 <= ABC.fingerprint < 2**31


def test_an_unknown_scope_names_the_known():
    with pytest.raises(ValueError, match="scope takes one of layer, bucket, global, not 'tensor'"):
        check_scope("tensor")
