"""The benchmarks run end to end at a small scale, tell what they measured, and say what is wrong before ranks start."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import gradsieve as gs
from gradsieve.cli import main
from gradsieve.lab.bench import network, start
from gradsieve.lab.bench.hosts import hosts, why_not
from gradsieve.lab.bench.ways import check, peer_of, way_of
from gradsieve.lab.errors import LabError
from gradsieve.ops import native, reference

shaped = pytest.mark.skipif(why_not() is not None, reason=f"no test hosts here: {why_not()}")


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_ops_are_timed_against_the_memory(tmp_path):
    out = tmp_path / "ops.jsonl"
    options = ["--device", "cpu", "--sizes", "20000", "--densities", "0.01", "--steps", "4", "--repeats", "3"]
    assert main(["bench", "ops", *options, "--out", str(out)]) == 0
    rows = {row["op"]: row for row in rows_of(out)}
    assert {"add", "peer topk", "threshold", "topk cold", "topk sequence", "randomk", "decode 8"} <= set(rows)
    assert rows["add"]["ratio"] == 1
    for row in rows.values():
        against = rows[row["against"]]
        if "sequence" not in row["op"]:  # which is timed beside an add of its own
            assert row["ratio"] == pytest.approx(row["median_ms"] / against["median_ms"])
    assert (tmp_path / "ops-cpu.png").exists()


def test_ops_by_layers_over_the_tensors_of_a_network(tmp_path):
    out = tmp_path / "ops.jsonl"
    options = ["--sizes", "20000", "--networks", "ResNet-18", "--densities", "0.001", "--steps", "0", "--repeats", "2"]
    assert main(["bench", "ops", *options, "--out", str(out)]) == 0
    rows = {row["op"]: row for row in rows_of(out) if row["network"] == "ResNet-18"}
    layered = {f"{rule} layer-wise repeated" for rule in ("topk", "gaussiank", "sampledk")}
    assert set(rows) == {"add", "threshold", "threshold layer-wise", "randomk layer-wise", *layered}
    assert {row["n"] for row in rows.values()} == {11_173_962}


@pytest.mark.skipif(not native.available(), reason="no compiled library")
def test_a_wrong_op_gets_no_figure(tmp_path, monkeypatch, capsys):
    def forgetful(pending, threshold):
        sparse = reference.threshold(pending, threshold)
        pending.memory_Ln.mul_(0.999)
        return sparse

    monkeypatch.setattr(native, "threshold", forgetful)
    out = tmp_path / "ops.jsonl"
    options = ["--device", "cpu", "--sizes", "5000", "--densities", "0.01", "--steps", "0", "--repeats", "2"]
    assert main(["bench", "ops", *options, "--out", str(out)]) == 0
    assert "threshold: differs from the reference" in capsys.readouterr().out
    told = {row["op"] for row in rows_of(out)}
    assert "threshold" not in told
    assert "topk cold" in told


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--repeats", "1"], "argument --repeats: takes a whole number of at least 2, not '1'"),
        (["--sizes", "0"], "argument --sizes: takes a whole number of at least 1, not '0'"),
        (["--densities", "2"], "argument --densities: takes a number above 0 and up to 1, not '2'"),
        (["--steps", "1"], "argument --steps: takes 0 or at least 2 on cpu, not 1"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
    ],
)
def test_a_wrong_option_of_ops_gets_one_line(arguments, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "ops", *arguments])
    told = capsys.readouterr().err
    assert told.startswith(f"gradsieve: {said}")
    assert told.count("\n") == 1


def test_steps_of_all_kinds_of_ways(tmp_path, capsys):
    out, plot, page = tmp_path / "step.jsonl", tmp_path / "step.png", tmp_path / "step.md"
    ways = ["no exchange", "dense", "PowerSGD rank 1", "topk:0.001", "threshold:auto strict"]
    chosen = [part for way in ways for part in ("--way", way)]
    command = ["bench", "step", "--link", "loopback", "--rounds", "2", *chosen]
    assert main([*command, "--out", str(out), "--plot", str(plot), "--markdown", str(page)]) == 0
    rows = {row.way: row for row in network.read(out)}
    assert list(rows) == ways
    assert rows["dense"].over_dense == rows["no exchange"].over_nothing == 1
    assert rows["topk:0.001"].density == pytest.approx(0.001, rel=0.01)
    assert 0.0003 < rows["threshold:auto strict"].density < 0.003
    assert rows["dense"].sent > 40e6  # of an interface that other tests use too
    assert all(low <= ms <= high for low, ms, high in ((row.low, row.ms, row.high) for row in rows.values()))
    assert set(rows["topk:0.001"].phases) == {"coding", "exchange", "decoding"}
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "| topk:0.001 |" in page.read_text()
    assert "2 workers, loopback" in capsys.readouterr().out


def test_steps_with_gradients_as_bucket_views_are_told_apart(tmp_path, capsys):
    out, plot, page = tmp_path / "step.jsonl", tmp_path / "step.png", tmp_path / "step.md"
    command = ["bench", "step", "--link", "loopback", "--rounds", "2", "--way", "no exchange", "--way", "topk:0.001"]
    for more in ([], ["--bucket-view"]):
        assert main([*command, *more, "--out", str(out), "--plot", str(plot), "--markdown", str(page)]) == 0
    rows = network.read(out)
    assert rows[0].over_dense is None
    assert "nan" not in page.read_text() + out.read_text().lower()  # there was no dense to compare with
    assert [row.bucket_view for row in rows] == [False, False, True, True], "what DDP itself says"
    titles = [str(table.title).removesuffix(": ms a step") for table in network.tables(rows)]
    assert titles == [rows[0].setting, rows[2].setting]
    assert "2 workers, loopback, gradients as bucket views" in capsys.readouterr().out


@shaped
def test_bytes_over_a_shaped_link_are_the_interfaces_own(tmp_path):
    out = tmp_path / "step.jsonl"
    rows = network.run([2], ["1gbit"], out, print, ways=["no exchange", "dense", "topk:0.001"], rounds=2)
    sent = {row.way: row.sent for row in rows}
    assert sent["no exchange"] < 2_000
    assert sent["dense"] == pytest.approx(4 * 11_173_962, rel=0.1)  # a ring of two sends all once
    assert sent["topk:0.001"] < 5.5 * 11_174
    assert {row.way: row.ms for row in rows}["dense"] > 300  # 45 MB take 0.36 s of such a link


@shaped
def test_hosts_are_gone_after_an_error():
    def namespaces():
        return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout

    names = []

    def interrupted():
        with hosts(2, "10mbit") as made:
            names.extend(made)
            assert all(name in namespaces() for name in names)
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert len(names) == 2
    assert not any(name in namespaces() for name in names)


def test_time_to_accuracy(tmp_path, capsys):
    out = tmp_path / "accuracy.jsonl"
    options = ["--task", "digits-wide", "--link", "loopback", "--target", "0.4", "--epochs", "1", "--every", "5"]
    ways = [part for way in ("dense", "PowerSGD rank 1", "topk:0.01") for part in ("--way", way)]
    assert main(["bench", "accuracy", *options, *ways, "--out", str(out)]) == 0
    rows = rows_of(out)
    assert [row["way"] for row in rows] == ["topk:0.01", "PowerSGD rank 1", "dense"]  # others are given up by ours
    for row in rows:
        assert row["seconds"] > 0
        assert row["steps"] % 5 == 0
        assert row["curve"][-1][-1] >= 0.4
    assert "time to accuracy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["step", "--way", "topk"], "way takes no exchange, dense"),
        (["step", "--way", "topk:0.001 stict"], "after it perhaps float32 and strict, not 'topk:0.001 stict'"),
        (["step", "--link", "fast"], "link takes loopback, unshaped, or a rate such as 100mbit"),
        (["accuracy", "--way", "PowerSGD"], "not 'PowerSGD'"),
        (["accuracy", "--task", "nothing"], "nothing"),
        (["accuracy", "--way", "no exchange"], "way takes what exchanges gradients here"),
        (["accuracy", "--plot", "curves.txt"], "ends in .png, .svg, .pdf, not curves.txt"),
        (["step", "--plot", "steps"], "ends in .png, .svg, .pdf, not steps"),
    ],
)
def test_what_is_wrong_is_said_before_ranks_start(arguments, said, tmp_path, monkeypatch, capsys):
    def untimely(*_, **__):
        raise AssertionError("started")

    monkeypatch.setattr(start, "start", untimely)
    assert main(["bench", *arguments, "--out", str(tmp_path / "rows.jsonl")]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "rows.jsonl").exists()


def test_ranks_that_drift_apart_have_no_time_to_tell():
    """PowerSGD that exchanges nothing at first is for steps whose result nobody needs."""
    options = {"target": 0.99, "epochs": 1, "every": 3, "seconds": 1.0, "seed": 0, "judged_by": 100, "data_dir": None}
    job = {"task": "digits", "way": "no exchange", **options}
    with pytest.raises(LabError, match="parameters differ under no exchange"):
        start.run_ranks("gradsieve.lab.bench.accuracy", job, 2, "loopback", limit=120)
    assert peer_of("PowerSGD rank 1")[2] is powerSGD_hook.powerSGD_hook
    assert peer_of("PowerSGD rank 1", idle=True)[2] is not powerSGD_hook.powerSGD_hook


def test_ways(monkeypatch):
    attached = {}
    monkeypatch.setattr("gradsieve.attach", lambda ddp, rule, **options: attached.update(options, rule=rule))
    check("threshold:auto float16 strict")
    for name in ("topk:0.001 float32 strict", "topk:0.001"):
        way_of(name)[1](None)
        exact = name.endswith("strict")
        assert attached["strict"] == exact
        assert attached["values"] == ("float32" if exact else "bfloat16")
    assert way_of("threshold:auto", 0.25)[1](None) is None
    assert attached["rule"] == gs.HardThreshold(0.25)
    with pytest.raises(LabError, match="way takes"):
        check("threshold:auto exact")


def test_the_cause_of_a_failure_is_the_line_that_names_an_error():
    lost = "Traceback\n[rank1]: RuntimeError: connection closed by peer\n"
    first = (
        "Traceback\n  File x\nValueError: Expected a cuda device, but got: cpu\n[rank0]: frame.py(630): decompress\n"
    )
    assert start._cause([first, lost]) == "ValueError: Expected a cuda device, but got: cpu"
    assert start._cause(["", lost]) == "[rank1]: RuntimeError: connection closed by peer"
    assert start._cause(["killed\n"]) == "killed"
    assert start._cause([""]) == "it said nothing"


def test_a_plot_of_few_rows(tmp_path):
    row = network.Row(
        "2026-01-01", "here", torch.__version__, 2, "loopback", "dense", 2.0, 1.0, 3.0, 10, None, 1.0, math.nan, {}
    )
    network.append([row], tmp_path / "rows.jsonl")
    network.plot(network.read(tmp_path / "rows.jsonl"), tmp_path / "rows.png")
    assert (tmp_path / "rows.png").exists()


@pytest.mark.parametrize(
    ("script", "options", "said"),
    [
        ("bytes", ["--size", "200000", "--steps", "6"], "| TopK | known | 0.100% |"),
        ("simulator", ["--workers", "4", "--size", "20000"], "4 workers x 20,000"),
        ("network", ["--help"], "--bucket-view"),
        ("ops", ["--help"], "--densities"),
    ],
)
def test_the_scripts_of_the_benchmarks_run(script, options, said):
    path = Path(gs.__file__).parents[2] / "benchmarks" / f"{script}.py"
    done = subprocess.run([sys.executable, path, *options], capture_output=True, text=True, timeout=55, check=False)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
