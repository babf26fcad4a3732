"""Papers, one package each: README.md, published.csv, and ENTRIES, its figures and tables that run."""

import importlib
import pkgutil
import re
from difflib import get_close_matches
from functools import cache

from gradsieve.lab.errors import LabError
from gradsieve.lab.papers.entry import Entry

__all__ = ["entries", "get"]


@cache
def entries() -> dict[str, Entry]:
    """All entries by key, papers in alphabetical order and figures by number.

    >>> "sahu2021/fig7" in entries()
    True
    """
    packages = [module.name for module in pkgutil.iter_modules(__path__) if module.ispkg]
    found = [entry for name in packages for entry in importlib.import_module(f"{__name__}.{name}").ENTRIES]
    return {entry.key: entry for entry in sorted(found, key=_order)}


def get(key: str) -> Entry:
    if key not in entries():
        near = get_close_matches(key, entries(), n=3)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise LabError(f"unknown entry {key!r}: {meant}gradsieve reproduce --list shows all")
    return entries()[key]


def _order(entry: Entry) -> tuple[str, str, int]:
    kind, number = re.fullmatch(r"([a-z]+)(\d+)\w*", entry.name).groups()  # type: ignore[union-attr]
    return entry.paper, kind, int(number)
