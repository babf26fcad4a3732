"""The paper's number beside ours: published.csv, one row a comparison, summary.json."""

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from gradsieve.lab.records import write_file
from gradsieve.lab.summary import finite

PAPERS = Path(__file__).parent


@dataclass(frozen=True)
class Published:
    """A number that a paper prints: for which entry, its short name, and where it stands.

    ``bound`` is ``"at least"`` or ``"at most"`` where the paper gives no more than that.
    """

    entry: str
    name: str
    value: float
    bound: str
    what: str
    source: str

    def holds(self, ours: float) -> bool | None:
        """Whether ours is on the paper's side of a bound; None of a number that is to be met.

        >>> Published("fig", "name", 5e-12, "at most", "f - f*", "p. 28").holds(1.9e-12)
        True
        """
        return {"at least": ours >= self.value, "at most": ours <= self.value}.get(self.bound)


@dataclass(frozen=True)
class Row:
    """One comparison. ``gap`` is ours / published - 1; None where the paper prints no number, or a bound: ``holds``
    says then whether it does."""

    what: str
    published: float | None
    ours: float
    gap: float | None
    why: str
    source: str = ""
    bound: str = ""
    holds: bool | None = None


@cache
def published(paper: str) -> tuple[Published, ...]:
    """All numbers of a paper's published.csv."""
    with (PAPERS / paper / "published.csv").open(encoding="utf-8", newline="") as file:
        return tuple(Published(**{**row, "value": float(row["value"])}) for row in csv.DictReader(file))  # type: ignore[arg-type]


class Comparison:
    """Collects the rows of one entry."""

    def __init__(self, key: str) -> None:
        paper, _, entry = key.partition("/")
        self._known = {row.name: row for row in published(paper) if entry in row.entry.split()}
        self.rows: list[Row] = []

    def against(self, name: str, ours: float, why: str = "") -> None:
        """Our value of a published number."""
        row = self._known[name]
        gap = None if row.bound else ours / row.value - 1
        self.rows.append(Row(row.what, row.value, ours, gap, why, row.source, row.bound, row.holds(ours)))

    def alone(self, what: str, ours: float, why: str = "") -> None:
        """A number that the paper claims in words, or that explains another."""
        self.rows.append(Row(what, None, ours, None, why))

    def value(self, name: str) -> float:
        return self._known[name].value


def write_summary(path: Path, about: dict[str, object], rows: Sequence[Row], notes: Sequence[str]) -> None:
    content = {**about, "rows": [asdict(row) for row in rows], "notes": list(notes)}
    write_file(path, (json.dumps(finite(content), indent=2, allow_nan=False) + "\n").encode())
