"""Every entry runs end to end at a small scale; the command line says what is wrong in one line."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from gradsieve.cli import main
from gradsieve.lab.errors import LabError
from gradsieve.lab.papers import entries, get
from gradsieve.lab.papers.checkpoint import Checkpoint
from gradsieve.lab.papers.entry import Context
from gradsieve.lab.papers.reproduce import context_of
from gradsieve.lab.papers.summary import PAPERS, Comparison, Row, published
from gradsieve.lab.papers.trainings import folder
from gradsieve.lab.records import RESULTS

KEYS = list(entries())
NEED_DATA = {f"sahu2021/fig{name}" for name in ("7", "8", "9", "2b", "2c", "5", "6")}


def test_the_list_is_what_runs(capsys):
    assert main(["reproduce", "--list"]) == 0
    printed = capsys.readouterr().out
    assert all(key in printed for key in KEYS)
    assert {key.partition("/")[0] for key in KEYS} == {"foroutan2020", "sahu2021", "shi2019"}
    assert get("sahu2021/fig7").key == "sahu2021/fig7"


@pytest.mark.parametrize("paper", sorted({key.partition("/")[0] for key in KEYS}))
def test_a_paper_has_its_readme_and_every_published_number_its_source(paper):
    assert len((PAPERS / paper / "README.md").read_text()) > 500
    names = {get(key).name for key in KEYS if get(key).paper == paper}
    for row in published(paper):
        assert row.source
        assert row.what
        assert set(row.entry.split()) <= names, "a number of an entry that does not run"


@pytest.fixture(scope="module")
def trainings(tmp_path_factory):
    """Entries share their trainings, as they do for a user."""
    return tmp_path_factory.mktemp("trainings")


@pytest.mark.parametrize("key", KEYS)
def test_each_entry_runs_quickly_and_writes_what_it_promises(key, trainings, tmp_path, request, capsys):
    if key in NEED_DATA:
        request.getfixturevalue("data_dir")
    assert main(["reproduce", key, "--quick", "--out", str(tmp_path), "--trainings", str(trainings)]) == 0
    printed = capsys.readouterr().out
    entry = get(key)
    assert (tmp_path / f"{entry.name}.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / f"{entry.name}.svg").read_text()
    with (tmp_path / "results.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) >= 8
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["finished"]
    assert summary["scale"] == "quick"
    assert any("quick run" in note for note in summary["notes"])
    if "gisette" in entry.needs:  # a quick run never reads the original, and the stand-in is labelled everywhere
        labelled = [summary["data"], *summary["notes"], (tmp_path / f"{entry.name}.svg").read_text()]
        assert sum("generated" in text for text in labelled) == 3
    rows = [Row(**row) for row in summary["rows"]]
    told = {row.what for row in rows if row.published is not None}
    assert told == {row.what for row in published(entry.paper) if entry.name in row.entry.split()}
    for row in rows:
        assert np.isfinite(row.ours)
        assert row.what in " ".join(printed.split()) or len(row.what) > 30  # long ones are folded
        if row.published is not None:
            assert row.source
            if row.bound:
                assert row.gap is None
                assert row.holds == (
                    row.ours >= row.published if row.bound == "at least" else row.ours <= row.published
                )
            else:
                assert row.gap == pytest.approx(row.ours / row.published - 1)


BAD = [
    (["reproduce"], "name an entry"),
    (["reproduce", "sahu2021/fig2"], "did you mean sahu2021/fig2"),
    (["reproduce", "sahu2021/fig8", "--jobs", "2"], "leave --jobs"),
    (["reproduce", ""], "unknown entry"),
    (["reproduce", "../x"], "unknown entry"),
    (["reproduce", "sahu2021/fig7"], "give --data-dir or set GRADSIEVE_DATA"),
    (["reproduce", "sahu2021/fig7", "--data-dir", "/nowhere"], "/nowhere is not there"),
    (["reproduce", "sahu2021/fig7", "--data-dir", "/"], "none in /"),
    (["reproduce", "sahu2021/fig8", "--epochs", "3"], "has no epochs"),
    (["reproduce", "shi2019/fig2", "--seeds", "3"], "has no seeds"),
    (["reproduce", "sahu2021/fig1", "--epochs", "0"], "epochs"),
    (["reproduce", "sahu2021/fig1", "--seeds", "0"], "seeds"),
    (["reproduce", "sahu2021/fig1", "--device", "cuda"], "runs on cpu"),
    (["reproduce", "sahu2021/fig1", "--device", "tpu"], "tpu"),
    (["reproduce", "shi2019/fig1", "--quick", "--compile"], "give --device cuda"),
    (["reproduce", "all", "--quick", "--compile"], "give --device cuda"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=[" ".join(arguments) for arguments, _ in BAD])
def test_a_bad_command_line_is_one_line_and_exit_2(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GRADSIEVE_DATA", raising=False)
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("gradsieve: ")
    assert said in line
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "out", Path("/proc/gradsieve")):
        assert main(["reproduce", "shi2019/fig3", "--quick", "--out", str(out)]) == 2
        assert "cannot write to" in capsys.readouterr().err


def test_all_names_what_it_could_not_run(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("GRADSIEVE_DATA", raising=False)
    runs = {key: get(key) for key in ("sahu2021/fig7", "shi2019/fig3")}
    monkeypatch.setattr("gradsieve.lab.papers.reproduce.entries", lambda: runs)
    assert main(["reproduce", "all", "--quick", "--out", str(tmp_path)]) == 2
    assert "not run: sahu2021/fig7: madelon needs" in capsys.readouterr().err
    assert (tmp_path / "shi2019" / "fig3" / "fig3.png").exists()


def test_a_killed_run_goes_on_to_the_same_result(tmp_path, data_dir):
    """A process that is killed without warning, and the same command with --resume, against one that was left alone."""
    script = (
        "import sys, time; import gradsieve.lab.papers.checkpoint as c; c.SECONDS = 0.01;"
        "from gradsieve.lab.papers.sahu2021 import convex; step = convex._step;"
        "convex._step = lambda *given: (time.sleep(0.01), step(*given));"  # so that the kill comes in time
        "from gradsieve.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["reproduce", "sahu2021/fig8", "--quick", "--out"]
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    with subprocess.Popen(
        [sys.executable, "-c", script, *arguments, str(stopped)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
    ) as process:
        deadline = time.monotonic() + 60
        while not (stopped / "state-run.npz").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    assert not json.loads((stopped / "summary.json").read_text())["finished"]
    with np.load(stopped / "state-run.npz", allow_pickle=False) as state:
        assert 0 < state["step"] < 160
    assert main([*arguments, str(stopped), "--resume"]) == 0
    assert main([*arguments, str(whole)]) == 0
    ours, theirs = (json.loads((out / "summary.json").read_text())["rows"] for out in (stopped, whole))
    for row, other in zip(ours, theirs, strict=True):
        assert row["what"] == other["what"]
        assert row["ours"] == pytest.approx(other["ours"], rel=1e-9)
    with np.load(stopped / "state-run.npz") as state, np.load(whole / "state-run.npz") as other:
        assert np.array_equal(state["x"], other["x"])
        assert np.array_equal(state["memory"], other["memory"])


def test_an_interrupted_run_says_how_to_go_on(tmp_path, capsys, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("gradsieve.lab.papers.sahu2021.figures1and4.follow", interrupted)
    assert main(["reproduce", "sahu2021/fig1", "--quick", "--out", str(tmp_path)]) == 130
    assert "interrupted; the same command with --resume" in capsys.readouterr().err
    assert json.loads((tmp_path / "summary.json").read_text()) == {"finished": False}


def test_a_state_is_only_continued_by_the_run_it_belongs_to(tmp_path):
    path = tmp_path / "state.npz"
    assert Checkpoint(path, {"steps": 3}, resume=True).load() is None
    Checkpoint(path, {"steps": 3}, resume=True).save({"x": torch.arange(3.0)})
    kept = Checkpoint(path, {"steps": 3}, resume=True).load()
    assert kept is not None
    assert torch.equal(kept["x"], torch.arange(3.0))
    assert Checkpoint(path, {"steps": 3}, resume=False).load() is None
    with pytest.raises(LabError, match="other options or data"):
        Checkpoint(path, {"steps": 4}, resume=True).load()
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(LabError, match="run without --resume"):
        Checkpoint(path, {"steps": 3}, resume=True).load()
    np.savez(path, x=np.array([{}], dtype=object))
    with pytest.raises(LabError, match="run without --resume"):
        Checkpoint(path, {"steps": 3}, resume=True).load()


def test_a_row_holds_the_papers_number_ours_and_the_gap():
    rows = Comparison("sahu2021/fig8")
    rows.against("less", 3.4, "because")
    (row,) = rows.rows
    assert (row.published, row.ours, row.gap, row.why) == (1.7, 3.4, 1.0, "because")
    assert "p. 28" in row.source
    with pytest.raises(KeyError):
        rows.against("more", 1.0)


def test_a_bound_of_the_paper_holds_or_does_not_and_has_no_gap():
    rows = Comparison("sahu2021/fig8")
    rows.against("above", 1.3e-11)
    rows.against("kept", 0.4)
    above, kept = rows.rows
    assert (above.bound, above.holds, above.gap) == ("at most", False, None)
    assert (kept.bound, kept.holds, kept.gap) == ("at most", True, None)


def test_a_refused_run_leaves_the_summary_of_the_one_before(tmp_path, capsys):
    arguments = ["reproduce", "sahu2021/fig1", "--quick", "--out", str(tmp_path)]
    assert main(arguments) == 0
    before = (tmp_path / "summary.json").read_bytes()
    assert json.loads(before)["finished"]
    assert main([*arguments, "--seeds", "2", "--resume"]) == 2
    assert "other options" in capsys.readouterr().err
    assert (tmp_path / "summary.json").read_bytes() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_a_machine_without_a_gpu_draws_what_others_trained(tmp_path, capsys):
    entry, store = get("shi2019/fig1"), tmp_path / "store"
    options = ["reproduce", entry.key, "--quick", "--out", str(tmp_path), "--trainings", str(store)]
    assert main(options) == 0
    here = context_of(entry, Context(tmp_path, trainings=store, quick=True), None)
    there = replace(here, device="cuda")
    arms = [arm for stage in entry.stages(here) for arm in stage]
    for arm in arms:
        folder(here, arm).rename(folder(there, arm))
    (tmp_path / "fig1.png").unlink()
    assert main([*options, "--device", "cuda"]) == 0
    assert (tmp_path / "fig1.png").exists()
    (folder(there, arms[-1]) / RESULTS).unlink()
    assert main([*options, "--device", "cuda"]) == 2
    said = capsys.readouterr().err
    assert f"finds no GPU here, and {store} lacks 1 of the next trainings, the first of them {arms[-1].title}" in said
