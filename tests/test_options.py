"""Bad arguments: an error before anything runs, which names the argument and what it takes."""

import math
import re

import pytest
import torch

import gradsieve as gs
from gradsieve.feedback import Feedback, feedback_of


def simulator(params=10, rule=None, **options):
    return gs.Simulator(params, rule or gs.TopK(0.5), **{"workers": 2, **options})


def step(grads=None, lr=None, **options):
    return simulator(**options).step(torch.ones(2, 10) if grads is None else grads, lr=lr)


BAD = [
    ("density", lambda: gs.TopK(0)),
    ("density", lambda: gs.TopK(-1)),
    ("density", lambda: gs.TopK(2)),
    ("density", lambda: gs.TopK(math.nan)),
    ("density", lambda: gs.TopK("x")),
    ("density", lambda: gs.TopK(None)),
    ("density", lambda: gs.TopK(True)),
    ("density", lambda: gs.RandomK(math.inf)),
    ("density", lambda: gs.BlockRandomK(-0.0)),
    ("density", lambda: gs.GaussianK(1.0001)),
    ("density", lambda: gs.SampledTopK([0.1])),
    ("sample", lambda: gs.SampledTopK(0.1, sample=0)),
    ("sample", lambda: gs.SampledTopK(0.1, sample=1.5)),
    ("seed", lambda: gs.RandomK(0.1, seed=-1)),
    ("seed", lambda: gs.RandomK(0.1, seed=1.5)),
    ("seed", lambda: gs.BlockRandomK(0.1, seed=True)),
    ("threshold", lambda: gs.HardThreshold(-1)),
    ("threshold", lambda: gs.HardThreshold(math.nan)),
    ("threshold", lambda: gs.HardThreshold("0.1")),
    ("threshold", lambda: gs.HardThreshold(1j)),
    ("low", lambda: gs.Accordion(0, 0.1)),
    ("low", lambda: gs.Accordion(0.2, 0.1)),
    ("high", lambda: gs.Accordion(0.1, 1.1)),
    ("interval", lambda: gs.Accordion(0.1, 0.2, interval=0)),
    ("interval", lambda: gs.Accordion(0.1, 0.2, interval=2.0)),
    ("change", lambda: gs.Accordion(0.1, 0.2, change=-0.5)),
    ("beta", lambda: gs.Momentum(beta=1.1)),
    ("beta", lambda: gs.Momentum(beta="0.9")),
    ("clip", lambda: gs.Momentum(clip=-1)),
    ("warmup", lambda: gs.Momentum(warmup=-1)),
    ("nesterov", lambda: gs.Momentum(nesterov="no")),
    ("masking", lambda: gs.Momentum(masking=1)),
    ("warmup", lambda: simulator(rule=gs.HardThreshold(1), feedback=gs.Momentum(warmup=5))),
    ("compressor", lambda: simulator(rule="topk:0.1")),
    ("compressor", lambda: simulator(rule=gs.TopK)),
    ("compressor", lambda: simulator(rule=0.1)),
    ("scope", lambda: simulator(scope="tensor")),
    ("scope", lambda: simulator(scope=None)),
    ("feedback", lambda: simulator(feedback="error")),
    ("feedback", lambda: simulator(feedback=True)),
    ("feedback", lambda: simulator(feedback=[])),
    ("exchange", lambda: simulator(exchange="ring")),
    ("exchange", lambda: simulator(exchange=None)),
    ("exchange", lambda: simulator(exchange="allreduce")),
    ("exchange", lambda: simulator(rule=gs.RandomK(0.5), exchange="allreduce", values="bfloat16")),
    ("values", lambda: simulator(values="float64")),
    ("values", lambda: simulator(values=torch.float32)),
    ("values", lambda: simulator(values=[])),
    ("strict", lambda: simulator(strict="yes")),
    ("workers", lambda: simulator(workers=0)),
    ("workers", lambda: simulator(workers=2.0)),
    ("workers", lambda: simulator(workers=True)),
    ("params", lambda: simulator(params=-1)),
    ("params", lambda: simulator(params=True)),
    ("params", lambda: simulator(params=[1, 2])),
    ("grads_Wn", lambda: step(torch.ones(3, 10))),
    ("grads_Wn", lambda: step(torch.ones(2, 11))),
    ("grads_Wn", lambda: step(torch.ones(20))),
    ("grads_Wn", lambda: step(torch.ones(2, 10, dtype=torch.int64))),
    ("grads_Wn", lambda: step([[1.0] * 10] * 2)),
    ("lr", lambda: step(feedback="update")),
    ("lr", lambda: step(feedback="update", lr=0.0)),
    ("lr", lambda: step(feedback="update", lr=-0.1)),
    ("lr", lambda: step(feedback="update", lr=math.nan)),
    ("lr", lambda: step(feedback="update", lr=math.inf)),
    ("lr", lambda: step(feedback="update", lr="0.1")),
]


@pytest.mark.parametrize(("argument", "call"), BAD, ids=[f"{i}-{name}" for i, (name, _) in enumerate(BAD)])
def test_bad_arguments_are_named(argument, call):
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    assert re.search(rf"\b{argument}\b.*\b(takes|lowers|adds)\b", str(caught.value)), caught.value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("topk", "lacks a value; it is topk:DENSITY"),
        ("topk:", "lacks a value"),
        ("topk:much", "density takes a number, not 'much'"),
        ("topk:0.1,0.2", "a value too many or a wrong name: '0.2'"),
        ("topk:k=3", "a value too many or a wrong name: 'k=3'"),
        ("topk:0.1,density=0.1", "a value too many or a wrong name"),
        ("topk:2", "density takes a number above 0 and up to 1, not 2.0"),
        ("topk:nan", "density takes"),
        ("dense:1", "a value too many"),
        ("randomk:0.1,seed=1.5", "seed takes a whole number, not '1.5'"),
        ("accordion:0.1", "lacks a value; it is accordion:LOW,HIGH,INTERVAL,CHANGE"),
        ("best:0.1", "is not known; rules are dense, threshold:THRESHOLD, topk:DENSITY"),
        ("", "is not known"),
        ("TopK:0.1", "is not known"),
    ],
)
def test_bad_texts_say_what_is_wrong(text, says):
    with pytest.raises(ValueError, match=re.escape(says)) as caught:
        gs.parse(text)
    assert repr(text) in str(caught.value)


def test_a_text_must_be_a_text():
    with pytest.raises(TypeError, match=r"not 0\.1"):
        gs.parse(0.1)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("dense", gs.Dense()),
        (" topk: 0.001 ", gs.TopK(0.001)),
        ("threshold:inf", gs.HardThreshold(math.inf)),
        ("randomk:seed=7,density=0.1", gs.RandomK(0.1, seed=7)),
        ("sampledtopk:0.1,0.5", gs.SampledTopK(0.1, sample=0.5)),
        ("accordion:0.1,0.2,change=0.3", gs.Accordion(0.1, 0.2, change=0.3)),
    ],
)
def test_texts_make_rules_that_are_equal_by_value(text, rule):
    assert gs.parse(text) == rule
    assert hash(gs.parse(text)) == hash(rule)


def test_feedback_by_name_or_by_value():
    assert feedback_of("momentum") == gs.Momentum()
    assert feedback_of(gs.Momentum(beta=0.5)).beta == 0.5
    assert feedback_of("none") == Feedback("none")


def test_a_rate_of_zero_is_fine_where_the_memory_does_not_follow_it():
    sim = simulator()
    sim.step(torch.ones(2, 10), lr=0.1)
    sim.step(torch.ones(2, 10), lr=0.0)
    assert sim.step(torch.ones(2, 10), lr=0.1).isfinite().all()
