"""The report: one file, nothing in it but text and drawings, from whatever the results hold."""

import json
import re
from html.parser import HTMLParser

import pytest

from gradsieve.lab import report
from gradsieve.lab.errors import LabError
from gradsieve.lab.records import EndRow, EpochRow, RunRow, StepRow, Writer, read
from gradsieve.lab.report.page import command, headline
from gradsieve.lab.summary import number, size, summarise

SCRIPT = "<script>alert(1)</script>"


def write(directory, names, epochs=3, error=2.0, end=True, title="a title", **about):
    with Writer(directory) as writer:
        for index, name in enumerate(names):
            fields = {
                "task": "digits", "description": "digits", "rule": "Dense()" if index == 0 else "TopK(density=0.01)",
                "workers": 4, "epochs": epochs, "seed": 0, "batch_size": 16, "lr": 0.1, "scope": "layer",
                "feedback": "gradient", "exchange": "auto", "values": "float32", "launch": "virtual",
                "parameters": 1000,
            }  # fmt: skip
            writer.write(RunRow(run=name, title=title, **{**fields, **about}))
            for epoch in range(1, epochs + 1):
                spent = 1e6 if index == 0 else 2e4
                writer.write(
                    StepRow(run=name, step=epoch, epoch=epoch, lr=0.1, loss=1.0, density=0.01, bytes=spent, error=error)
                )
                writer.write(
                    EpochRow(
                        run=name,
                        epoch=epoch,
                        step=epoch,
                        accuracy=0.9 + 0.01 * epoch,
                        test_loss=0.1,
                        density=0.01,
                        bytes=epoch * spent,
                        dense_bytes=epoch * 1e6,
                        deferred=0,
                        error=epoch * error,
                        seconds=epoch,
                    )
                )
            if end:
                writer.write(EndRow(run=name, seconds=epochs, phases={}))


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        self.found.append((tag, dict(attributes)))


@pytest.mark.parametrize("hostile", [SCRIPT, '"><img src=x onerror=alert(1)>', "{{ 7 * 7 }}", "$\\frac{$", "_hidden"])
def test_a_hostile_name_shows_as_text(tmp_path, hostile):
    write(tmp_path, ["dense", hostile], title=hostile, description=hostile, note=hostile, task=hostile, scope=hostile)
    report.build(tmp_path)
    text = (tmp_path / "report.html").read_text()
    tags = Tags()
    tags.feed(text)
    assert not [tag for tag, _ in tags.found if tag in ("script", "img", "iframe", "object", "link")]
    assert not [name for _, attributes in tags.found for name in attributes if name.startswith("on")]
    assert "49" not in re.findall(r"<h1>(.*?)</h1>", text)
    if hostile == SCRIPT:
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text


def test_the_file_is_light_and_asks_nothing_of_the_network(tmp_path):
    write(tmp_path, ["dense", "topk:0.01"], epochs=60)
    report.build(tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert len(text) < 1_000_000
    assert not re.findall(r"(?:src|href)=[\"'](?!#)", text.replace("xlink:href", "href"))
    assert "url(http" not in text
    assert text.count("<svg ") == 4
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_drawings_take_their_colours_from_the_page_and_share_no_ids(tmp_path):
    write(tmp_path, ["dense", "topk:0.01"])
    report.build(tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "var(--series-1)" in text
    drawings = re.findall(r"<svg .*?</svg>", text, flags=re.DOTALL)
    clips = [set(re.findall(r'<clipPath id="(.*?)"', drawing)) for drawing in drawings]
    assert len(set.union(*clips)) == sum(len(names) for names in clips)


@pytest.mark.parametrize("epochs", [0, 1])
def test_a_run_that_had_no_time_is_reported_too(tmp_path, epochs):
    write(tmp_path, ["dense"], epochs=epochs, end=False)
    report.build(tmp_path)
    assert "was interrupted" in (tmp_path / "report.html").read_text()


def test_a_diverged_run_is_reported_and_stays_json(tmp_path):
    write(tmp_path, ["dense", "topk:0.01"], error=float("nan"))
    for line in (tmp_path / "results.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)
    report.build(tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["runs"][0]["error"] is None


def test_many_runs_are_told_apart(tmp_path):
    write(tmp_path, [f"topk:0.{index:02}" for index in range(1, 12)])
    report.build(tmp_path)
    assert "swatch series-0 dashed" in (tmp_path / "report.html").read_text()


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path):
    write(tmp_path, ["dense"])
    results = tmp_path / "results.jsonl"
    results.write_text(results.read_text()[:-20])
    assert read(tmp_path)[0].end is None


@pytest.mark.parametrize(
    "line", ["{}", '{"kind": "epoch"}', "no json", '{"kind": "end", "run": "x", "seconds": 1, "phases": {}}']
)
def test_results_that_are_not_ours_are_refused_in_one_line(tmp_path, line):
    (tmp_path / "results.jsonl").write_text(line + "\n" + line + "\n")
    with pytest.raises(LabError) as caught:
        read(tmp_path)
    assert "\n" not in str(caught.value)
    assert "line 1" in str(caught.value)


def test_headline_and_command_say_what_was_run(tmp_path):
    write(tmp_path, ["dense", "topk:0.01"])
    runs = read(tmp_path)
    assert (
        headline(summarise(runs))
        == "topk:0.01 sent 50.0x fewer bytes than dense and reached 93.0%, where dense reached 93.0%."
    )
    assert "--rule dense --rule topk:0.01 --epochs 3 --seed 0" in command(runs)
    assert "--device" not in command(runs)
    elsewhere = {"device": "cuda", "compiled": True, "strict": False}
    there = runs[0].model_copy(update={"about": runs[0].about.model_copy(update=elsewhere)})
    assert command([there]).endswith("--no-strict --device cuda --compile")


def test_figures_are_short():
    assert [size(value) for value in (12, 3121, 3_121_000, 3_121_000_000)] == ["12 B", "3.12 kB", "3.12 MB", "3.12 GB"]
    assert [number(value) for value in (None, 0.0, 0.1234, 1240.0, 1.2e7)] == ["-", "0", "0.123", "1,240", "1.2e+07"]
