"""The store of trainings: each is made once, a stopped one ends as if it had not been, and damage is said."""

import json
import math
import multiprocessing
import os
import signal
import time
from dataclasses import replace
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

import gradsieve as gs
from gradsieve.lab.errors import LabError
from gradsieve.lab.papers import checkpoint, snapshot, trainings
from gradsieve.lab.papers.arm import Arm
from gradsieve.lab.papers.entry import Context
from gradsieve.lab.papers.side_by_side import side_by_side
from gradsieve.lab.papers.trainings import deferred, folder, load, stand_in, trained
from gradsieve.lab.runner import Options, train

TOPK = Arm("digits", "topk:0.01", 3, workers=4)
THRESHOLD = Arm("digits", "threshold:0.01", 3, workers=4, seed=1)


def figures(run):
    """All that a run tells, but for seconds, and for errors: their last bit is the order of a sum."""
    apart = {"seconds", "phases", "error"}
    rows = [row.model_dump(exclude=apart) for row in [run.about, *run.steps, *run.epochs, run.end]]
    return json.dumps(rows)  # NaN equals NaN in a text


def errors(run):
    return [row.error for row in [*run.steps, *run.epochs]]


def test_a_training_is_made_once_and_then_read(tmp_path, monkeypatch):
    context = Context(tmp_path / "one", trainings=tmp_path / "store")
    told = []
    made = trained(replace(context, track=lambda *state: told.append(state)), [TOPK, THRESHOLD, TOPK])
    assert list(made) == [TOPK, THRESHOLD]
    assert [done for _, done, _, _ in told] == [1, 2, 3, 4, 5, 6]
    assert {total for _, _, total, _ in told} == {6}
    assert "threshold:0.01, seed 1: " in told[-1][-1]
    assert [len(run.epochs) for run in made.values()] == [3, 3]
    assert made[TOPK].last.density == pytest.approx(0.01, rel=0.01)
    assert 0 < deferred(made[THRESHOLD]) < 0.1
    assert deferred(made[TOPK]) == 0
    assert not (tmp_path / "one").exists()
    assert all([file.name for file in kept.iterdir()] == ["results.jsonl"] for kept in (tmp_path / "store").iterdir())

    def untimely(*arguments, **options):
        raise AssertionError("trained again")

    monkeypatch.setattr("gradsieve.lab.papers.trainings.run", untimely)
    again = trained(replace(context, out=tmp_path / "two"), [THRESHOLD, TOPK])
    assert again == made


def test_trainings_side_by_side_are_those_of_one_after_the_other(tmp_path):
    alone = trained(Context(tmp_path, trainings=tmp_path / "alone"), [TOPK, THRESHOLD])
    told = []
    context = Context(tmp_path, trainings=tmp_path / "jobs", jobs=3, track=lambda *state: told.append(state))
    together = trained(context, [TOPK, THRESHOLD])
    assert list(map(figures, together.values())) == list(map(figures, alone.values()))
    assert [done for _, done, _, _ in told] == [1, 2, 3, 4, 5, 6]


def test_an_error_in_one_of_them_is_said(tmp_path):
    context = Context(tmp_path, trainings=tmp_path / "store", jobs=2)
    others = set(multiprocessing.active_children())  # of tests before, in the same process
    wrong = replace(TOPK, exchange="allreduce")
    with pytest.raises(LabError, match=r"topk:0.01.*allreduce"):
        trained(context, [wrong, replace(THRESHOLD, epochs=200)])
    assert set(multiprocessing.active_children()) <= others


def killed_or_busy(context, arm):
    """The first training's process is killed; the other one has news all the time."""
    if arm == TOPK:
        os.kill(os.getpid(), signal.SIGKILL)
    for epoch in range(200):
        time.sleep(0.1)
        yield epoch, 0.5


def test_a_process_that_is_killed_ends_the_others_soon(tmp_path):
    told = []
    with pytest.raises(LabError, match=r"ended with \[.*-9"):
        told.extend(side_by_side(killed_or_busy, Context(tmp_path, jobs=2), [TOPK, THRESHOLD]))
    assert len(told) < 100


def test_an_interrupt_while_processes_start_is_one(tmp_path, monkeypatch):
    started = []

    def start(process):
        if started:
            raise KeyboardInterrupt
        started.append(process)
        really_start(process)

    really_start = SpawnProcess.start
    monkeypatch.setattr(SpawnProcess, "start", start)
    with pytest.raises(KeyboardInterrupt):
        list(side_by_side(killed_or_busy, Context(tmp_path, jobs=2), [THRESHOLD, THRESHOLD]))
    assert not started[0].is_alive()


def test_whatever_decides_a_result_is_in_its_name():
    context = Context(Path("out"))
    changes = [
        {"seed": 1},
        {"epochs": 4},
        {"rule": "topk:0.02"},
        {"scope": "global"},
        {"feedback": "none"},
        {"exchange": "allgather"},
        {"batch_size": 8},
        {"lr": 0.1},
        {"workers": 2},
        {"strict": True},
        {"values": "bfloat16"},
    ]
    folders = {folder(context, replace(TOPK, **change)) for change in changes}
    settings = [{}, {"device": "cuda"}, {"quick": True}, {"compiled": True}]
    folders |= {folder(replace(context, **setting), TOPK) for setting in settings}
    assert len(folders) == len(changes) + len(settings)
    assert folder(replace(context, seeds=5, resume=True), TOPK) == folder(context, TOPK)
    assert folder(context, TOPK).parent == Path("out/trainings")
    assert folder(context, TOPK).name.startswith("digits-topk-0.01-workers-4-epochs-3-seed-0-")


ARMS = [
    replace(TOPK, epochs=4),
    replace(THRESHOLD, epochs=4),
    replace(TOPK, rule="accordion:0.01,0.05,interval=7", epochs=4),
    replace(TOPK, feedback="momentum-unmasked", epochs=4),
    replace(TOPK, rule="dense", epochs=4),
]


@pytest.mark.parametrize("arm", ARMS, ids=lambda arm: f"{arm.rule} {arm.feedback}")
def test_a_stopped_training_goes_on_to_the_same_bits(arm, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SECONDS", -1.0)
    whole = trained(Context(tmp_path / "whole"), [arm])[arm]

    def stop(part, done, total, state=""):
        if done == 3:
            raise KeyboardInterrupt

    context = Context(tmp_path / "stopped", resume=True, track=stop)
    with pytest.raises(KeyboardInterrupt):
        trained(context, [arm])
    assert [file.name for file in folder(context, arm).iterdir()] == ["state.npz"]
    seen = []
    run = trained(replace(context, track=lambda _, done, *state: seen.append(done)), [arm])[arm]
    assert seen == [3, 4]
    assert figures(run) == figures(whole)
    assert errors(run) == pytest.approx(errors(whole), rel=1e-12)
    assert [epoch.epoch for epoch in run.epochs] == [1, 2, 3, 4]
    assert [epoch.seconds for epoch in run.epochs] == sorted(epoch.seconds for epoch in run.epochs)
    assert not (folder(context, arm) / "state.npz").exists()


def test_a_restored_training_counts_its_steps_on():
    task, options = load(Context(Path("unused")), "digits"), Options(workers=4, epochs=2)
    whole = list(train(task, gs.parse("topk:0.01"), options))[-1]
    half = next(t for t in train(task, gs.parse("topk:0.01"), options) if t.epoch == 1.0)
    tensors, plain = snapshot._state(half)
    *_, last = train(task, gs.parse("topk:0.01"), options, lambda fresh: snapshot.restore(fresh, tensors, plain))
    one, other = (training.sieve.stats().total for training in (whole, last))
    assert other.steps == one.steps
    assert other.bytes == one.bytes


def test_without_resume_a_stopped_training_starts_again(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SECONDS", -1.0)
    directory = folder(Context(tmp_path), TOPK)
    directory.mkdir(parents=True)
    (directory / "state.npz").write_bytes(b"of another time")
    with pytest.raises(LabError, match=r"state.npz; run without --resume"):
        trained(Context(tmp_path, resume=True), [TOPK])
    seen = []
    trained(Context(tmp_path, track=lambda _, done, *state: seen.append(done)), [TOPK])
    assert seen == [1, 2, 3]


def test_a_damaged_result_is_not_taken_for_one(tmp_path):
    context = Context(tmp_path)
    results = folder(context, TOPK) / "results.jsonl"
    trained(context, [TOPK])
    lines = results.read_text().splitlines()
    for damage, said in [
        ("\n".join(lines[:-1]), "not the whole of the training digits, topk:0.01"),
        ("\n".join([lines[0], "{}", *lines[2:]]), "line 2"),
        ("", "holds no run"),
        ("\n".join(lines).replace("density=0.01", "density=0.02"), "remove it"),
    ]:
        results.write_text(damage)
        with pytest.raises(LabError, match=said):
            trained(context, [TOPK])


def test_a_training_that_diverges_has_a_result_all_the_same(tmp_path):
    arm = replace(TOPK, lr=1e30)
    run = trained(Context(tmp_path), [arm])[arm]
    assert not math.isfinite(run.last.test_loss)
    assert 0 <= run.last.accuracy < 0.3
    assert figures(trained(Context(tmp_path), [arm])[arm]) == figures(run)


def test_a_quick_run_takes_a_small_task(tmp_path, monkeypatch):
    monkeypatch.delenv("GRADSIEVE_DATA", raising=False)
    quick, full = Context(tmp_path, quick=True), Context(tmp_path)
    assert stand_in(quick, "cifar-resnet18") == "digits"
    assert stand_in(full, "cifar-resnet18") == "cifar-resnet18"
    assert load(quick, "digits") is load(quick, "digits")
    with pytest.raises(LabError, match="CIFAR-10 needs its data"):
        load(full, "cifar-resnet18")


def test_a_training_on_other_data_is_not_taken_for_this_one(tmp_path, monkeypatch):
    """The original in place of a stand-in, say: neither its result nor its state."""
    context = Context(tmp_path, resume=True)
    trained(context, [TOPK])
    other = replace(load(context, "digits"), description="other digits")
    monkeypatch.setattr(trainings, "_task", lambda *_: other)
    with pytest.raises(LabError, match=r"was trained on other data .*give another --trainings"):
        trained(context, [TOPK])
