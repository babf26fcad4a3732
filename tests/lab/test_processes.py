"""The same training on virtual workers and on real ones."""

import pytest

from gradsieve.cli import main
from gradsieve.lab.records import read


@pytest.mark.timeout(180)
def test_real_processes_end_where_virtual_workers_do(tmp_path):
    common = ["compare", "--workers", "2", "--rule", "topk:0.02", "--epochs", "2", "--batch-size", "32"]
    assert main([*common, "--launch", "processes", "--out", str(tmp_path / "real")]) == 0
    assert main([*common, "--out", str(tmp_path / "virtual")]) == 0
    [real], [virtual] = read(tmp_path / "real"), read(tmp_path / "virtual")
    assert real.about.launch == "processes"
    assert real.end is not None
    assert real.last.bytes == virtual.last.bytes
    assert real.last.density == virtual.last.density
    assert real.last.accuracy == pytest.approx(virtual.last.accuracy, abs=0.02)  # vmap rounds gradients differently
