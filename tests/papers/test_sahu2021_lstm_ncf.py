"""Figures 2b, 2c, 5 and 6 of Sahu et al. 2021: how trainings are judged, and that stand-ins are labelled."""

import json
import math
import random

import numpy as np
import pytest

from gradsieve.cli import main
from gradsieve.lab.papers import get
from gradsieve.lab.papers.entry import Context
from gradsieve.lab.papers.sahu2021.benchmark import Judged, best_hit_rate, perplexity
from gradsieve.lab.papers.sahu2021.language import LSTM
from gradsieve.lab.papers.sahu2021.recommendation import NCF
from gradsieve.lab.papers.trainings import load, trained
from gradsieve.lab.records import EpochRow, Run, RunRow

KEYS = ("sahu2021/fig2b", "sahu2021/fig5", "sahu2021/fig2c", "sahu2021/fig6")


def _run(*epochs: tuple[float, float], description: str = "") -> Run:
    """A run with these losses and accuracies."""
    about = RunRow.model_construct(description=description, seed=0)
    rest = {"run": "r", "bytes": 0, "dense_bytes": 0, "deferred": 0, "seconds": 0}
    rows = [
        EpochRow(epoch=i + 1, step=10 * (i + 1), test_loss=loss, accuracy=accuracy, density=0.1, error=2.0, **rest)
        for i, (loss, accuracy) in enumerate(epochs)
    ]
    return Run.model_construct(about=about, steps=[], epochs=rows, end=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text that is easy to foretell, and users who like every seventh film."""
    directory = tmp_path_factory.mktemp("data")
    draws = random.Random(0)
    lines = [" ".join(f"w{(start + i) % 50}" for i in range(19)) for start in (draws.randrange(50) for _ in range(200))]
    for part in ("valid", "test"):
        (directory / f"wikitext-2.{part}.txt").write_text("\n".join(lines))
    rated = [(user, film) for user in range(1, 41) for film in range(1, 171) if (film + user) % 7 == 0]
    (directory / "u.data").write_text("".join(f"{user}\t{film}\t3\t{draws.random()}\n" for user, film in rated))
    return directory


def test_perplexity_is_that_of_the_last_epoch_and_the_hit_rate_the_best_so_far():
    runs = (_run((2.0, 0.5), (1.0, 0.7), (1.5, 0.6)), _run((1.0, 0.1), (1.0, 0.2), (0.5, 0.3)))
    words, films = Judged(runs, perplexity), Judged(runs, best_hit_rate)
    assert words.accuracies == pytest.approx([math.exp(1.5), math.exp(0.5)])
    assert words.best == pytest.approx((math.exp(1.0) + math.exp(0.5)) / 2)
    assert films.accuracies == pytest.approx([70, 30])
    step_P, value_PS = films.by_epoch()
    assert step_P.tolist() == [10, 20, 30]
    np.testing.assert_allclose(value_PS[:, 0], [50, 70, 70])
    assert perplexity(_run((1e4, 0.0), (math.nan, 0.0)).epochs)[0] == math.inf


def test_better_is_lower_for_words_and_higher_for_films():
    assert LSTM.ahead(one=90.0, other=92.0) == 2.0
    assert NCF.ahead(one=90.0, other=92.0) == -2.0


def test_a_stand_in_is_a_reason_and_a_note(tmp_path, folder):
    context = Context(tmp_path, data_dir=folder, epochs=7, quick=True)
    original, other = Judged((_run((1, 1), description="x"),)), Judged((_run((1, 1), description="y in place of x"),))
    assert LSTM.notes(original) == []
    assert LSTM.notes(other) == ["not the paper's data: y in place of x"]
    assert LSTM.why(context, other).startswith("not the paper's data; 7 of 90 epochs, the rate falls in proportion")
    assert LSTM.why(Context(tmp_path), original) == ""


def test_thresholds_follow_the_batch_where_they_must(tmp_path, folder):
    context = Context(tmp_path, data_dir=folder, quick=True)
    assert LSTM.threshold(context, 4.5e-3) == "threshold:0.0045"
    batch = load(context, NCF.small).recipe.batch_size
    assert NCF.threshold(context, 2e-6) == f"threshold:{2e-6 * 2**17 / batch:.4g}"


def test_topk_spends_what_the_threshold_did(tmp_path, folder):
    context = Context(tmp_path, data_dir=folder, quick=True)
    first, second = (list(stage) for stage in _stages(get("sahu2021/fig5"), context))
    assert [arm.rule for arm in first] == ["threshold:0.00275"]
    (run,) = trained(context, first).values()
    assert second[0].rule == f"topk:{run.last.density:.3g}"
    assert {arm.exchange for arm in [*first, *second]} == {"allgather"}


def _stages(entry, context):
    for stage in entry.stages(context):
        trained(context, stage)
        yield stage


@pytest.mark.parametrize("key", ["sahu2021/fig5", "sahu2021/fig6"])
def test_an_entry_says_that_its_data_stand_in(key, folder, tmp_path, capsys):
    assert main(["reproduce", key, "--quick", "--data-dir", str(folder), "--out", str(tmp_path)]) == 0
    assert "in place of" in " ".join(capsys.readouterr().out.split())
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert "in place of" in summary["data"]
    assert any(note.startswith("not the paper's data") for note in summary["notes"])
    assert "in place of" in (tmp_path / f"{key.partition('/')[2]}.svg").read_text().replace("\n", " ")


@pytest.mark.parametrize("key", KEYS)
def test_without_data_an_entry_says_what_it_needs(key, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("GRADSIEVE_DATA", raising=False)
    assert main(["reproduce", key, "--out", str(tmp_path / "out")]) == 2
    assert "give --data-dir or set GRADSIEVE_DATA" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
