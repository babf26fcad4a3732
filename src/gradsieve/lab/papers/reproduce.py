"""Runs entries and writes what they came to: results.csv, the figure, summary.json."""

import csv
import io
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from gradsieve.lab.errors import LabError
from gradsieve.lab.papers import entries, get, plots
from gradsieve.lab.papers.entry import Context, Entry, Outcome
from gradsieve.lab.papers.summary import write_summary
from gradsieve.lab.papers.trainings import missing
from gradsieve.lab.records import write_file
from gradsieve.lab.runner import check_compiled
from gradsieve.lab.tasks.sources import folder_of
from gradsieve.version import __version__

QUICK = "a quick run: it shows that the entry works, and its numbers compare with nothing"


def context_of(entry: Entry, context: Context, seeds: int | None) -> Context:
    """The entry's own scale where the user chose none, or an error where the choice means nothing to it."""
    if context.device not in entry.devices:
        raise LabError(f"{entry.key} runs on {' or '.join(entry.devices)}, not on {context.device}")
    if context.epochs is not None and entry.epochs is None:
        raise LabError(f"{entry.key} has no epochs: leave --epochs out")
    if seeds is not None and entry.seeds is None:
        raise LabError(f"{entry.key} has no seeds: leave --seeds out")
    if entry.stages is None and (context.jobs > 1 or context.compiled):
        raise LabError(f"{entry.key} makes no trainings that are shared: leave --jobs and --compile out")
    data_dir = folder_of(context.data_dir)
    if data_dir is not None and not data_dir.is_dir():
        raise LabError(f"the data directory {data_dir} is not there")
    own = entry.quick_seeds if context.quick else entry.seeds
    context = replace(context, seeds=seeds or own or 1, data_dir=data_dir, started=time.perf_counter())
    entry.check(context)
    _check_device(entry, context)
    return context


def _check_device(entry: Entry, context: Context) -> None:
    """A machine without the GPU can draw what others have trained, and nothing else."""
    check_compiled(context.compiled, context.device)
    if context.device == "cpu" or torch.cuda.is_available():
        return
    if entry.stages is None:
        raise LabError(f"device {context.device}: PyTorch finds no GPU here")
    if lacking := missing(context, entry.stages(context)):
        raise LabError(
            f"device {context.device}: PyTorch finds no GPU here, and {context.store} lacks {len(lacking)} "
            f"of the next trainings, the first of them {lacking[0].title}"
        )


def chosen(key: str | None, *, epochs: int | None, seeds: int | None, device: str) -> list[Entry]:
    """The entries that a key names: one, or all that the other options make sense for."""
    if key is None:
        raise LabError("name an entry, such as sahu2021/fig7, or all, or give --list")
    if key != "all":
        return [get(key)]
    return [
        entry
        for entry in entries().values()
        if device in entry.devices and (epochs is None or entry.epochs) and (seeds is None or entry.seeds)
    ]


def run(entry: Entry, context: Context) -> Outcome:
    """Runs one entry and writes its files into ``context.out``."""
    with _writing(context.out):
        context.out.mkdir(parents=True, exist_ok=True)
        summary = context.out / "summary.json"
        before = summary.read_bytes() if summary.exists() else None
        write_file(summary, b'{"finished": false}\n')  # said before hours are spent
        try:
            outcome = entry.run(context)
        except (LabError, KeyboardInterrupt):
            if before is not None:  # the results are still those of before
                write_file(summary, before)
            raise
        if context.quick:
            outcome = _as_quick(outcome)
        _write(entry, context, outcome)
    return outcome


def _as_quick(outcome: Outcome) -> Outcome:
    """With the reason for whatever differs, where nothing else is one."""
    rows = [
        replace(row, why=row.why or "a quick run") if row.gap or row.holds is False else row for row in outcome.rows
    ]
    return replace(outcome, rows=rows, notes=[*outcome.notes, QUICK])


def _write(entry: Entry, context: Context, outcome: Outcome) -> None:
    write_file(context.out / "results.csv", _table(outcome.results))
    with plots.style():
        plots.save(outcome.figure, context.out / entry.name)
    about = {
        "entry": entry.key,
        "title": entry.title,
        "finished": True,
        "scale": "quick" if context.quick else "full",
        "seeds": context.seeds,
        "data": outcome.data,
        "device": context.device,
        "version": __version__,
        "seconds": round(time.perf_counter() - context.started, 1),
    }
    write_summary(context.out / "summary.json", about, outcome.rows, outcome.notes)


def _table(results: Sequence[dict[str, float | int | str]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(results[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(results)
    return text.getvalue().encode()


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.filename is not None and not str(error.filename).startswith(str(directory)):
            raise  # a file of the data
        raise LabError(f"cannot write to {directory}: {error.strerror}") from error
