"""Bars where somebody looks, lines where a log is kept."""

import pytest

from gradsieve.lab import progress
from gradsieve.lab.errors import LabError


@pytest.fixture
def often(monkeypatch):
    monkeypatch.setattr(progress, "PAUSE", 0.0)


def test_a_log_gets_lines_and_no_bars(often, capsys):
    with progress.Bars(["dense", "topk"]) as bars:
        bars("dense", 1, 4, "epoch 1/4")
        bars("dense", 2, 4)
        bars.restart("dense")
        bars("dense", 1, 4)
        bars("new", 5, 5)
    out, said = capsys.readouterr()
    assert out == ""
    lines = [line.split(", ") for line in said.splitlines()]
    assert [line[0] for line in lines] == ["dense: 25%", "dense: 50%", "dense: 25%", "new: 100%"]
    assert [line[1] for line in lines] == ["epoch 1/4", "epoch 1/4", "0:00:00 so far", "0:00:00 so far"]


def test_a_log_is_not_flooded(capsys):
    with progress.Bars() as bars:
        for done in range(1000):
            bars("part", done, 1000)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_bars_that_go_with_an_error(often, monkeypatch, capsys):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TTY_INTERACTIVE", "1")
    with progress.Bars(["dense"]) as bars:
        bars("dense", 1, 2, "half")
    assert "half" in capsys.readouterr().err
    with pytest.raises(LabError):
        break_off()
    assert capsys.readouterr().err.endswith("\x1b[2K")  # the bar's line is taken back


def break_off():
    with progress.Bars(["dense"]) as bars:
        bars("dense", 1, 2, "half")
        raise LabError("no data")
