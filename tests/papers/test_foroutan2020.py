"""Both tables: which trainings a cell is made of, what the claims count, and real ranks at a small scale."""

import json
from dataclasses import replace

import pytest

from gradsieve.lab.errors import LabError
from gradsieve.lab.papers import get
from gradsieve.lab.papers.entry import Context
from gradsieve.lab.papers.foroutan2020 import breakdown, claims, steps, table1, table2
from gradsieve.lab.papers.foroutan2020.breakdown import Breakdown
from gradsieve.lab.papers.foroutan2020.configurations import ALL, SPARSE
from gradsieve.lab.papers.foroutan2020.rank import ALONE, PARTS
from gradsieve.lab.papers.summary import Comparison


def test_the_claims_of_the_papers_own_table_are_what_is_published():
    """Each number that published.csv derives from Table 1 is what our counting makes of Table 1."""
    known = Comparison(table1.KEY)
    for name, value in claims.all_of(table1.published()).items():
        assert value == pytest.approx(known.value(name), rel=1e-5), name


def test_claims_are_counted_cell_by_cell():
    level = dict.fromkeys(claims.CELLS, 50.0)
    told = claims.all_of(level)
    assert told["layer"] == 0, "equal is not above"
    assert told["topk-best"] == 8, "equal is not better than top-k"
    assert told["block-reduce-global-held"] == 1.0
    assert told["random-apart"] == 0.0
    changed = level | {
        ("topk", "layer", 4): 60.0,
        ("block-reduce", "global", 8): 40.0,
        ("random-gather", "global", 2): 53.0,
        ("sgd", "layer", 1): 90.0,
    }
    told = claims.all_of(changed)
    assert told["layer"] == 2
    assert told["topk-best"] == 7
    assert told["block-reduce-global-held"] == pytest.approx(0.8)
    assert told["block-reduce-layer-held"] == told["block-gather-global-held"] == 1.0
    assert told["random-apart"] == pytest.approx(3.0)


def test_the_rows_say_what_differs_from_the_paper():
    rows = {row.what: row for row in table1.compare(table1.published(), 30, "cifar").rows}
    row = rows["Block-random-k (allReduce), global, W = 8: test accuracy, %"]
    assert (row.published, row.ours, row.gap) == (78.11, 78.11, 0.0)
    assert row.why == "30 epochs instead of 300; cifar instead of ResNet-18"
    assert table1.compare(table1.published(), 300, "cifar-resnet18").rows[0].why == ""
    assert len(rows) == 44 + 7, "scope is nothing to standard SGD"


def test_the_trainings_are_those_of_the_paper(tmp_path):
    context = Context(tmp_path, device="cuda")
    cells = table1.cells(context)
    (arms,) = table1.stages(context)
    assert len(cells) == 48
    assert len(arms) == len(set(arms)) == 4 + 2 * (4 + 4 + 3 + 4 + 3)
    assert {arm.task for arm in arms} == {"cifar-resnet18"}
    assert {arm.batch_size for arm in arms} == {128}
    assert {arm.epochs for arm in arms} == {300}
    for (key, scope, workers), (arm,) in cells.items():
        assert arm.workers == workers
        assert arm.lr == pytest.approx((0.01 if scope == "global" and key != "sgd" else 0.1) * workers)
        assert arm.scope == (scope if key != "sgd" else "layer")
        assert arm.rule == ("dense" if key == "sgd" else arm.rule)
        if key.endswith("-reduce"):
            assert arm.exchange == ("allreduce" if workers > 1 else "allgather")
            assert arm.seed == 0
    assert cells["sgd", "layer", 4] == cells["sgd", "global", 4]
    assert cells["block-reduce", "global", 1] == cells["block-gather", "global", 1]
    assert cells["block-reduce", "global", 2] != cells["block-gather", "global", 2]
    assert table1.task(Context(tmp_path)) == "cifar"
    shorter = Context(tmp_path, device="cuda", epochs=20, seeds=2)
    (fewer,) = table1.stages(shorter)
    assert {arm.epochs for arm in fewer} == {20}
    assert len(fewer) == 2 * len(arms)


def test_equal_steps_take_more_epochs_of_more_workers(tmp_path):
    context = Context(tmp_path, device="cuda", epochs=10)
    cells, usual = steps.cells(context), table1.cells(context)
    assert [cells["block-gather", "layer", count][0].epochs for count in (1, 2, 4, 8)] == [10, 20, 40, 80]
    assert cells["block-reduce", "layer", 1] == usual["block-reduce", "layer", 1], "one worker is Table 1's"
    assert cells["block-reduce", "layer", 8] == table1.cells(replace(context, epochs=80))["block-reduce", "layer", 8]
    (arms,) = steps.stages(context)
    assert len(arms) == 7, "one worker's two exchanges are one training"


def test_equal_steps_at_a_small_scale(tmp_path):
    outcome = steps.run(Context(tmp_path, quick=True))
    assert [row["epochs"] for row in outcome.results] == [1, 2, 4, 8] * 2
    told = {row.what: row for row in outcome.rows}
    for exchange in ("allGather", "allReduce"):
        one, eight = (told[f"Block-random-k ({exchange}), layer, W = {w}: test accuracy, %"].ours for w in (1, 8))
        held = told[f"Block-random-k ({exchange}), layer: accuracy with 8 workers over that with 1"]
        assert held.ours == pytest.approx(eight / one)


def test_missing_images_are_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.delenv("GRADSIEVE_DATA", raising=False)
    with pytest.raises(LabError, match="CIFAR-10 needs its data"):
        get(table1.KEY).check(Context(tmp_path))
    get(table1.KEY).check(Context(tmp_path, quick=True))


def test_table_1_at_a_small_scale(tmp_path):
    outcome = table1.run(Context(tmp_path, quick=True))
    assert len(outcome.results) == 48
    by_cell = {(row["configuration"], row["scope"], row["workers"]): row for row in outcome.results}
    for (name, _, _), row in by_cell.items():
        assert 0 < row["accuracy"] <= 100
        assert row["density"] == pytest.approx(1.0 if name == "Standard SGD" else 0.01, rel=0.1)
    gathered, reduced = (by_cell[f"Random-k ({way})", "layer", 8] for way in ("allGather", "allReduce"))
    assert gathered["megabytes"] > 2 * reduced["megabytes"], "an all-reduce carries no indices and no copies"
    whole, part = (by_cell["Standard SGD", "layer", 8], by_cell["Top-k", "layer", 8])
    assert whole["accuracy"] > by_cell["Random-k (allGather)", "global", 8]["accuracy"]
    assert part["megabytes"] < 0.2 * whole["megabytes"]
    panels = outcome.figure.axes
    assert [axes.get_title(loc="left") for axes in panels] == ["layer scope", "global scope"]
    assert all(len(axes.lines) == 2 * len(ALL) for axes in panels), "ours, and the paper's"


def made(**parts):
    return Breakdown(dict.fromkeys(PARTS, 0.0) | {"forward": 30.0, "backward": 60.0} | parts, 0.0, 0.0)


def test_parts_are_medians_over_steps_and_waiting_is_not_what_the_exchange_adds():
    order = ("forward", "backward", "coding", "waiting", "exchange", "decoding")
    assert order == PARTS
    found = breakdown.of_steps([[1, 2, 0.1, 5, 0.3, 0], [1, 4, 0.1, 50, 0.2, 0], [1, 3, 0.1, 500, 0.1, 0]])
    assert found.parts == pytest.approx(dict(zip(order, (1000, 3000, 100, 50_000, 200, 0), strict=True)))
    assert found.computing == pytest.approx(4000)
    assert found.added == pytest.approx(300)
    assert (found.low, found.high) == pytest.approx((200, 400))


def test_the_claims_of_table_2():
    found = {kind.key: made(coding=20.0, exchange=1.0, decoding=4.0, waiting=99.0) for kind in ALL}
    found |= {"sgd": made(exchange=10.0), "block-reduce": made(exchange=1.0), ALONE: made(forward=31.0)}
    rows = {row.what: row for row in table2.compare(found, 8, 128).rows}
    assert rows["step time: Top-k over Standard SGD"].ours == pytest.approx(115 / 100)
    assert rows["step time: Block-random-k (allReduce) over Standard SGD"].ours == pytest.approx(91 / 100)
    assert rows["step time: Top-k over Standard SGD"].holds
    assert "10.0% is what the exchange adds" in rows["step time: Top-k over Standard SGD"].why
    assert rows["forward and backward: the slowest configuration over the fastest"].ours == pytest.approx(91 / 90)
    assert rows["Top-k: what it adds to computing, over Standard SGD"].ours == pytest.approx(2.5)
    for kind in SPARSE:
        names = ("forward and backward", "the exchange", "coding and decoding")
        assert sum(rows[f"{kind.name}: share of {name}"].ours for name in names) == pytest.approx(1.0)
    assert rows["workers"].gap == 0.0


def test_the_link_is_the_papers_where_it_can_be(monkeypatch):
    assert breakdown.link(True)[0] == "loopback"
    monkeypatch.setattr(breakdown, "links", lambda wanted: (wanted, None))
    assert breakdown.link(False) == ("10gbit", "")
    monkeypatch.setattr(breakdown, "links", lambda wanted: (["loopback"], "needs root"))
    assert breakdown.link(False) == ("loopback", "no shaped links here (needs root)")


def test_table_2_on_two_real_ranks(tmp_path):
    outcome = table2.run(Context(tmp_path, quick=True))
    by_part = {(row["configuration"], row["part"]): row["milliseconds"] for row in outcome.results}
    assert len(by_part) == len(outcome.results) == len(PARTS) * (1 + len(ALL))
    for kind in ALL:
        for part in ("forward", "backward", "waiting", "exchange"):
            assert by_part[kind.name, part] > 0, (kind.name, part)
    for kind in SPARSE:
        assert by_part[kind.name, "coding"] > 0
        assert by_part[kind.name, "decoding"] > 0
    assert by_part["No exchange", "exchange"] == by_part["No exchange", "coding"] == 0.0
    assert "loopback" in json.dumps(outcome.notes)
    bars = outcome.figure.axes[0].patches
    assert len(bars) == len(ALL) * (len(PARTS) - 1)
