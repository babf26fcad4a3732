"""The command line: the demo in small, bad command lines, full and read-only directories, signals."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

import gradsieve as gs
from gradsieve.cli import app, main
from gradsieve.lab.records import read

QUICK = ["--epochs", "1", "--batch-size", "64"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "gradsieve.cli", *arguments]


@pytest.fixture
def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def test_compare_and_report(tmp_path, capsys):
    out = tmp_path / "out"
    rules = ["--rule", "dense", "--rule", "topk:0.01", "--rule", "threshold:auto"]
    assert main(["compare", *rules, *QUICK, "--out", str(out), "--name", "<b>bold</b>"]) == 0
    printed = capsys.readouterr().out
    assert "calibrated from the published 1/(2 sqrt k)" in printed
    assert all(rule in printed for rule in ("dense", "topk:0.01", "threshold:auto"))
    assert (
        max(len(line) for line in printed.splitlines() if "threshold:auto:" not in line and "report:" not in line) <= 80
    )
    summary = json.loads((out / "summary.json").read_text())
    dense, topk, threshold = summary["runs"]
    assert dense["times_less"] == pytest.approx(1.0)
    assert topk["times_less"] > 30
    assert threshold["bytes"] <= topk["bytes"]
    assert threshold["density"] <= topk["density"]
    (out / "report.html").unlink()
    assert main(["report", str(out)]) == 0
    assert "&lt;b&gt;bold&lt;/b&gt;" in (out / "report.html").read_text()


def test_help_has_examples_and_no_arguments_is_help(capsys):
    for arguments in (["--help"], ["compare", "--help"], ["report", "--help"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0
        assert "gradsieve" in result.output
    assert "gradsieve compare --task cifar" in CliRunner().invoke(app, ["compare", "--help"]).output
    assert main([]) == 0
    assert "compare" in capsys.readouterr().out


BAD = [
    ["bogus"],
    ["compare", "--bogus"],
    ["compare", "stray"],
    ["compare", "--task", "imagenet"],
    ["compare", "--task", ""],
    ["compare", "--rule", "nope"],
    ["compare", "--rule", ""],
    ["compare", "--rule", "topk"],
    ["compare", "--rule", "topk:"],
    ["compare", "--rule", "topk:much"],
    ["compare", "--rule", "topk:0"],
    ["compare", "--rule", "topk:2"],
    ["compare", "--rule", "topk:nan"],
    ["compare", "--rule", "topk:0.1,0.2,0.3"],
    ["compare", "--rule", "threshold:-1"],
    ["compare", "--rule", "threshold:automatic"],
    ["compare", "--rule", "dense", "--rule", "dense"],
    ["compare", "--rule"],
    ["compare", "--workers", "0"],
    ["compare", "--workers", "many"],
    ["compare", "--workers", "100000"],
    ["compare", "--epochs", "0"],
    ["compare", "--epochs", "1.5"],
    ["compare", "--seed", "-1"],
    ["compare", "--seed", "99999999999999999999"],
    ["compare", "--scope", "planet"],
    ["compare", "--feedback", "always"],
    ["compare", "--exchange", "carrier-pigeon"],
    ["compare", "--exchange", "allreduce", "--rule", "topk:0.01"],
    ["compare", "--values", "int1"],
    ["compare", "--batch-size", "0"],
    ["compare", "--batch-size", "100000"],
    ["compare", "--lr", "0"],
    ["compare", "--lr", "nan"],
    ["compare", "--lr", "fast"],
    ["compare", "--task", "cifar", "--data-dir", "/nowhere"],
    ["report"],
    ["report", "/nowhere"],
]


@pytest.mark.parametrize("arguments", BAD, ids=" ".join)
def test_a_bad_command_line_is_one_line_and_exit_2(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    lines = captured.err.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("gradsieve: ")
    assert len(lines[0]) > len("gradsieve: ")
    assert "Traceback" not in captured.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "accepted"),
    [
        (["--task", "imagenet"], "cifar-wide, digits"),
        (["--rule", "nope"], "threshold:auto"),
        (["--scope", "planet"], "'layer', 'bucket', 'global'"),
        (["--values", "int1"], "'bfloat16'"),
    ],
)
def test_a_wrong_value_lists_what_is_accepted(arguments, accepted, capsys):
    assert main(["compare", *arguments]) == 2
    assert accepted in capsys.readouterr().err


def check_refused(finished: subprocess.CompletedProcess[str], why: str) -> None:
    assert finished.returncode == 2
    problem = [line for line in finished.stderr.splitlines() if line.startswith("gradsieve: ")]
    assert len(problem) == 1
    assert why in problem[0]
    assert "Traceback" not in finished.stderr


def test_a_directory_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["compare", "--rule", "dense", *QUICK, "--out", str(tmp_path / "file" / "out")]) == 2
    assert main(["compare", "--rule", "dense", *QUICK, "--out", "/proc/gradsieve"]) == 2
    problems = [line for line in capsys.readouterr().err.splitlines() if line.startswith("gradsieve: cannot write to")]
    assert len(problems) == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has a device that is always full")
def test_a_full_disk(tmp_path, environment):
    (tmp_path / "results.jsonl").symlink_to("/dev/full")
    finished = subprocess.run(
        command("compare", "--rule", "dense", *QUICK, "--out", str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    check_refused(finished, "No space left on device")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_within_5_seconds_with_what_there_is(tmp_path, environment, number):
    arguments = command(
        "compare", "--rule", "dense", "--rule", "topk:0.01", "--epochs", "100000", "--out", str(tmp_path)
    )
    with subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        deadline = time.monotonic() + 60
        results = tmp_path / "results.jsonl"
        while not (results.exists() and '"kind":"epoch"' in results.read_text()) and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(number)
        sent = time.monotonic()
        output, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert time.monotonic() - sent < 5
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert "dense *" in output
    (run,) = read(tmp_path)
    assert run.end is None
    assert run.last is not None
    assert not json.loads((tmp_path / "summary.json").read_text())["runs"][0]["finished"]
    assert main(["report", str(tmp_path)]) == 0
    assert "was interrupted" in (tmp_path / "report.html").read_text()


def test_it_says_its_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"gradsieve {gs.__version__}\n"
