"""Several rules on one task, one after the other: the job behind ``gradsieve compare``."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import gradsieve as gs
from gradsieve.lab import report
from gradsieve.lab.calibrate import budget_of, calibrate
from gradsieve.lab.errors import LabError
from gradsieve.lab.records import EndRow, EpochRow, Run, RunRow, StepRow, Writer, read
from gradsieve.lab.runner import Launcher, Options, run, simulator, virtual
from gradsieve.lab.tasks import Task
from gradsieve.lab.tasks.base import on_device
from gradsieve.types import Rule

AUTO = "threshold:auto"


class View(Protocol):
    """Who watches."""

    def calibrating(self, name: str, trial: int) -> None: ...

    def row(self, row: RunRow | StepRow | EpochRow | EndRow) -> None: ...


@dataclass(frozen=True)
class Entry:
    """A rule as the user named it; ``rule`` is None where it is to be calibrated."""

    name: str
    rule: Rule | None


@dataclass(frozen=True)
class Outcome:
    """The runs of a comparison, and whether all of them were made."""

    runs: list[Run]
    interrupted: bool


def entries(texts: Sequence[str]) -> list[Entry]:
    """The rules that the texts name; each may be named once.

    >>> entries(["dense", "threshold:auto"])
    [Entry(name='dense', rule=Dense()), Entry(name='threshold:auto', rule=None)]
    """
    found: list[Entry] = []
    for text in texts:
        if any(text == entry.name for entry in found):
            raise LabError(f"rule {text!r} is given twice")
        try:
            found.append(Entry(text, None if text == AUTO else gs.parse(text)))
        except ValueError as error:
            raise LabError(f"{error} (or {AUTO})" if "rules are" in str(error) else str(error)) from error
    return found


def compare(
    task: Task,
    rules: Sequence[str],
    options: Options,
    out: Path,
    view: View,
    *,
    title: str = "",
    launcher: Launcher = virtual,
) -> Outcome:
    """Trains every rule and leaves results.jsonl, summary.json, report.html and curves.png in ``out``.

    An interrupt ends the comparison there, with results.jsonl and summary.json: drawing takes seconds that someone
    who waits for a process to end does not have, and ``gradsieve report`` does it later.
    """
    plan = entries(rules)
    task = on_device(task, options.device)
    _refuse_what_cannot_run(task, plan, options)
    interrupted = started = False
    try:
        out.mkdir(parents=True, exist_ok=True)
        for stale in report.FILES:  # of an earlier run in the same place: no longer true
            (out / stale).unlink(missing_ok=True)
        with Writer(out) as writer:
            for entry in plan:
                rule, note = entry.rule, ""
                if rule is None:
                    rule, note = _calibrated(entry.name, plan, task, options, view)
                for row in run(task, rule, options, launcher, name=entry.name, title=title, note=note):
                    writer.write(row)
                    view.row(row)
                    started = True
    except KeyboardInterrupt:
        interrupted = True
    except OSError as error:
        raise LabError(f"cannot write to {out}: {error.strerror}") from error
    if not started:
        return Outcome([], interrupted)
    runs = read(out)
    if interrupted:
        report.summarise_only(out, runs)
    else:
        report.build(out)
    return Outcome(runs, interrupted)


def _refuse_what_cannot_run(task: Task, plan: Sequence[Entry], options: Options) -> None:
    """Before anything runs or is written, and before memory is taken for more workers than there is data for."""
    task.steps_per_epoch(options.workers, options.recipe(task).batch_size)
    few = replace(options, workers=min(2, options.workers))
    for entry in plan:
        simulator(task.model(options.seed), entry.rule or gs.HardThreshold(1.0), few)


def _calibrated(
    name: str, plan: Sequence[Entry], task: Task, options: Options, view: View
) -> tuple[gs.HardThreshold, str]:
    # counts and bytes are the same wherever they are counted
    here = replace(options, device="cpu", compiled=False)
    budget = budget_of([entry.rule for entry in plan if entry.rule is not None], task, here)
    found = calibrate(task, options, budget, lambda trial: view.calibrating(name, trial))
    return gs.HardThreshold(found.threshold), found.note
