"""Tasks: reproducible, dealt fairly to workers, with gradients that are autograd's."""

import pytest
import torch
from torch import nn

from gradsieve.lab import tasks
from gradsieve.lab.errors import LabError
from gradsieve.lab.tasks.base import Recipe, vectorisable


def test_unknown_task_lists_what_is_accepted():
    with pytest.raises(LabError, match="unknown task 'nope'; accepted: cifar, cifar-wide, digits, digits-wide"):
        tasks.get("nope")


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


def test_schedule_warms_up_and_decays():
    recipe = Recipe(lr=1.0, batch_size=1, warmup=0.1, decay_at=(0.5, 0.8))
    rates = [recipe.lr_at(progress) for progress in (0.0, 0.05, 0.1, 0.49, 0.5, 0.8)]
    assert rates == pytest.approx([0.1, 0.55, 1.0, 1.0, 0.1, 0.01])


def test_evaluation_of_a_perfect_and_of_a_fresh_model(blobs):
    class Oracle(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return 100.0 * torch.nn.functional.one_hot(blobs.test_labels, 3).float()

    assert blobs.evaluate(Oracle()).accuracy == 1.0
    assert blobs.evaluate(blobs.model(0)).accuracy < 0.9
