"""From results to one HTML file and one picture. Reads results.jsonl; never trains."""

from collections.abc import Sequence
from pathlib import Path

from gradsieve.lab.errors import LabError
from gradsieve.lab.records import Run, read, write_file
from gradsieve.lab.report.charts import picture
from gradsieve.lab.report.page import page
from gradsieve.lab.summary import write_summary

__all__ = ["FILES", "build", "summarise_only"]

FILES = ("summary.json", "curves.png", "report.html")
"""What ``build`` writes."""


def build(directory: Path) -> None:
    """Writes summary.json, curves.png and report.html beside the results.jsonl of ``directory``."""
    runs = read(directory)
    summarise_only(directory, runs)
    try:
        write_file(directory / "curves.png", picture(runs))
        write_file(directory / "report.html", page(runs).encode())
    except OSError as error:
        raise LabError(f"cannot write to {directory}: {error.strerror}") from error


def summarise_only(directory: Path, runs: Sequence[Run]) -> None:
    """Writes summary.json and draws nothing."""
    try:
        write_summary(directory, runs)
    except OSError as error:
        raise LabError(f"cannot write to {directory}: {error.strerror}") from error
