"""What the terminal shows of a reproduction: the paper's numbers beside ours."""

from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from gradsieve.lab.papers.entry import Entry
from gradsieve.lab.papers.summary import Row


def listing(entries: Iterable[Entry]) -> Table:
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1))
    shown.add_column("entry", no_wrap=True)  # to be copied
    for heading in ("what", "needs"):
        shown.add_column(heading, overflow="fold")
    for entry in entries:
        shown.add_row(Text(entry.key), Text(entry.title), Text(entry.needs or "nothing"))
    return shown


def table(title: str, rows: Sequence[Row]) -> Table:
    shown = Table(title=Text(title), box=SIMPLE_HEAD, title_style="bold", padding=(0, 1))
    shown.add_column("what", overflow="fold")
    for heading in ("published", "ours", "gap"):
        shown.add_column(heading, justify="right")
    for row in rows:
        digits = 10 if row.gap is not None and abs(row.gap) < 1e-3 else 4  # more only where they are compared
        theirs = f"{row.bound} {number(row.published, digits)}".strip()
        shown.add_row(Text(row.what), Text(theirs), Text(number(row.ours, digits)), Text(verdict(row)))
    return shown


def verdict(row: Row) -> str:
    """How far ours is from the paper's number, or whether the paper's bound holds.

    >>> verdict(Row("", 8.0, 9.35, 9.35 / 8 - 1, "")), verdict(Row("", 1.0, 0.9, None, "", "", "at least", False))
    ('+17%', 'does not hold')
    """
    if row.holds is not None:
        return "holds" if row.holds else "does not hold"
    if row.gap is None:
        return ""
    percent = 100 * row.gap
    return f"{percent:+,.0f}%" if abs(percent) >= 9.5 else f"{percent:+.2g}%"


def number(value: float | None, digits: int = 4) -> str:
    """A figure of any magnitude.

    >>> number(29790805.64933511, 10), number(14896.89), number(5e-12), number(None)
    ('29,790,805.65', '14,897', '5e-12', '')
    """
    if value is None:
        return ""
    return f"{value:,.0f}" if digits == 4 and 1e3 <= abs(value) < 1e7 else f"{value:,.{digits}g}"
