"""MovieLens and NeuMF: a film held back for each user, films drawn for each rating, gradients that are autograd's."""

import gzip
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import gradsieve as gs
from gradsieve.lab import tasks
from gradsieve.lab.bench import training
from gradsieve.lab.errors import LabError
from gradsieve.lab.runner import Options, optimizer_of, train
from gradsieve.lab.tasks import ratings
from gradsieve.lab.tasks.base import Movable, Recipe
from gradsieve.lab.tasks.neumf import NeuMF
from gradsieve.lab.tasks.recommendation import Recommendation

USERS, FILMS, RATED, UNRATED = 6, 60, 22, 30


def _lines(between: str) -> str:
    """User u + 1 rates films 10 u + 5 and on, the last one first: what was rated last is told by the time alone."""
    rated = [(user + 1, (10 * user + film) % FILMS + 5, 21 - film) for user in range(USERS) for film in range(RATED)]
    some = [*rated, (77, 5, 1), (77, 6, 2)]  # a user with too few
    return "".join(between.join(map(str, (user, film, 3.5, 1000 + when))) + "\n" for user, film, when in some)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "u.data.gz").write_bytes(gzip.compress(_lines("\t").encode()))
    return tmp_path


@pytest.fixture
def known(folder):
    return ratings.load(folder, negatives=UNRATED)


@pytest.fixture
def ranking(known) -> Recommendation:
    return Recommendation(
        name="films",
        description="films",
        recipe=Recipe(lr=0.01, batch_size=20, momentum=0.0, betas=(0.25, 0.5)),
        pairs_P2=known.pairs_P2,
        candidates_UN=known.candidates_UN,
        users=known.users,
        films=known.films,
        dropout=0.0,
    )


def test_the_last_film_is_held_back_and_the_others_never_rated(known):
    assert (known.users, known.films, known.source) == (USERS, FILMS, "MovieLens-100k")
    assert len(known.pairs_P2) == USERS * (RATED - 1)
    assert known.candidates_UN.shape == (USERS, 1 + UNRATED)
    for user in range(USERS):
        seen = set(known.pairs_P2[known.pairs_P2[:, 0] == user, 1].tolist())
        held_back, *others = known.candidates_UN[user].tolist()
        assert held_back == 10 * user % FILMS  # film 5 is the first number
        assert held_back not in seen
        assert len(set(others)) == UNRATED
        assert not set(others) & {*seen, held_back}


@pytest.mark.parametrize(
    ("name", "between", "head"),
    [("ratings.csv", ",", "userId,movieId,rating,timestamp\n"), ("ml-1m/ratings.dat", "::", ""), ("u.data", "\t", "")],
)
def test_all_forms_of_movielens_read_the_same(name, between, head, tmp_path, known):
    path = tmp_path / "other" / name
    path.parent.mkdir(parents=True)
    path.write_text(head + _lines(between))
    again = ratings.load(tmp_path / "other", negatives=UNRATED)
    assert torch.equal(again.pairs_P2, known.pairs_P2)
    assert torch.equal(again.candidates_UN, known.candidates_UN)


def test_missing_and_bad_data_say_what_is_expected(tmp_path, monkeypatch):
    monkeypatch.delenv("GRADSIEVE_DATA", raising=False)
    with pytest.raises(LabError, match=r"give --data-dir or set GRADSIEVE_DATA to a folder with ratings\.csv"):
        tasks.get("movielens-ncf")
    with pytest.raises(LabError, match=r"no MovieLens in .*u\.data"):
        tasks.get("movielens-ncf", data_dir=tmp_path)
    for text, said in [
        ("1\t2\t3\n", "user, film, rating and time"),
        ("one\ttwo\n1\tx\t3\t4\n", "user, film, rating and time"),
        ("1\t2\t3\tnan\n", "whole numbers"),
        ("1\t2\t3\t4\n", "no user with at least 20"),
        (_lines("\t"), "a user has 38 films left that are not rated; the evaluation draws 100"),
    ]:
        (tmp_path / "u.data").write_text(text)
        with pytest.raises(LabError, match=said):
            tasks.get("movielens-ncf", data_dir=tmp_path)


def test_neumf_has_its_published_size():
    with torch.device("meta"):
        net = NeuMF(138_493, 26_744)
    assert sum(parameter.numel() for parameter in net.parameters()) == 31_832_577


def test_an_epoch_has_every_rating_once_and_four_films_beside_it(ranking):
    batches = list(ranking.batches(0, workers=3, batch_size=7, seed=0))
    assert len(batches) == ranking.steps_per_epoch(3, 7) == len(ranking.pairs_P2) * 5 // 3 // 7
    pairs = torch.cat([batch.inputs_WB.flatten(0, 1) for batch in batches])
    rated = torch.cat([batch.labels_WB.flatten() for batch in batches])
    assert rated.mean().item() == pytest.approx(0.2, abs=0.01)
    positive = pairs[rated == 1]
    assert len(positive.unique(dim=0)) == len(positive)
    assert {tuple(pair) for pair in positive.tolist()} <= {tuple(pair) for pair in ranking.pairs_P2.tolist()}
    assert all(0.1 < batch.labels_WB.mean() < 0.4 for batch in batches[:1])
    with pytest.raises(LabError, match="use fewer workers or a smaller --batch-size"):
        ranking.steps_per_epoch(1000, 1000)


def test_apart_gives_workers_one_kind_each(ranking):
    batch = next(replace(ranking, apart=True).batches(0, workers=5, batch_size=20, seed=0))
    assert batch.labels_WB.mean(1).tolist() == [1, 0, 0, 0, 0]


def test_epochs_and_seeds_draw_differently(ranking):
    def first(epoch: int, seed: int) -> torch.Tensor:
        return next(ranking.batches(epoch, workers=2, batch_size=8, seed=seed)).inputs_WB

    assert torch.equal(first(0, 0), first(0, 0))
    assert not torch.equal(first(0, 0), first(1, 0))
    assert not torch.equal(first(0, 0), first(0, 1))


def test_gradients_of_all_workers_are_those_of_autograd(ranking):
    model = ranking.model(0)
    batch = next(ranking.batches(0, workers=3, batch_size=9, seed=0))
    losses_W, grads_Wn = ranking.batch_gradients(model, batch)
    for worker, (pairs_B2, rated_B) in enumerate(zip(*batch, strict=True)):
        loss = nn.functional.binary_cross_entropy_with_logits(model(pairs_B2), rated_B)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        expected_n = torch.cat([gradient.flatten() for gradient in gradients])
        torch.testing.assert_close(losses_W[worker], loss.detach())
        torch.testing.assert_close(grads_Wn[worker], expected_n, rtol=1e-4, atol=1e-7)


def test_dropout_follows_from_the_seed_and_the_epoch(ranking):
    task = replace(ranking, dropout=0.5)

    def gradient(seed: int, epoch: int) -> torch.Tensor:
        model = task.model(seed)
        model.load_state_dict(task.model(0).state_dict())
        opening = next(task.batches(epoch, workers=2, batch_size=8, seed=0))
        fixed = next(task.batches(0, workers=2, batch_size=8, seed=0))
        opening = type(opening)(*fixed)
        opening.epoch = epoch
        return task.batch_gradients(model, opening)[1]

    state = torch.get_rng_state()
    assert torch.equal(gradient(0, 0), gradient(0, 0))
    assert not torch.equal(gradient(0, 0), gradient(1, 0))
    assert not torch.equal(gradient(0, 0), gradient(0, 1))
    assert torch.equal(torch.get_rng_state(), state)


class ByFilm(nn.Module):
    """The score of a film, whoever asks."""

    def __init__(self, scores: torch.Tensor) -> None:
        super().__init__()
        self.scores = scores

    def forward(self, pairs: torch.Tensor) -> torch.Tensor:
        return self.scores[pairs[..., 1]]


def test_a_hit_is_a_film_with_fewer_than_ten_above_it(ranking):
    others = torch.arange(1, 31).expand(2, -1)
    task = replace(ranking, candidates_UN=torch.cat([torch.tensor([[0], [31]]), others], dim=1), users=2, films=32)
    scores = torch.zeros(32)
    scores[1:31] = torch.arange(30.0)
    scores[0], scores[31] = 20.5, 19.5  # nine films above the first, ten above the second
    assert task.evaluate(ByFilm(scores)).accuracy == 0.5
    assert task.evaluate(ByFilm(torch.zeros(32))).accuracy == 0.0  # all alike is no hit
    assert task.evaluate(ByFilm(torch.full((32,), torch.nan))).accuracy == 0.0
    assert task.evaluate(ByFilm(torch.zeros(32))).loss == pytest.approx(np.log(2))


def test_betas_choose_adam():
    net = nn.Linear(2, 2)
    adam = optimizer_of(net, Recipe(lr=0.1, batch_size=1, betas=(0.25, 0.5), weight_decay=0.1))
    assert isinstance(adam, torch.optim.Adam)
    (group,) = adam.param_groups
    assert (group["betas"], group["lr"], group["weight_decay"]) == ((0.25, 0.5), 0.1, 0.1)
    assert isinstance(optimizer_of(net, Recipe(lr=0.1, batch_size=1)), torch.optim.SGD)


def test_training_learns_and_repeats_itself(ranking):
    def losses(rule: str) -> list[float]:
        options = Options(workers=2, epochs=4, batch_size=40, strict=False)
        return [training.loss for training in train(ranking, gs.parse(rule), options)]

    first = losses("topk:0.1")
    assert first == losses("topk:0.1")
    assert sum(first[-5:]) < 0.9 * sum(first[:5])


def test_it_is_a_task_that_moves(ranking):
    assert isinstance(ranking, Movable)
    assert ranking.to(torch.device("cpu")) is ranking


def test_time_to_accuracy_refuses_a_task_without_labels_before_ranks_start(ranking, monkeypatch, tmp_path):
    monkeypatch.setattr(training.tasks, "get", lambda name, data_dir: ranking)
    with pytest.raises(LabError, match="films has no labels to be judged by"):
        training.run("films", ["loopback"], tmp_path / "rows.jsonl", print)
    assert not (tmp_path / "rows.jsonl").exists()
