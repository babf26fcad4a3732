"""Tasks: reproducible, dealt fairly to workers, with gradients that are autograd's."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from gradsieve.lab import tasks
from gradsieve.lab.errors import LabError
from gradsieve.lab.runner import optimizer_of
from gradsieve.lab.tasks.base import Recipe, on_device, vectorisable
from gradsieve.lab.tasks.flat import shaped
from gradsieve.lab.tasks.nets import googlenet, resnet18, senet18
from gradsieve.lab.tasks.replay import Replay


def test_unknown_task_lists_what_is_accepted():
    with pytest.raises(LabError, match=f"unknown task 'nope'; accepted: {', '.join(tasks.names())}"):
        tasks.get("nope")
    assert {"cifar", "cifar-resnet18", "digits", "digits-wide"} <= set(tasks.names())


def test_digits_are_all_there_and_standardised(digits):
    assert len(digits.train_labels) + len(digits.test_labels) == 1797
    assert abs(digits.train_inputs.mean().item()) < 1e-5
    assert abs(digits.train_inputs.std().item() - 1.0) < 1e-3


def test_model_depends_on_its_seed_alone(digits):
    state = torch.get_rng_state()
    first, again, other = digits.model(0), digits.model(0), digits.model(1)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(next(first.parameters()), next(other.parameters()))


def test_an_epoch_deals_every_example_once(digits):
    batches = list(digits.batches(0, workers=3, batch_size=7, seed=0))
    assert len(batches) == digits.steps_per_epoch(3, 7) == 1347 // 21
    seen = torch.cat([batch.inputs_WB.flatten(0, 1) for batch in batches])
    assert len(seen.unique(dim=0)) >= 0.99 * len(seen)  # a few of the images are equal
    assert batches[0].inputs_WB.shape == (3, 7, 64)


def test_epochs_and_seeds_shuffle_differently(digits):
    def first(epoch: int, seed: int) -> torch.Tensor:
        return next(digits.batches(epoch, workers=2, batch_size=8, seed=seed)).labels_WB

    assert torch.equal(first(0, 0), first(0, 0))
    assert not torch.equal(first(0, 0), first(1, 0))
    assert not torch.equal(first(0, 0), first(0, 1))


def test_more_examples_a_step_than_there_are_is_refused(digits):
    with pytest.raises(LabError, match="use fewer workers or a smaller --batch-size"):
        digits.steps_per_epoch(1000, 1000)


@pytest.mark.parametrize("workers", [1, 3])
def test_gradients_of_all_workers_are_those_of_autograd(digits, workers):
    model = digits.model(0)
    batch = next(digits.batches(0, workers=workers, batch_size=5, seed=0))
    losses_W, grads_Wn = digits.batch_gradients(model, batch)
    assert grads_Wn.dtype == torch.float32
    for worker in range(workers):
        model.zero_grad()
        loss = nn.functional.cross_entropy(
            model(batch.inputs_WB[worker]), batch.labels_WB[worker], label_smoothing=digits.recipe.smoothing
        )
        loss.backward()
        expected_n = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        torch.testing.assert_close(grads_Wn[worker], expected_n, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(losses_W[worker], loss.detach(), rtol=1e-5, atol=1e-6)


def test_only_models_that_vmap_takes_are_vectorised():
    assert vectorisable(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    for layer in (nn.Dropout(), nn.BatchNorm1d(2), nn.Conv2d(1, 1, 1), nn.LSTM(2, 2)):
        assert not vectorisable(nn.Sequential(nn.Linear(2, 2), layer))


class InTurn(Replay):
    """What a graph captures, run as it is."""

    def _captured(self):
        return self._all_workers

    def _side_by_side(self):
        for worker in range(len(self._labels_WB)):
            self._worker(worker)


@pytest.mark.parametrize(
    ("build", "parameters", "tensors"),
    [(resnet18, 11_173_962, 62), (senet18, 11_261_378, 90), (googlenet, 6_166_250, 258)],
)
def test_networks_have_their_published_sizes(build, parameters, tensors):
    net = build()
    assert sum(parameter.numel() for parameter in net.parameters()) == parameters
    assert len(list(net.parameters())) == tensors
    assert net(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert build(classes=100)(torch.randn(2, 3, 32, 32)).shape == (2, 100)


@pytest.mark.parametrize("build", [resnet18, senet18, googlenet])
def test_larger_kernels_do_not_make_larger_logits(build):
    """What keeps a training from running away: a norm stands between every kernel and the last layer."""
    torch.manual_seed(0)
    model, images = build(), torch.randn(8, 3, 32, 32)
    before = float(model(images).detach().std())
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Conv2d):
                module.weight *= 10
    assert float(model(images).detach().std()) == pytest.approx(before, rel=0.5)


@pytest.mark.parametrize("build", [resnet18, senet18, googlenet])
def test_a_replay_computes_what_autocast_does(build):
    """Bit for bit: the same casts, each worker's batch on its own, running statistics in rank order."""
    torch.manual_seed(0)
    model = build().to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    inputs_WB, labels_WB = torch.randn(2, 4, 3, 8, 8), torch.randint(0, 10, (2, 4))
    losses_W, grads_Wn = InTurn(model, (inputs_WB, labels_WB), smoothing=0.1, narrow=True)((inputs_WB, labels_WB))
    weights = list(plain.parameters())
    for worker in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            logits = plain(inputs_WB[worker])
        loss = nn.functional.cross_entropy(logits.float(), labels_WB[worker], label_smoothing=0.1)
        assert torch.equal(losses_W[worker], loss)
        gradients = torch.autograd.grad(loss, weights)
        for mine, gradient in zip(shaped(grads_Wn[worker], weights), gradients, strict=True):
            assert torch.equal(mine, gradient)
    for (name, mine), its in zip(model.named_buffers(), plain.buffers(), strict=True):
        if "num_batches" not in name:
            torch.testing.assert_close(mine, its)


def test_batch_norms_are_spared_from_weight_decay_where_the_recipe_says():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2))
    recipe = Recipe(lr=0.1, batch_size=1, weight_decay=0.5)
    (group,) = optimizer_of(net, recipe).param_groups
    assert group["params"] == list(net.parameters())
    decayed, spared = optimizer_of(net, replace(recipe, decay_norms=False)).param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.5, 0.0)
    assert spared["params"] == list(net[1].parameters())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(digits):
    with pytest.raises(LabError, match="finds no GPU"):
        on_device(digits, "cuda")
    assert on_device(digits, "cpu") is digits


def test_schedule_warms_up_and_decays():
    recipe = Recipe(lr=1.0, batch_size=1, warmup=0.1, decay_at=(0.5, 0.8))
    rates = [recipe.lr_at(progress) for progress in (0.0, 0.05, 0.1, 0.49, 0.5, 0.8)]
    assert rates == pytest.approx([0.1, 0.55, 1.0, 1.0, 0.1, 0.01])
    paper = Recipe(lr=1.6, batch_size=1, warmup_epochs=5, start=1 / 16, decay_at=(150 / 300, 250 / 300)).fitted(300)
    rates = [paper.lr_at(epoch / 300) for epoch in (0, 2.5, 5, 149, 150, 250)]
    assert rates == pytest.approx([0.1, 0.85, 1.6, 1.6, 0.16, 0.016])


def test_evaluation_of_a_perfect_and_of_a_fresh_model(blobs):
    class Oracle(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return 100.0 * torch.nn.functional.one_hot(blobs.test_labels, 3).float()

    assert blobs.evaluate(Oracle()).accuracy == 1.0
    assert blobs.evaluate(blobs.model(0)).accuracy < 0.9
