"""From results to one HTML file and one picture. Reads results.jsonl; never trains."""

from pathlib import Path

from gradsieve.lab.errors import LabError
from gradsieve.lab.records import read, write_file
from gradsieve.lab.report.charts import picture
from gradsieve.lab.report.page import page
from gradsieve.lab.summary import write_summary

__all__ = ["build"]


def build(directory: Path) -> None:
    """Writes summary.json, report.html and curves.png beside the results.jsonl of ``directory``."""
    runs = read(directory)
    try:
        write_summary(directory, runs)
        write_file(directory / "curves.png", picture(runs))
        write_file(directory / "report.html", page(runs).encode())
    except OSError as error:
        raise LabError(f"cannot write to {directory}: {error.strerror}") from error
