"""WikiText-2 and its LSTM: texts as numbers, windows that follow each other, gradients that are autograd's."""

import lzma
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import gradsieve as gs
from gradsieve.lab import tasks
from gradsieve.lab.errors import LabError
from gradsieve.lab.processes import processes
from gradsieve.lab.runner import Options, run, train
from gradsieve.lab.tasks import words
from gradsieve.lab.tasks.base import Batch, Movable, Recipe
from gradsieve.lab.tasks.language import LanguageModel, clipped
from gradsieve.lab.tasks.lstm import State, WordLstm
from gradsieve.lab.tasks.opening import Opening

TEXT = "The cat sat .\n\n = A dog = \nthe dog sat on the cat .\n"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "wikitext-2.valid.txt").write_text(TEXT)
    (tmp_path / "wikitext-2.test.txt.xz").write_bytes(lzma.compress(b"the bird sat\n"))
    return tmp_path


@pytest.fixture(scope="module")
def reader() -> LanguageModel:
    """A text that counts to seven, over and over."""
    text = torch.arange(1600) % 7
    return LanguageModel(
        name="counting",
        description="counting",
        recipe=Recipe(lr=1.0, batch_size=4, momentum=0.0),
        train_words=text,
        test_words=text[:400],
        vocabulary=7,
        network={"units": 12, "layers": 2, "dropout": 0.0},
        window=5,
    )


def test_words_are_lower_case_and_lines_end_in_a_word(folder):
    text = words.load(folder)
    assert text.vocabulary == len({"the", "cat", "sat", ".", "=", "a", "dog", "on", words.END, words.UNKNOWN})
    assert len(text.train) == len(TEXT.split()) + 3  # the empty line is none
    the, bird, sat, end = text.test.tolist()
    assert [the, sat, end] == [text.train[i].item() for i in (0, 2, 4)]
    assert bird not in text.train.tolist()  # it is read as the unknown word
    assert "validation text in place of the training text" in text.description


def test_the_originals_are_preferred_and_their_description_says_so(folder):
    (folder / "wikitext-2").mkdir()
    for part in ("train", "valid", "test"):
        (folder / "wikitext-2" / f"wiki.{part}.tokens").write_text("one two <unk> three\n")
    text = words.load(folder)
    assert not text.stand_in
    assert "in place of" not in text.description
    assert text.vocabulary == 5


def test_rare_words_become_unknown(folder):
    text = words.load(folder, most=3)
    assert text.vocabulary == 3
    assert text.train.max() == 2


@pytest.mark.parametrize("name", ["wikitext-lstm", "wikitext-lstm-small"])
def test_missing_data_say_what_is_expected(name, tmp_path, monkeypatch):
    monkeypatch.delenv("GRADSIEVE_DATA", raising=False)
    with pytest.raises(LabError, match=r"give --data-dir or set GRADSIEVE_DATA to a folder with wiki\.train\.tokens"):
        tasks.get(name)
    with pytest.raises(LabError, match=r"no WikiText-2 in .*wikitext-2\.valid\.txt"):
        tasks.get(name, data_dir=tmp_path)


def test_bad_data_are_named(folder):
    (folder / "wikitext-2.test.txt.xz").write_bytes(b"not packed")
    with pytest.raises(LabError, match=r"cannot read .*test\.txt\.xz"):
        words.load(folder)
    (folder / "wikitext-2.test.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(LabError, match="not a text in UTF-8"):
        words.load(folder)
    (folder / "wikitext-2.test.txt").write_text("\n \n")
    with pytest.raises(LabError, match="has no words"):
        words.load(folder)


def test_the_lstm_has_its_published_size():
    with torch.device("meta"):
        net = WordLstm(28_869)
    assert sum(parameter.numel() for parameter in net.parameters()) == 28_949_319
    assert len(list(net.parameters())) == 14


def test_the_task_is_trained_as_the_paper_says(folder):
    (folder / "wikitext-2.train.txt").write_text("one two three four five\n" * 10)
    recipe = tasks.get("wikitext-lstm", data_dir=folder).recipe.fitted(90)
    rates = [recipe.lr_at(epoch / 90) for epoch in (0, 5, 59, 60, 80)]
    assert rates == pytest.approx([1.25, 20, 20, 2, 0.2])
    assert (recipe.batch_size, recipe.momentum, recipe.weight_decay, recipe.betas) == (128, 0, 0, None)


def test_windows_follow_each_other_in_every_text(reader):
    batches = list(reader.batches(3, workers=2, batch_size=4, seed=0))
    assert len(batches) == reader.steps_per_epoch(2, 4) == (1600 // 8 - 1) // 5
    read = torch.cat([batch.inputs_WB for batch in batches], dim=2).flatten(0, 1)
    for column, text in enumerate(read):
        assert torch.equal(text, reader.train_words[column * 200 :][: len(text)])
    assert all(torch.equal((batch.inputs_WB + 1) % 7, batch.labels_WB) for batch in batches)
    assert isinstance(batches[0], Opening)
    assert batches[0].epoch == 3
    assert not any(isinstance(batch, Opening) for batch in batches[1:])
    with pytest.raises(LabError, match="use fewer workers or a smaller --batch-size"):
        reader.steps_per_epoch(100, 100)


def _one_by_one(model: WordLstm, batch: Batch, states: list[State | None], clip: float):
    """What autograd says, one worker at a time, through PyTorch's own LSTM."""
    for worker, (words_BT, next_BT) in enumerate(zip(*batch, strict=True)):
        scores, state = model(words_BT, states[worker])
        loss = nn.functional.cross_entropy(scores.flatten(0, 1), next_BT.flatten())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        flat_n = torch.cat([gradient.flatten() for gradient in gradients])
        states[worker] = State(*(tuple(part.detach() for part in parts) for parts in state))
        yield loss.detach(), flat_n * min(1.0, clip / (flat_n.norm().item() + 1e-6))


@pytest.mark.parametrize("clip", [0.1, math.inf])
def test_gradients_of_all_workers_are_those_of_autograd(reader, clip):
    """Over three windows, so that what is remembered counts."""
    task, model = replace(reader, clip=clip), reader.model(0)
    states: list[State | None] = [None] * 3
    batches = list(task.batches(0, workers=3, batch_size=4, seed=0))[:3]
    gradients = task.gradients(model, batches[0])
    for batch in batches:
        losses_W, grads_Wn = gradients(batch)
        for worker, (loss, flat_n) in enumerate(_one_by_one(model, batch, states, clip)):
            torch.testing.assert_close(losses_W[worker], loss)
            torch.testing.assert_close(grads_Wn[worker], flat_n, rtol=1e-4, atol=1e-6)
    assert torch.equal(gradients(batches[0])[1], task.batch_gradients(model, batches[0])[1])  # an epoch begins anew


def test_dropout_follows_from_the_seed_and_the_epoch(reader):
    task = replace(reader, network={"units": 12, "layers": 2, "dropout": 0.5})

    def losses(seed: int, epoch: int) -> torch.Tensor:
        model = task.model(seed)
        model.load_state_dict(task.model(0).state_dict())
        batch = next(task.batches(epoch, workers=2, batch_size=4, seed=0))
        return task.batch_gradients(model, batch)[0]

    state = torch.get_rng_state()
    assert torch.equal(losses(0, 0), losses(0, 0))
    assert not torch.equal(losses(0, 0), losses(1, 0))
    assert not torch.equal(losses(0, 0), losses(0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    model = task.model(0)
    opening, *others = task.batches(0, workers=2, batch_size=4, seed=0)
    gradients = task.gradients(model, opening)
    for batch in [opening, *others[:2]]:
        gradients(batch)
    following = next(task.batches(1, workers=2, batch_size=4, seed=0))
    assert torch.equal(gradients(following)[0], losses(0, 1)), "a training that goes on draws what it would have"
    plain = reader.batch_gradients(reader.model(0), next(reader.batches(0, workers=2, batch_size=4, seed=0)))[0]
    assert not torch.allclose(losses(0, 0), plain)


def test_clipping_leaves_short_gradients_alone():
    clear = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    torch.testing.assert_close(clipped(clear.clone(), 1.0), torch.tensor([[0.6, 0.8], [0.3, 0.4]]))


def test_evaluation_of_an_oracle_and_of_one_that_knows_nothing(reader):
    class Oracle(nn.Module):
        def __init__(self, sure: float) -> None:
            super().__init__()
            self.sure = sure

        def forward(self, words_BT: torch.Tensor, state: State | None) -> tuple[torch.Tensor, None]:
            return self.sure * nn.functional.one_hot((words_BT + 1) % 7, 7).float(), None

    assert reader.evaluate(Oracle(100.0)) == pytest.approx((0.0, 1.0))
    assert reader.evaluate(Oracle(0.0)).loss == pytest.approx(math.log(7))


def test_training_learns_to_count_and_repeats_itself(reader):
    task = replace(reader, network={"units": 12, "layers": 1, "dropout": 0.1})

    def losses(rule: str) -> list[float]:
        options = Options(workers=2, epochs=1, lr=5.0, strict=False)
        return [training.loss for training in train(task, gs.parse(rule), options)]

    first = losses("topk:0.1")
    assert first == losses("topk:0.1")
    assert first[-1] < 0.3 * first[0]


def test_real_ranks_are_refused(reader):
    with pytest.raises(LabError, match="virtual workers only"):
        next(run(reader, gs.parse("dense"), Options(workers=2, epochs=1), processes(None, None), name="run"))


def test_it_is_a_task_that_moves(reader):
    assert isinstance(reader, Movable)
    assert reader.to(torch.device("cpu")) is reader
