"""Virtual workers on a GPU: a CUDA graph computes what plain autograd does, and nothing waits for the device."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

import gradsieve as gs
from gradsieve.lab.records import EpochRow, StepRow
from gradsieve.lab.runner import Options, train, virtual
from gradsieve.lab.tasks import cifar
from gradsieve.lab.tasks.base import Classification, Recipe
from gradsieve.lab.tasks.flat import shaped
from gradsieve.lab.tasks.nets import googlenet, resnet18, senet18
from gradsieve.lab.tasks.replay import _fast_and_repeatable

if not torch.cuda.is_available():
    pytest.skip("needs CUDA", allow_module_level=True)

from gradsieve.lab.tasks.pooling import max_pool

DEVICE = torch.device("cuda")
NETS = {"resnet18": resnet18, "senet18": senet18, "googlenet": googlenet}


@pytest.fixture(autouse=True)
def exact_float32():
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def pictures(build=resnet18, bfloat16=True, count=512) -> Classification:
    """Noise with a brightness that tells the class."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 10
    noise = torch.randint(0, 100, (count, 3, 32, 32), generator=generator)
    images = (noise + 15 * labels.view(-1, 1, 1, 1)).to(torch.uint8)
    return Classification(
        name="pictures",
        description="noise",
        recipe=Recipe(lr=0.002, batch_size=32, nesterov=True, weight_decay=1e-4, decay_norms=False),
        build=build,
        train_inputs=images,
        train_labels=labels,
        test_inputs=images[:100],
        test_labels=labels[:100],
        prepare=cifar._normalise,
        augment=cifar._shift_and_mirror,
        bfloat16=bfloat16,
    ).to(DEVICE)


def difference(a, b):
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.parametrize("net", NETS)
def test_a_replay_is_the_plain_path(net):
    """In float32 and with the same algorithms of cuDNN, to the last digits."""
    task = pictures(NETS[net], bfloat16=False)
    replayed, plain = task.model(0), task.model(0)
    first, second = [next(task.batches(epoch, workers=3, batch_size=32, seed=0)) for epoch in (0, 1)]
    replay = task.gradients(replayed, first)
    for batch in (second, first):
        losses_W, grads_Wn = replay(batch)
        with _fast_and_repeatable():
            plain_losses_W, plain_grads_Wn = task.batch_gradients(plain, batch)
        torch.testing.assert_close(losses_W, plain_losses_W)
        for mine_n, its_n in zip(grads_Wn, plain_grads_Wn, strict=True):
            assert difference(mine_n, its_n) < 1e-3
    for (name, mine), its in zip(replayed.named_buffers(), plain.buffers(), strict=True):
        if "num_batches" not in name:
            torch.testing.assert_close(mine, its)


@pytest.mark.parametrize(("net", "compiled"), [(net, compiled) for net in NETS for compiled in (False, True)])
def test_in_bfloat16_a_replay_is_as_exact_as_the_plain_path(net, compiled):
    """Not closer to it than both are to float32: in deep networks a bit more or less moves a gradient by a tenth."""
    task = pictures(NETS[net])
    batch = next(task.batches(0, workers=3, batch_size=32, seed=0))
    exact_losses_W, exact_grads_Wn = replace(task, bfloat16=False).batch_gradients(task.model(0), batch)
    _, plain_grads_Wn = task.batch_gradients(task.model(0), batch)
    losses_W, grads_Wn = task.gradients(task.model(0), batch, compiled=compiled)(batch)
    torch.testing.assert_close(losses_W, exact_losses_W, rtol=2e-2, atol=0)
    for mine_n, plain_n, exact_n in zip(grads_Wn, plain_grads_Wn, exact_grads_Wn, strict=True):
        assert difference(mine_n, exact_n) < 1.5 * difference(plain_n, exact_n)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("shape", [(2, 5, 7, 6), (3, 192, 32, 32), (2, 480, 16, 16), (1, 70, 8, 8)])
def test_max_pooling_is_that_of_pytorch(shape, stride, dtype):
    image = torch.randn(shape, device=DEVICE).relu().to(dtype).contiguous(memory_format=torch.channels_last)
    mine, its = image.clone().requires_grad_(), image.clone().requires_grad_()
    out, expected = max_pool(mine, stride), functional.max_pool2d(its, 3, stride, padding=1)
    assert torch.equal(out, expected)
    gradient = torch.randn_like(expected)
    out.backward(gradient)
    expected.backward(gradient)
    torch.testing.assert_close(mine.grad, its.grad)


def test_rows_hold_each_parameter_as_it_lies_in_memory():
    task = pictures(bfloat16=True)
    model = task.model(0)
    weights = list(model.parameters())
    assert any(weight.dim() == 4 and not weight.is_contiguous() for weight in weights)
    batch = next(task.batches(0, workers=2, batch_size=32, seed=0))
    _, grads_Wn = task.gradients(model, batch)(batch)
    with torch.autocast("cuda", torch.bfloat16):
        loss = functional.cross_entropy(model(batch.inputs_WB[1]), batch.labels_WB[1])
    for mine, gradient in zip(shaped(grads_Wn[1], weights), torch.autograd.grad(loss, weights), strict=True):
        assert functional.cosine_similarity(mine.flatten(), gradient.flatten(), dim=0) > 0.8


@pytest.mark.parametrize("rule", [gs.Dense(), gs.HardThreshold(0.005), gs.TopK(0.01)])
def test_training_is_the_plain_path(rule, monkeypatch):
    def losses():
        options = Options(workers=2, epochs=1, device="cuda")
        return [training.loss for training in train(pictures(bfloat16=False), rule, options)]

    replayed = losses()
    monkeypatch.setattr(
        Classification, "gradients", lambda self, model, batch, compiled: lambda b: self.batch_gradients(model, b)
    )
    assert replayed == pytest.approx(losses(), rel=2e-2)
    assert len(replayed) == 8


def test_a_seed_gives_the_same_bits_again():
    def losses():
        options = Options(workers=3, epochs=1, strict=False, device="cuda")
        return [training.loss for training in train(pictures(), gs.HardThreshold(0.005), options)]

    assert losses() == losses()


def test_the_host_waits_for_no_step():
    trainings = train(pictures(), gs.HardThreshold(0.005), Options(workers=2, epochs=1, strict=False, device="cuda"))
    for _ in range(4):
        next(trainings)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            next(trainings)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_rows_of_a_gpu_tell_every_step():
    options = Options(workers=2, epochs=2, strict=False, device="cuda")
    rows = list(virtual(replace(pictures(), name="rows"), gs.HardThreshold(0.005), options, "a run"))
    steps = [row for row in rows if isinstance(row, StepRow)]
    epochs = [row for row in rows if isinstance(row, EpochRow)]
    assert len(steps) == 16
    assert all(row.density > 0 and row.error > 0 for row in steps)
    assert epochs[-1].bytes == pytest.approx(sum(row.bytes for row in steps))
    assert epochs[-1].test_loss == epochs[-1].test_loss
    assert set(rows[-1].phases) == {"gradients", "exchange", "update"}
    assert all(seconds > 0 for seconds in rows[-1].phases.values())
