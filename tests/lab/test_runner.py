"""Runs: reproducible, honest about what they spent, and calibrated within the budget."""

import math

import pytest

import gradsieve as gs
from gradsieve.lab.calibrate import Budget, budget_of, calibrate
from gradsieve.lab.compare import compare, entries
from gradsieve.lab.errors import LabError
from gradsieve.lab.records import EndRow, EpochRow, RunRow, StepRow, read
from gradsieve.lab.runner import Options, run, virtual

SHORT = Options(workers=3, epochs=4)


class Silent:
    def calibrating(self, name: str, trial: int) -> None:
        pass

    def row(self, row: object) -> None:
        pass


def rows_of(task, rule, options=SHORT):
    return list(run(task, rule, options, virtual, name="a run"))


def test_rows_come_in_order_and_learning_happens(blobs):
    rows = rows_of(blobs, gs.TopK(0.1))
    assert isinstance(rows[0], RunRow)
    assert isinstance(rows[-1], EndRow)
    epochs = [row for row in rows if isinstance(row, EpochRow)]
    steps = [row for row in rows if isinstance(row, StepRow)]
    assert [row.epoch for row in epochs] == [1, 2, 3, 4]
    assert steps[-1].step == epochs[-1].step == 4 * blobs.steps_per_epoch(3, 8)
    assert epochs[-1].accuracy > 0.9
    assert epochs[-1].error == pytest.approx(sum(row.error for row in steps), rel=1e-4)
    assert epochs[-1].bytes == pytest.approx(sum(row.bytes for row in steps))
    assert "gradients" in rows[-1].phases


def test_same_seed_same_run_and_another_seed_another(blobs):
    def losses(seed: int) -> list[float]:
        rows = rows_of(blobs, gs.HardThreshold(0.01), Options(workers=2, epochs=2, seed=seed))
        return [row.loss for row in rows if isinstance(row, StepRow)]

    assert losses(0) == losses(0)
    assert losses(0) != losses(1)


def test_a_threshold_of_zero_is_dense(blobs):
    def accuracy_and_loss(rule):
        last = [row for row in rows_of(blobs, rule) if isinstance(row, EpochRow)][-1]
        return last.accuracy, last.test_loss

    assert accuracy_and_loss(gs.HardThreshold(0.0)) == pytest.approx(accuracy_and_loss(gs.Dense()), rel=1e-5)


@pytest.mark.parametrize("feedback", ["gradient", "update", "momentum", "none"])
def test_every_feedback_trains(blobs, feedback):
    rows = rows_of(blobs, gs.TopK(0.2), Options(workers=2, epochs=3, feedback=feedback))
    assert [row for row in rows if isinstance(row, EpochRow)][-1].accuracy > 0.8


def test_momentum_feedback_takes_it_from_the_optimizer(blobs):
    assert Options(feedback="momentum").recipe(blobs).momentum == 0.0
    assert Options(feedback="gradient").recipe(blobs).momentum == 0.9


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"epochs": 0}, {"batch_size": 0}, {"lr": 0.0}, {"lr": math.nan}])
def test_wrong_options_are_refused(wrong):
    with pytest.raises(LabError, match=next(iter(wrong))):
        Options(**wrong)


def test_networks_are_compiled_for_a_gpu_only():
    with pytest.raises(LabError, match="give --device cuda"):
        Options(compiled=True)


def test_rules_are_parsed_before_anything_runs():
    assert [entry.rule for entry in entries(["dense", "threshold:auto"])] == [gs.Dense(), None]
    with pytest.raises(LabError, match="given twice"):
        entries(["dense", "dense"])
    with pytest.raises(LabError, match="threshold:auto"):
        entries(["nope"])


def test_budget_is_what_top_k_really_spends(blobs):
    budget = budget_of([gs.Dense(), gs.TopK(0.1)], blobs, SHORT)
    last = [row for row in rows_of(blobs, gs.TopK(0.1)) if isinstance(row, EpochRow)][-1]
    assert budget.density == pytest.approx(last.density)
    assert budget.step_bytes == pytest.approx(last.bytes / last.step)
    assert budget_of([gs.Dense()], blobs, SHORT) == Budget(0.01)
    assert math.isinf(budget_of([gs.TopK(0.1)], blobs, Options(workers=1)).step_bytes)


def test_calibration_stays_within_the_budget_and_says_how(blobs):
    trials = []
    budget = budget_of([gs.TopK(0.1)], blobs, SHORT)
    found = calibrate(blobs, SHORT, budget, trials.append)
    last = [row for row in rows_of(blobs, gs.HardThreshold(found.threshold)) if isinstance(row, EpochRow)][-1]
    assert found.met
    assert last.density <= budget.density
    assert last.bytes / last.step <= budget.step_bytes
    assert trials == list(range(1, found.trials + 1))
    assert "calibrated from the published 1/(2 sqrt k)" in found.note


def test_compare_leaves_four_files(blobs, tmp_path):
    outcome = compare(blobs, ["dense", "topk:0.1", "threshold:auto"], SHORT, tmp_path / "new" / "out", Silent())
    assert [run.about.run for run in outcome.runs] == ["dense", "topk:0.1", "threshold:auto"]
    assert not outcome.interrupted
    assert "calibrated" in outcome.runs[2].about.note
    written = sorted(path.name for path in (tmp_path / "new" / "out").iterdir())
    assert written == ["curves.png", "report.html", "results.jsonl", "summary.json"]


def test_an_impossible_pairing_is_refused_before_anything_is_written(blobs, tmp_path):
    options = Options(workers=2, epochs=1, exchange="allreduce")
    with pytest.raises(LabError):
        compare(blobs, ["dense", "topk:0.1"], options, tmp_path / "out", Silent())
    assert not (tmp_path / "out").exists()


def test_an_interrupt_keeps_what_there_is(blobs, tmp_path):
    class Impatient(Silent):
        def row(self, row: object) -> None:
            if isinstance(row, EpochRow) and row.run == "topk:0.1" and row.epoch == 2:
                raise KeyboardInterrupt

    (tmp_path / "report.html").write_text("of an earlier run")
    outcome = compare(blobs, ["dense", "topk:0.1", "randomk:0.1"], SHORT, tmp_path, Impatient())
    assert outcome.interrupted
    dense, topk = read(tmp_path)
    assert dense.end is not None
    assert topk.end is None
    assert topk.last.epoch == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.jsonl", "summary.json"]
