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
from gradsieve.lab.runner import check_compiled

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
    check_compiled(options.compiled, options.device)
    missing: dict[str, list[str]] = {}  # what could not be run, by the reason
    wanted = chosen(key, epochs=options.epochs, seeds=options.seeds, device=options.device)
    for number, entry in enumerate(wanted, start=1):
        if len(wanted) > 1:
            print(f"{number}/{len(wanted)} {entry.key}: {entry.title}", file=sys.stderr, flush=True)
        home = options.out or HOME
        shares = key != "all" or entry.stages is not None
        own = home / entry.key if key == "all" or options.out is None else home
        context = Context(
            own,
            data_dir=options.data_dir,
            trainings=options.trainings or home / "trainings",
            device=options.device,
            epochs=options.epochs,
            quick=options.quick,
            resume=options.resume,
            jobs=options.jobs if shares else 1,
            compiled=options.compiled and shares,
        )
        try:
            _one(entry.key, context, options.seeds)
        except LabError as error:
            if key != "all":
                raise
            missing.setdefault(str(error).removeprefix(f"{entry.key} "), []).append(entry.key)
        except KeyboardInterrupt:
            print("gradsieve: interrupted; the same command with --resume goes on from here", file=sys.stderr)
            return INTERRUPTED
    if missing:
        raise LabError("not run: " + "; ".join(f"{', '.join(keys)}: {why}" for why, keys in missing.items()))
    return 0


def _one(key: str, context: Context, seeds: int | None) -> None:
    entry = get(key)
    context = context_of(entry, context, seeds)
    with Bars(title=key) as bars:
        outcome = run(entry, replace(context, track=bars))
    shown = Console(soft_wrap=True)
    Console().print(console.table(f"{entry.key}: {entry.title}", outcome.rows))
    for line in [*outcome.notes, f"summary: {context.out / 'summary.json'}"]:
        shown.print(line, markup=False, highlight=False)
