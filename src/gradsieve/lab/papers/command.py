"""What ``gradsieve reproduce`` does with its options."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from gradsieve.lab.errors import INTERRUPTED, LabError
from gradsieve.lab.papers import console, entries, get
from gradsieve.lab.papers.entry import Context
from gradsieve.lab.papers.reproduce import chosen, context_of, run
from gradsieve.lab.progress import Bars

HOME = Path("runs/papers")


@dataclass(frozen=True)
class Options:
    """The command line, checked by its parser."""

    data_dir: Path | None = None
    out: Path | None = None
    device: str = "cpu"
    seeds: int | None = None
    epochs: int | None = None
    quick: bool = False
    resume: bool = False
    trainings: Path | None = None
    jobs: int = 1
    compiled: bool = False


def listing() -> int:
    Console().print(console.listing(entries().values()))
    return 0


def reproduce(key: str | None, options: Options) -> int:
    """Runs one entry or all; of all, those without their data are named at the end and make the status 2."""
    missing: list[str] = []
    for entry in chosen(key, epochs=options.epochs, seeds=options.seeds, device=options.device):
        home = options.out or HOME
        own = home / entry.key if key == "all" or options.out is None else home
        context = Context(
            own,
            data_dir=options.data_dir,
            trainings=options.trainings or home / "trainings",
            device=options.device,
            epochs=options.epochs,
            quick=options.quick,
            resume=options.resume,
            jobs=options.jobs,
            compiled=options.compiled,
        )
        try:
            _one(entry.key, context, options.seeds)
        except LabError as error:
            if key != "all":
                raise
            missing.append(f"{entry.key}: {error}")
        except KeyboardInterrupt:
            print("gradsieve: interrupted; the same command with --resume goes on from here", file=sys.stderr)
            return INTERRUPTED
    if missing:
        raise LabError(f"not run: {'; '.join(missing)}")
    return 0


def _one(key: str, context: Context, seeds: int | None) -> None:
    entry = get(key)
    context = context_of(entry, context, seeds)
    with Bars() as bars:
        outcome = run(entry, replace(context, track=bars))
    shown = Console(soft_wrap=True)
    Console().print(console.table(f"{entry.key}: {entry.title}", outcome.rows))
    for line in [*outcome.notes, f"summary: {context.out / 'summary.json'}"]:
        shown.print(line, markup=False, highlight=False)
